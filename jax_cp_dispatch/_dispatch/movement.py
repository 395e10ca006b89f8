"""`dispatch` and `combine`: move tokens between the ranks of a mesh axis, as metadata describes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Num, PyTree, Shaped

from jax_cp_dispatch._dispatch.arguments import (
    Argument,
    Collectives,
    Exchange,
    OperandGroup,
    Rows,
    check_size,
    check_storage,
    outgoing,
    read_metadata,
    returning,
    rows_per_rank,
)
from jax_cp_dispatch._dispatch.lowering import place_arrays, vary_with
from jax_cp_dispatch._dispatch.primitives import combine_p, dispatch_p
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import (
    CallContext,
    CollectiveOptions,
    find_ranks,
    is_in_program,
    read_options,
    refuse_other_mesh,
    vary_alike,
)
from jax_cp_dispatch.metadata import Metadata

# ---- Turns the arguments of a public call into one call of a primitive.

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


def dispatch(
    x: PyTree[Shaped[Rows, "T ..."]],
    metadata: Metadata,
    *,
    axis_name: AxisName,
    capacity: int | None = None,
    buffer: int | None = None,
    out: PyTree[Shaped[Rows, "capacity ..."]] | None = None,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> PyTree[Shaped[Rows, "capacity ..."]]:
    """Sends each shard of `x` to the ranks that `metadata` names, bit for bit.

    All arrays of `x` move in one exchange, each with its own dtype and feature shape. Call inside
    `jax.shard_map` over `axis_name`, on every rank of the axis: `x` then holds this rank's T rows,
    and the result its `capacity` rows. Or call under plain `jit` on arrays of all ranks, `[W * T,
    ...] -> [W * capacity, ...]`: a sharding rule splits them over `axis_name`, and their other
    dimensions keep their sharding.

    Linear in `x`; its transpose is `combine`. Metadata has no tangent.

    Args:
      x: tokens in MLP layout; every array has the same number of rows.
      metadata: forward (or reverse) metadata, this rank's slice or the global one; offsets and
        lengths count tokens.
      axis_name: the mesh axis whose devices are the ranks, or several, the major one first.
      capacity: rows of the receive buffer; at least the largest `num_total_recv_tokens`.
      buffer: the id of a registered buffer, instead of `capacity`; its capacity and deadline apply.
        See `create_dispatch_buffer`.
      out: storage to reuse, with the shapes and dtypes of the result and any content. If you donate
        it to the program, the result is written in place.
      mesh: the mesh of `axis_name`, if arrays of all ranks do not determine it (automatic axes and
        unplaced arguments).
      implementation: see `available_implementations`; None selects one.
      deadline: seconds until the ranks that have arrived give up on the others; None means that of
        `buffer`, or 60, on GPUs 600, or `JAX_CP_DISPATCH_DEADLINE`. No effect with
        `implementation="xla"`.
      num_comm_sm: multiprocessors of a GPU that the exchange may use, on this rank alone; ranks of
        one device share them, and each uses at least one. None means all if one device holds all
        ranks, otherwise 64. The result is the same. No effect on CPU, and with
        `implementation="xla"`.
    Returns:
      Received tokens in attention layout, in the structure of `x`; rows that no rank writes are
      zero.
    Raises:
      TypeError: an array's dtype has less than a byte per element.
      ValueError: shapes, `axis_name`, the size of the axis, `buffer` or `out` do not match.
      jax.errors.JaxRuntimeError: at run time, on every rank of the group, before anything moves:
        the plan exceeds `capacity` or the rows of `x`, its ranges overlap, the buffer was
        destroyed, or a rank missed the deadline. All later calls of this execution then fail too,
        in every group. One case cannot be caught: a group that has finished its exchanges and waits
        for the failed group in an XLA collective stays blocked until XLA aborts the process. On
        CPU, `ppermute` over the ranks' own axis is such a collective. With `implementation="xla"`,
        or if one device holds all ranks, no error is raised: an invalid plan fills floating-point
        results with NaN. Plans are not checked if the result has no elements.
    """
    op = "dispatch"
    argument = outgoing(op, "x", x, metadata, capacity=capacity, buffer=buffer)
    options = read_options(op, axis_name, mesh, implementation, deadline, num_comm_sm)
    return move(options, [argument._replace(storage=out)])[0]


def dispatch_qkv(
    q: PyTree[Shaped[Rows, "Tq ..."]],
    kv: PyTree[Shaped[Rows, "Tkv ..."]],
    q_metadata: Metadata,
    kv_metadata: Metadata,
    *,
    axis_name: AxisName,
    q_capacity: int | None = None,
    kv_capacity: int | None = None,
    q_buffer: int | None = None,
    kv_buffer: int | None = None,
    q_out: PyTree[Shaped[Rows, "q_capacity ..."]] | None = None,
    kv_out: PyTree[Shaped[Rows, "kv_capacity ..."]] | None = None,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> tuple[PyTree[Shaped[Rows, "q_capacity ..."]], PyTree[Shaped[Rows, "kv_capacity ..."]]]:
    """Sends queries by one plan and keys and values by another, in one exchange.

    Equivalent to two calls of `dispatch`, but the ranks synchronize only once, and nothing moves
    unless both plans are valid. Call where `dispatch` can be called. Linear in `q` and `kv`; its
    transpose is `combine_qkv`.

    Args:
      q, kv: tokens in MLP layout; `kv` is usually the pair (k, v).
      q_metadata, kv_metadata: the two plans; see `dispatch`.
      axis_name, mesh, implementation, deadline, num_comm_sm: see `dispatch`.
      q_capacity, kv_capacity: rows of the two receive buffers.
      q_buffer, kv_buffer: ids of registered buffers, instead of capacities.
      q_out, kv_out: storage to reuse.
    Returns:
      The results of `dispatch` for `q` and for `kv`.
    Raises:
      As `dispatch`. If both move, run-time errors call the plan of q "plan 0" and that of kv "plan
      1".
    """
    op = "dispatch_qkv"
    of_q = outgoing(op, "q", q, q_metadata, capacity=q_capacity, buffer=q_buffer)
    of_kv = outgoing(op, "kv", kv, kv_metadata, capacity=kv_capacity, buffer=kv_buffer)
    if (q_out is None) != (kv_out is None):
        raise ValueError(f"{op}: got only one of q_out and kv_out. Pass both or none.")
    options = read_options(op, axis_name, mesh, implementation, deadline, num_comm_sm)
    received = move(options, [of_q._replace(storage=q_out), of_kv._replace(storage=kv_out)])
    return received[0], received[1]


def combine(
    y: PyTree[Num[Rows, "capacity ..."]],
    metadata: Metadata,
    *,
    axis_name: AxisName,
    num_tokens: int,
    preferred_element_type: DTypeLike | None = None,
    buffer: int | None = None,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> PyTree[Num[Rows, "T ..."]]:
    """Returns tokens from attention layout to their ranks, and sums the replicas of each.

    The adjoint of `dispatch` with the same forward metadata. Sums are made in a fixed order (slots,
    then replicas 0 ... C-1), so results are bitwise repeatable. They accumulate float64 in float64,
    narrower floats in float32 and integers in their own width, or in the dtype of the result if it
    is wider, and are rounded once.

    Call where `dispatch` can be called; arrays of all ranks go `[W * capacity, ...] -> [W * T,
    ...]`. Linear in `y`; its transpose is `dispatch`. Metadata has no tangent.

    Args:
      y: rows in attention layout; every array has the same number of rows.
      metadata: the forward metadata, this rank's slice or the global one.
      axis_name: the mesh axis whose devices are the ranks, or several, the major one first.
      num_tokens: rows T of the result, per rank.
      preferred_element_type: dtype of the result; None means the dtype of `y`.
      buffer: the id of a registered buffer, whose limits and deadline apply.
      mesh, implementation, deadline, num_comm_sm: see `dispatch`.
    Returns:
      Tokens in MLP layout, in the structure of `y`; rows that no shard names are zero.
    Raises:
      TypeError: an array has a dtype that cannot be summed.
      ValueError, jax.errors.JaxRuntimeError: as `dispatch`.
    """
    op, dtype = "combine", preferred_element_type
    argument = returning(op, "y", y, metadata, num_tokens=num_tokens, dtype=dtype)
    argument = argument.in_buffer(op, buffer)
    options = read_options(op, axis_name, mesh, implementation, deadline, num_comm_sm)
    return move(options, [argument])[0]


def combine_qkv(
    q: PyTree[Num[Rows, "q_capacity ..."]],
    kv: PyTree[Num[Rows, "kv_capacity ..."]],
    q_metadata: Metadata,
    kv_metadata: Metadata,
    *,
    axis_name: AxisName,
    q_num_tokens: int,
    kv_num_tokens: int,
    preferred_element_type: DTypeLike | None = None,
    q_buffer: int | None = None,
    kv_buffer: int | None = None,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> tuple[PyTree[Num[Rows, "Tq ..."]], PyTree[Num[Rows, "Tkv ..."]]]:
    """Returns rows of queries by one plan and of keys and values by another, in one exchange.

    Equivalent to two calls of `combine`. Call where `dispatch` can be called. Linear; its transpose
    is `dispatch_qkv`.

    Args:
      q, kv: rows in attention layout.
      q_metadata, kv_metadata: the forward metadata.
      q_num_tokens, kv_num_tokens: rows of the two results, per rank.
      axis_name, preferred_element_type, mesh, implementation, deadline, num_comm_sm: see `combine`.
      q_buffer, kv_buffer: ids of registered buffers, whose limits apply.
    Returns:
      The results of `combine` for `q` and for `kv`.
    Raises:
      As `combine`. If both move, run-time errors call the plan of q "plan 0" and that of kv "plan
      1".
    """
    op, dtype = "combine_qkv", preferred_element_type
    of_q = returning(op, "q", q, q_metadata, num_tokens=q_num_tokens, dtype=dtype)
    of_kv = returning(op, "kv", kv, kv_metadata, num_tokens=kv_num_tokens, dtype=dtype)
    arguments = [of_q.in_buffer(op, q_buffer), of_kv.in_buffer(op, kv_buffer)]
    options = read_options(op, axis_name, mesh, implementation, deadline, num_comm_sm)
    home = move(options, arguments)
    return home[0], home[1]
