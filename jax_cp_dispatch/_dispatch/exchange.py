"""Turns the arguments of a public call into one call of a primitive."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch._dispatch.arguments import Argument
from jax_cp_dispatch._dispatch.checks import check_size, check_storage, read_metadata, rows_per_rank
from jax_cp_dispatch._dispatch.exchange_operands import Collectives, Exchange, OperandGroup
from jax_cp_dispatch._dispatch.partitioning import place_arrays, vary_with
from jax_cp_dispatch._dispatch.primitives import combine_p, dispatch_p
from jax_cp_dispatch._ranks.call_context import CallContext, is_in_program, refuse_other_mesh
from jax_cp_dispatch._ranks.options import CollectiveOptions, find_ranks
from jax_cp_dispatch._ranks.varying import vary_alike

SCOPE = "cpd.exchange"


class Prepared(NamedTuple):
    """The operands of one call of a primitive, and what makes results from its own.

    Attributes:
      exchange: None if nothing moves.
      operands: of the primitive, without storage.
      storage: arrays that the results may reuse, if any.
      results: how those of each argument are made.
    """

    exchange: Exchange | None
    operands: list[Array]
    storage: list[Array]
    results: list["_Results"]


def move(
    options: CollectiveOptions,
    arguments: Sequence[Argument],
    by_collectives: Collectives | None = None,
) -> list[Any]:
    """Makes one exchange of all arguments; returns their results, structured like the arrays."""
    call = prepare(options, arguments, by_collectives)
    moved = []
    if call.exchange is not None:
        primitive = dispatch_p if call.exchange.sums is None else combine_p
        with jax.named_scope(SCOPE):
            moved = primitive.bind(*call.operands, *call.storage, exchange=call.exchange)
    return finish_results(call.results, moved)


def prepare(
    options: CollectiveOptions,
    arguments: Sequence[Argument],
    by_collectives: Collectives | None = None,
) -> Prepared:
    """Checks all arguments, and puts them in the order of the operands."""
    op = options.op
    deadlines = [x.limits.deadline for x in arguments if x.limits and x.limits.deadline]
    if options.deadline is None and deadlines:
        options = dataclasses.replace(options, deadline=max(deadlines))
    typed = [x for argument in arguments for x in (*argument.arrays, argument.metadata.seq_len)]
    comm, context = find_ranks(options, typed)
    num_ranks = comm.num_ranks or arguments[0].metadata.world_size
    comm = dataclasses.replace(comm, num_ranks=num_ranks)

    groups, fields, fingerprints, arrays, storage, sums = [], [], [], [], [], []
    for argument in arguments:
        metadata = read_metadata(
            op, argument.metadata, comm.axis_names, num_ranks, all_ranks=context.is_global
        )
        moving = _moving(argument)
        if not moving:
            continue
        num_rows = argument.arrays[0].shape[0]
        if context.is_global:
            num_rows = rows_per_rank(op, argument.name, num_rows, num_ranks)
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
            has_fingerprint=argument.fingerprint is not None,
            has_weights=argument.weights is not None,
        )
        groups.append(group)
        fields += metadata._replace(weights=argument.weights).present()
        fingerprints += [] if argument.fingerprint is None else [argument.fingerprint]
        factor = num_ranks if context.is_global else 1
        for i in moving:
            what = f"{argument.name} goes to {argument.num_rows} rows per rank"
            check_size(op, what, factor * argument.num_rows, argument.arrays[i])
        arrays += [_with_rows(argument.arrays[i], factor) for i in moving]
        if argument.storage is not None:
            shapes = [((factor * capacity, *x.shape[1:]), x.dtype) for x in argument.arrays]
            stored = check_storage(op, argument.storage, argument.tree, shapes)
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
        num_comm_sm=options.num_comm_sm,
    )
    results = [_Results.of(x, num_ranks if context.is_global else 1) for x in arguments]
    if not groups:
        return Prepared(None, [], [], results)
    return _placed(exchange, context, fields + fingerprints, arrays, storage, results)


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


@jax.named_scope(SCOPE)
def _placed(exchange: Exchange, context: CallContext, fields, arrays, storage, results) -> Prepared:
    """Returns the operands on the devices that use them, varying over the axes of the ranks."""
    arrays, names, num_storage = arrays + storage, exchange.comm.axis_names, len(storage)
    mesh = context.mesh if context.is_global and not context.open_axes else None
    if mesh is not None and is_in_program(arrays):  # arrays that are here are moved
        refuse_other_mesh(exchange.op, mesh, arrays)
    if context.is_global or context.open_axes:
        arrays = place_arrays(context, names, arrays, num_storage)
    if not context.is_global:
        arrays = vary_with(fields, names, arrays)
    elif mesh is not None:
        exchange = exchange._replace(mesh=mesh.abstract_mesh)
    num_arrays = len(arrays) - num_storage
    return Prepared(exchange, fields + arrays[:num_arrays], arrays[num_arrays:], results)


class _Results(NamedTuple):
    """How one argument's results are made from those of a primitive.

    Attributes:
      tree: their structure.
      dtypes: theirs, or None as in `dispatch`.
      zeros: results that do not move; None for those that do.
    """

    tree: Any
    dtypes: list[Any] | None
    zeros: list[Array | None]

    @classmethod
    def of(cls, argument: Argument, factor: int) -> "_Results":
        moving, zeros = set(_moving(argument)), []
        for i, x in enumerate(argument.arrays):
            zero = None
            if i not in moving:
                shape = (factor * argument.num_rows, *x.shape[1:])
                like = [jnp.zeros(shape, x.dtype), x, argument.metadata.seq_len]
                zero = vary_alike(like)[0]
            zeros.append(zero)
        return cls(argument.tree, argument.dtypes, zeros)


def finish_results(results: Sequence[_Results], moved: Sequence[Array]) -> list[Any]:
    """Returns rounded results, structured like the arrays; those that did not move are zero."""
    rest, trees = iter(moved), []
    for each in results:
        leaves = [next(rest) if zero is None else zero for zero in each.zeros]
        if each.dtypes is not None:
            leaves = [
                x if x.dtype == dtype else x.astype(dtype)
                for x, dtype in zip(leaves, each.dtypes, strict=True)
            ]
        trees.append(jax.tree.unflatten(each.tree, leaves))
    return trees
