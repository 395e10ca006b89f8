"""Turns the arguments of a public call into one call of a primitive."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_cp_dispatch._dispatch import checks
from jax_cp_dispatch._dispatch.buffers import BufferLimits, buffer_limits
from jax_cp_dispatch._dispatch.devices import place_arrays, vary_with
from jax_cp_dispatch._dispatch.operands import Collectives, Exchange, OperandGroup, summable
from jax_cp_dispatch._dispatch.primitives import combine_p, dispatch_p
from jax_cp_dispatch._ranks.call_context import CallContext
from jax_cp_dispatch._ranks.options import CollectiveOptions, find_ranks
from jax_cp_dispatch._ranks.varying import vary_alike
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
      stamp: this rank's stamp, i32 [7], or None; see csrc/dispatch/dispatch.h.
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
    stamp: Array | None = None

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
    checks.check_arrays(op, name, arrays)
    prefix = _prefix(name)
    checks.check_is_metadata(op, f"{prefix}metadata", metadata)
    if (capacity is None) == (buffer is None):
        raise ValueError(
            f"{op}: got {'neither' if buffer is None else 'both'} of {prefix}capacity and "
            f"{prefix}buffer; it needs exactly one of them."
        )
    num_rows = 0
    if capacity is not None:
        num_rows = checks.check_num_rows(op, f"{prefix}capacity", capacity)
    argument = Argument(name, arrays, tree, metadata, num_rows, capacity_name=f"{prefix}capacity")
    argument = argument.in_buffer(op, buffer)
    if argument.limits is not None:
        argument = argument._replace(num_rows=argument.limits.capacity)
    return argument


def returning(
    op: str, name: str, y: Any, metadata: Metadata, *, num_tokens: int, dtype: Any = None
) -> Argument:
    """Returns an argument of `combine`."""
    arrays, tree = _flatten(y)
    checks.check_arrays(op, name, arrays)
    prefix = _prefix(name)
    checks.check_is_metadata(op, f"{prefix}metadata", metadata)
    num_rows = checks.check_num_rows(op, f"{prefix}num_tokens", num_tokens)
    summations = [_summation(op, y.dtype, dtype) for y in arrays]
    arrays = [
        y if y.dtype == s.operand else jax.lax.convert_element_type(y, s.operand)
        for y, s in zip(arrays, summations, strict=True)
    ]
    dtypes, sums = [s.result for s in summations], [s.total for s in summations]
    argument = Argument(name, arrays, tree, metadata, num_rows, dtypes, sums)
    return argument._replace(capacity_name=f"{prefix}capacity")


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
    checks.check_summable(op, operand)
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


def move(
    options: CollectiveOptions,
    arguments: Sequence[Argument],
    by_collectives: Collectives | None = None,
) -> list[Any]:
    """Makes one exchange of all arguments; returns their results, structured like the arrays."""
    op = options.op
    deadlines = [x.limits.deadline for x in arguments if x.limits]
    if options.deadline is None and deadlines:
        options = dataclasses.replace(options, deadline=max(deadlines))
    typed = [x for argument in arguments for x in (*argument.arrays, argument.metadata.seq_len)]
    comm, context = find_ranks(options, typed)
    num_ranks = comm.num_ranks or arguments[0].metadata.world_size
    comm = dataclasses.replace(comm, num_ranks=num_ranks)

    groups, fields, stamps, arrays, storage, sums = [], [], [], [], [], []
    for argument in arguments:
        metadata = checks.read_metadata(
            op, argument.metadata, comm.axis_names, num_ranks, all_ranks=context.is_global
        )
        moving = _moving(argument)
        if not moving:
            continue
        num_rows = argument.arrays[0].shape[0]
        if context.is_global:
            num_rows = checks.rows_per_rank(op, argument.name, num_rows, num_ranks)
        num_tokens, capacity = num_rows, argument.num_rows
        if argument.sums is not None:
            num_tokens, capacity = capacity, num_tokens
        if argument.limits is not None and capacity > argument.limits.capacity:
            raise ValueError(
                f"{op}: {argument.name} has {capacity} rows per rank but the capacity of buffer "
                f"{argument.buffer} is {argument.limits.capacity}. Create another with "
                f"capacity>={capacity}."
            )
        group = OperandGroup(
            num_arrays=len(moving),
            num_tokens=num_tokens,
            capacity=capacity,
            has_src_offset=metadata.src_offset is not None,
            buffer=argument.buffer,
            capacity_name=argument.capacity_name,
            has_stamp=argument.stamp is not None,
        )
        groups.append(group)
        fields += metadata.present()
        stamps += [] if argument.stamp is None else [argument.stamp]
        factor = num_ranks if context.is_global else 1
        for i in moving:
            what = f"{argument.name} goes to {argument.num_rows} rows per rank"
            checks.check_size(op, what, factor * argument.num_rows, argument.arrays[i])
        arrays += [_with_rows(argument.arrays[i], factor) for i in moving]
        if argument.storage is not None:
            shapes = [((factor * capacity, *x.shape[1:]), x.dtype) for x in argument.arrays]
            stored = checks.check_storage(op, argument.storage, argument.tree, shapes)
            storage += [stored[i] for i in moving]
        if argument.sums is not None:
            sums += [jnp.dtype(argument.sums[i]).name for i in moving]

    exchange = Exchange(
        op=op,
        comm=comm,
        groups=tuple(groups),
        sums=None if arguments[0].sums is None else tuple(sums),
        is_global=context.is_global,
        by_collectives=by_collectives,
    )
    moved = _run(exchange, context, fields + stamps, arrays, storage) if groups else []
    return _results(arguments, moved, num_ranks if context.is_global else 1)


def _moving(argument: Argument) -> list[int]:
    """Returns the arrays whose results have elements; others never reach a handler.

    jaxlib 0.11 crashes on a custom call with an empty operand or result.
    """
    if argument.num_rows == 0:
        return []
    return [i for i, x in enumerate(argument.arrays) if math.prod(x.shape[1:]) > 0]


def _with_rows(array: Array, num_rows: int) -> Array:
    """Pads an array without rows, for the same reason; the call ignores the padding."""
    if array.shape[0] > 0:
        return array
    return vary_alike([jnp.zeros((num_rows, *array.shape[1:]), array.dtype), array])[0]


@jax.named_scope("cpd.exchange")
def _run(exchange: Exchange, context: CallContext, fields, arrays, storage) -> list[Array]:
    arrays, names = arrays + storage, exchange.comm.axis_names
    if context.is_global or context.open_axes:
        arrays = place_arrays(context, names, arrays, len(storage))
    if not context.is_global:
        arrays = vary_with(fields, names, arrays)
    primitive = dispatch_p if exchange.sums is None else combine_p
    return primitive.bind(*fields, *arrays, exchange=exchange)


def _results(arguments: Sequence[Argument], moved: Sequence[Array], factor: int) -> list[Any]:
    """Returns rounded results, structured like the arrays; those that did not move are zero."""
    rest, results = iter(moved), []
    for argument in arguments:
        moving = set(_moving(argument))
        leaves = []
        for i, x in enumerate(argument.arrays):
            if i in moving:
                leaf = next(rest)
            else:
                shape = (factor * argument.num_rows, *x.shape[1:])
                leaf = vary_alike([jnp.zeros(shape, x.dtype), x, argument.metadata.seq_len])[0]
            if argument.dtypes is not None and leaf.dtype != argument.dtypes[i]:
                leaf = leaf.astype(argument.dtypes[i])
            leaves.append(leaf)
        results.append(jax.tree.unflatten(argument.tree, leaves))
    return results
