"""The door: the arrays of a public call are checked once, by the annotations of its signature.

    @door("causal_conv", weight="Pass one weight for each tap and channel.")
    def causal_conv(x: Float[HostOrDevice, "B T C"], weight: Float[HostOrDevice, "W C"], *, ...):

A public function has this decorator, outside of `jax.jit`; keywords say what to do about a wrong
shape. The keywords of a TypedDict that it unpacks, which several functions share, are part of its
signature. The door checks parameters annotated with one array type of jaxtyping, its union with
None, or a `PyTree` of it, which needs an array; it lets every other annotation pass. Arrays are
those of JAX, also traced, and NumPy, or their shape and dtype. A name has one size in all arguments
of a call: the first one with it sets it. After it, `*H` is that axis or none, and `H-1` is
computed. Below the door nothing checks this again. What annotations cannot say (equal dtypes, sizes
that divide others, values) the function checks itself. Where other arguments decide on the types,
`check_annotated` checks arrays by the annotations of a private function or class. Errors are
TypeError for other types and dtypes, ValueError for shapes.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ARRAYS = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)
# Of dtypes, in jaxtyping and in NumPy; others are of one dtype.
_KINDS: dict[str, tuple[Any, str]] = {
    "Shaped": (np.generic, ""),
    "Num": (jnp.number, "numbers "),
    "Float": (jnp.floating, "floats "),
    "Integer": (jnp.integer, "integers "),
    "Int": (jnp.integer, "integers "),
    "Bool": (jnp.bool_, "booleans "),
}


class _Need(NamedTuple):
    """What an annotation says: the kind of dtype, also in words, and the dimensions."""

    kind: Any
    words: str
    dims: tuple[str, ...]
    is_tree: bool


def door(op: str, **next_steps: str) -> Callable[[_Function], _Function]:
    """Returns the decorator of a public function; `op` is its name in errors."""

    def decorate(function: _Function) -> _Function:
        signature = _with_shared_keywords(function)

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            try:
                given = signature.bind(*args, **options).arguments
            except TypeError as error:  # an argument is missing or unknown
                raise TypeError(f"{op}: {error}. {_similar(signature, options)}") from None
            check_annotated(op, function, given, next_steps)
            return function(*args, **options)

        setattr(checked, "__signature__", signature)  # noqa: B010
        return typing.cast(_Function, checked)

    return decorate


def _similar(signature: inspect.Signature, options: Mapping[str, Any]) -> str:
    """Returns the next step after arguments that do not fit."""
    names = list(signature.parameters)
    for unknown in (x for x in options if x not in names):
        if similar := difflib.get_close_matches(unknown, names, 1):
            return f"Did you mean {similar[0]}?"
    return f"It takes {', '.join(names)}."


def _with_shared_keywords(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature; keywords of an unpacked TypedDict come first, None unless required."""
    signature = inspect.signature(function)
    *own, last = signature.parameters.values()
    hint = last.kind == last.VAR_KEYWORD and typing.get_type_hints(function).get(last.name)
    if typing.get_origin(hint) is not typing.Unpack:
        return signature
    (shared,) = typing.get_args(hint)
    keywords = []
    for name, hint in shared.__annotations__.items():
        text, default = hint.__forward_arg__, None
        if text.startswith("Required["):
            text, default = text[len("Required[") : -1], last.empty
        keyword = last.replace(name=name, kind=last.KEYWORD_ONLY, default=default, annotation=text)
        keywords.append(keyword)
    first = sum(x.kind != last.KEYWORD_ONLY for x in own)
    return signature.replace(parameters=[*own[:first], *keywords, *own[first:]])


def check_annotated(
    op: str, annotated: Any, given: Mapping[str, Any], next_steps: Mapping[str, str] | None = None
) -> None:
    """Requires arrays, given by name, as a function or a class annotates them; see `door`."""
    arrays = []
    for name, (need, is_optional) in _needs(annotated).items():
        x = given.get(name)
        if x is None and (is_optional or name not in given):
            continue
        leaves = [(name, x)]
        if need.is_tree:
            with_paths = jax.tree_util.tree_leaves_with_path(x)
            leaves = [(name + jax.tree_util.keystr(path), x) for path, x in with_paths]
        if not leaves:
            needs = ", ".join(need.dims)
            raise ValueError(f"{op}: {name} has no arrays; it needs at least one of [{needs}].")
        for at, x in leaves:
            if not isinstance(x, _ARRAYS):
                remedy = "Pass it." if x is None else f"Pass numpy.asarray({at})."
                raise TypeError(
                    f"{op}: {at} is of type {type(x).__name__}; it needs to be an array. {remedy}"
                )
            arrays.append((name, at, x.shape, x.dtype))
    fault = _fault(annotated, tuple(arrays))
    if fault is not None:
        error, name, text = fault
        next_step = (next_steps or {}).get(name, "Pass an array of these dimensions.")
        raise error(f"{op}: {text}. {'Cast it.' if error is TypeError else next_step}")


