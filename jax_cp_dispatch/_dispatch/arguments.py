"""The arguments of a public call: arrays with their metadata, and what becomes of them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_cp_dispatch._dispatch.buffers import BufferLimits, buffer_limits
from jax_cp_dispatch._dispatch.checks import (
    check_arrays,
    check_is_metadata,
    check_num_rows,
    check_summable,
)
from jax_cp_dispatch._dispatch.exchange_operands import summable
from jax_cp_dispatch.metadata import Metadata

Rows = Array | np.ndarray


class Argument(NamedTuple):
    """Arrays of one call that move by the same metadata.

    Attributes:
      name: name of the argument, for messages.
      tree: the structure of arrays and results.
      num_rows: rows per rank of the results.
      dtypes: of the results; None if arrays keep theirs, as in `dispatch`.
      sums: dtypes of the primitive's results, before the last rounding; None as above.
      storage: arrays that the results may reuse, if any.
      buffer: id of a registered buffer; 0 is none.
      limits: what the buffer allows; None without one.
      capacity_name: the argument that sets the capacity, for messages.
      fingerprint: this rank's fingerprint, i32 [9], or None; see csrc/dispatch/dispatch.h.
      weights: of each replica of the rows that return, or None.
    """

    name: str
    arrays: list[Array]
    tree: Any
    metadata: Metadata
    num_rows: int
    dtypes: list[Any] | None = None
    sums: list[Any] | None = None
    storage: Any = None
    buffer: int = 0
    limits: BufferLimits | None = None
    capacity_name: str = "capacity"
    fingerprint: Array | None = None
    weights: Array | None = None

    def in_buffer(self, op: str, buffer: int | None) -> "Argument":
        """Returns the same with the limits of a registered buffer, if there is one."""
        if buffer is None:
            return self
        return self._replace(buffer=buffer, limits=buffer_limits(op, buffer))


def outgoing(
    op: str,
    name: str,
    x: Any,
    metadata: Metadata,
    *,
    capacity: int | None = None,
    buffer: int | None = None,
) -> Argument:
    """Returns an argument of `dispatch`."""
    arrays, tree = _flatten(x)
    check_arrays(op, name, arrays)
    prefix = _prefix(name)
    check_is_metadata(op, f"{prefix}metadata", metadata)
    if (capacity is None) == (buffer is None):
        raise ValueError(
            f"{op}: got {'neither' if buffer is None else 'both'} of {prefix}capacity and "
            f"{prefix}buffer; it needs exactly one of them."
        )
    num_rows = 0
    if capacity is not None:
        num_rows = check_num_rows(op, f"{prefix}capacity", capacity)
    argument = Argument(name, arrays, tree, metadata, num_rows, capacity_name=f"{prefix}capacity")
    argument = argument.in_buffer(op, buffer)
    if argument.limits is not None:
        argument = argument._replace(num_rows=argument.limits.capacity)
    return argument


def returning(
    op: str,
    name: str,
    y: Any,
    metadata: Metadata,
    *,
    num_tokens: int,
    dtype: Any = None,
    weights: Array | None = None,
) -> Argument:
    """Returns an argument of `combine`.

    With `weights`, those rows of a token that one rank holds are summed first, times their weights,
    and rounded. It has no derivative then.
    """
    arrays, tree = _flatten(y)
    check_arrays(op, name, arrays)
    prefix = _prefix(name)
    check_is_metadata(op, f"{prefix}metadata", metadata)
    num_rows = check_num_rows(op, f"{prefix}num_tokens", num_tokens)
    summations = [_summation(op, y.dtype, dtype) for y in arrays]
    arrays = [
        y if y.dtype == s.operand else jax.lax.convert_element_type(y, s.operand)
        for y, s in zip(arrays, summations, strict=True)
    ]
    dtypes, sums = [s.result for s in summations], [s.total for s in summations]
    argument = Argument(name, arrays, tree, metadata, num_rows, dtypes, sums)
    return argument._replace(capacity_name=f"{prefix}capacity", weights=weights)


def _prefix(name: str) -> str:
    """Returns how the names of an argument's options begin: q_metadata belongs to q."""
    return f"{name}_" if name in ("q", "kv") else ""


def _flatten(tree: Any) -> tuple[list[Array], Any]:
    leaves, structure = jax.tree.flatten(tree)
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves], structure


class _Summation(NamedTuple):
    """The dtypes of a moved array, of its sum from the handler, and of the result."""

    operand: Any
    total: Any
    result: Any


@functools.lru_cache(maxsize=1024)  # a model makes the same call in every layer
def _summation(op: str, dtype: Any, preferred: Any) -> _Summation:
    result = jnp.dtype(preferred or dtype)
    operand = summable(dtype)
    check_summable(op, operand)
    if dtype.kind == "c" and result.kind != "c":
        raise TypeError(
            f"{op}: preferred_element_type is {result.name} but the rows are {dtype.name}, whose "
            "imaginary parts would be lost. Pass a complex dtype, or the real parts."
        )
    # A result that is wider, or no longer an integer, is summed in its dtype: y is cast first.
    summed, needed = _accumulation_dtype(operand), _accumulation_dtype(result)
    is_integer, is_real = (
        [jnp.issubdtype(dtype, kind) for dtype in (summed, needed)]
        for kind in (jnp.integer, jnp.floating)
    )
    is_alike = is_integer[0] == is_integer[1] and is_real[0] == is_real[1]
    if (is_alike and needed.itemsize > summed.itemsize) or (is_integer[0] and is_real[1]):
        operand = needed
    # The handler rounds to y's dtype or not at all; other dtypes are made from the unrounded sum.
    total = operand if operand == result else _accumulation_dtype(operand)
    return _Summation(operand, total, result)


def _accumulation_dtype(dtype: Any) -> Any:
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else dtype
