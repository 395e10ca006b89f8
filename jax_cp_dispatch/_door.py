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
    """Returns the decorator of a public function.

    Args:
      op: the name of the function in errors.
      next_steps: by parameter: the end of the error about a wrong shape.
    """

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
    shared = last.kind == last.VAR_KEYWORD and _unpacked(typing.get_type_hints(function))
    if not shared:
        return signature
    keywords = []
    for name, hint in shared.__annotations__.items():
        text, default = hint.__forward_arg__, None
        if text.startswith("Required["):
            text, default = text[len("Required[") : -1], last.empty
        keyword = last.replace(name=name, kind=last.KEYWORD_ONLY, default=default, annotation=text)
        keywords.append(keyword)
    first = sum(x.kind != last.KEYWORD_ONLY for x in own)
    return signature.replace(parameters=[*own[:first], *keywords, *own[first:]])


def _unpacked(hints: dict[str, Any]) -> Any:
    """Returns the TypedDict whose keywords a function takes, or None."""
    found = (typing.get_args(x) for x in hints.values() if typing.get_origin(x) is typing.Unpack)
    return next((shared for (shared,) in found), None)


def check_annotated(
    op: str, annotated: Any, given: Mapping[str, Any], next_steps: Mapping[str, str] | None = None
) -> None:
    """Requires arrays as a function or a class annotates them.

    Args:
      op, next_steps: as of `door`.
      annotated: the function or the class.
      given: arguments by name.
    """
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
    hints = typing.get_type_hints(annotated)
    if (shared := _unpacked(hints)) is not None:
        hints |= typing.get_type_hints(shared)
    read = {name: _alternatives(hint) for name, hint in hints.items() if name != "return"}
    either = {name: (found - {None}, None in found) for name, found in read.items()}
    return {
        name: (need, is_optional)
        for name, (needs, is_optional) in either.items()
        if len(needs) == 1 and isinstance(need := next(iter(needs)), _Need)
    }


def _alternatives(hint: Any, is_tree: bool = False) -> set[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(_alternatives(x, is_tree) for x in typing.get_args(hint)))
    if hasattr(hint, "leaftype"):
        return _alternatives(hint.leaftype, is_tree=True)
    if hasattr(hint, "dim_str"):
        name = hint.dtype.__name__
        kind, words = _KINDS.get(name, (name.lower(), f"{name.lower()} "))
        return {_Need(kind, words, tuple(hint.dim_str.split()), is_tree)}
    return {None if hint is type(None) else "another"}


@functools.lru_cache(maxsize=1024)  # a model makes the same call in every layer
def _fault(
    annotated: Any, arrays: tuple[tuple[str, str, tuple[Any, ...], Any], ...]
) -> tuple[type[Exception], str, str] | None:
    """Returns the class of the error, the parameter and the text, or None if all arrays fit.

    Args:
      annotated: as in `check_annotated`.
      arrays: parameter, name of the array, shape and dtype.
    """
    sizes: dict[str, tuple[Any, str]] = {}  # of each dimension, and the array that set it
    for name, at, shape, dtype in arrays:
        need, _ = _needs(annotated)[name]
        is_of_kind = jnp.issubdtype(dtype, need.kind)
        found = _sizes(need.dims, shape, sizes) if is_of_kind else None
        if found is None:
            error = ValueError if is_of_kind else TypeError
            text = f"{at} is {dtype}{list(shape)}; it needs {_described(need, sizes)}"
            return error, name, text
        sizes.update((dim, (size, at)) for dim, size in found.items() if dim not in sizes)
    return None


def _sizes(
    dims: tuple[str, ...], shape: tuple[Any, ...], bound: Mapping[str, tuple[Any, str]]
) -> dict[str, Any] | None:
    """Returns the sizes of all names, or None if the shape is another one."""
    sizes = {dim: size for dim, (size, _) in bound.items()}
    for i, dim in enumerate(dims):
        if dim[0] in ".*":
            end = max(i, i + 1 + len(shape) - len(dims))
            several = shape[i:end]
            known = several if dim == "..." else sizes.setdefault(dim[1:], several)
            if several not in ([known] if isinstance(known, tuple) else [(), (known,)]):
                return None
            dims, shape = dims[:i] + dims[i + 1 :], shape[:i] + shape[end:]
            break
    if len(dims) != len(shape):
        return None
    for dim, size in zip(dims, shape, strict=True):
        if dim.isidentifier():
            is_one = dim == "_" or sizes.setdefault(dim, size) == size
        else:
            is_one = eval(dim, {}, sizes) == size
        if not is_one:
            return None
    return sizes


def _described(need: _Need, sizes: Mapping[str, tuple[Any, str]]) -> str:
    """Returns the annotation in words, with the sizes that earlier arguments set."""
    by: dict[str, list[str]] = {}
    for dim in re.findall(r"[A-Za-z]\w*", " ".join(need.dims)):
        if dim in sizes:
            size, argument = sizes[dim]
            by.setdefault(argument, []).append(f"{dim} = {size}")
    as_in = "; ".join(f"{', '.join(each)} as in {argument}" for argument, each in by.items())
    return f"{need.words}[{', '.join(need.dims)}]" + (as_in and f" with {as_in}")