@functools.cache
def _needs(annotated: Any) -> dict[str, tuple[_Need, bool]]:
    """Returns what each parameter needs, and whether it may be None."""
    needs, hints = {}, list(typing.get_type_hints(annotated).items())
    for name, hint in hints:
        if typing.get_origin(hint) is typing.Unpack:
            hints += typing.get_type_hints(*typing.get_args(hint)).items()
        found, kinds = set(), [(hint, False)]
        for kind, is_tree in kinds:
            if typing.get_origin(kind) in (typing.Union, types.UnionType):
                kinds += [(x, is_tree) for x in typing.get_args(kind)]
            elif hasattr(kind, "leaftype"):
                kinds.append((kind.leaftype, True))
            elif hasattr(kind, "dim_str"):
                dtype = kind.dtype.__name__
                of_dtype = _KINDS.get(dtype, (dtype.lower(), f"{dtype.lower()} "))
                found.add(_Need(*of_dtype, tuple(kind.dim_str.split()), is_tree))
            else:
                found.add(None if kind is type(None) else "another")
        is_optional = None in found
        found.discard(None)
        if name != "return" and len(found) == 1 and isinstance(need := found.pop(), _Need):
            needs[name] = need, is_optional
    return needs


@functools.lru_cache(maxsize=1024)  # a model makes the same call in every layer
def _fault(
    annotated: Any, arrays: tuple[tuple[str, str, tuple[Any, ...], Any], ...]
) -> tuple[type[Exception], str, str] | None:
    """Returns the class of the error, the parameter and the text, or None if all arrays fit.

    Each of `arrays` has a parameter, a name, a shape and a dtype.
    """
    bound: dict[str, tuple[Any, str]] = {}  # the size of each name, and the array that set it
    for name, at, shape, dtype in arrays:
        need, _ = _needs(annotated)[name]
        is_of_kind, is_right = jnp.issubdtype(dtype, need.kind), True
        sizes = {dim: size for dim, (size, _) in bound.items()}
        dims, axes = list(need.dims), list(shape)
        several = next((dim for dim in dims if dim[0] in ".*"), None)
        if several is not None:
            begin = dims.index(several)
            end = max(begin, begin + 1 + len(axes) - len(dims))
            found = tuple(axes[begin:end])
            known = found if several == "..." else sizes.setdefault(several[1:], found)
            is_right = found in ([known] if isinstance(known, tuple) else [(), (known,)])
            del dims[begin], axes[begin:end]
        is_right = is_of_kind and is_right and len(dims) == len(axes)
        for dim, size in zip(dims, axes, strict=False):
            if is_right and dim != "_":
                known = sizes.setdefault(dim, size) if dim.isidentifier() else eval(dim, {}, sizes)
                is_right = known == size
        if not is_right:
            text = f"{at} is {dtype}{list(shape)}; it needs {_described(need, bound)}"
            return ValueError if is_of_kind else TypeError, name, text
        bound = {dim: bound.get(dim, (size, at)) for dim, size in sizes.items()}
    return None


def _described(need: _Need, sizes: Mapping[str, tuple[Any, str]]) -> str:
    """Returns the annotation in words, with the sizes that earlier arguments set."""
    by: dict[str, list[str]] = {}
    for dim in re.findall(r"[A-Za-z]\w*", " ".join(need.dims)):
        if dim in sizes:
            size, argument = sizes[dim]
            by.setdefault(argument, []).append(f"{dim} = {size}")
    as_in = "; ".join(f"{', '.join(each)} as in {argument}" for argument, each in by.items())
    return f"{need.words}[{', '.join(need.dims)}]" + (as_in and f" with {as_in}")
