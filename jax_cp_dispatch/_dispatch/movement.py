"""`dispatch` and `combine`: move tokens between the ranks of a mesh axis, as metadata describes.

`dispatch_start`, `combine_start` and `exchange_done` do the same beside other work;
`ragged_all_to_all` is the operation of `jax.lax`.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Integer, Num, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, read_int32, read_wide
from jax_cp_dispatch._arrays import chosen
from jax_cp_dispatch._dispatch.arguments import (
    PLANNED,
    Argument,
    Collectives,
    Exchange,
    OperandGroup,
    Rows,
    check_movable,
    check_sizes,
    done_p,
    outgoing,
    read_outgoing,
    read_returning,
    start_p,
)
from jax_cp_dispatch._dispatch.buffers import buffer_limits
from jax_cp_dispatch._dispatch.lowering import place_arrays
from jax_cp_dispatch._dispatch.primitives import PairValues
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import (
    AxisName,
    Communicator,
    num_ranks_here,
    rank_index,
)
from jax_cp_dispatch._ranks.options import (
    CallContext,
    CollectiveOptions,
    ExchangeKeywords,
    find_ranks,
    is_in_program,
    read_options,
    refuse_other_mesh,
    vary_alike,
    varying_axes,
)
from jax_cp_dispatch.metadata import Metadata

# ---- From arguments to one call of a primitive.

SCOPE = "cpd.exchange"


class _Call(NamedTuple):
    exchange: Exchange | None  # None if nothing moves
    operands: list[Array]  # without storage
    storage: list[Array]  # that the results may reuse
    arguments: Sequence[Argument]
    num_held: int  # ranks whose rows an array holds

    def results(self, moved: Sequence[Array]) -> list[Any]:
        """Returns rounded results, structured like the arrays; those that did not move are zero."""
        rest, trees = iter(moved), []
        for argument in self.arguments:
            leaves = []
            named = zip(argument.arrays, argument.dtypes, argument.moves, strict=True)
            for x, dtype, is_moved in named:
                if is_moved:
                    leaf = next(rest)
                else:
                    shape = (self.num_held * argument.num_rows, *x.shape[1:])
                    like = [jnp.zeros(shape, x.dtype), x, argument.metadata.seq_len]
                    leaf = vary_alike(like)[0]
                leaves.append(leaf if leaf.dtype == dtype else leaf.astype(dtype))
            trees.append(jax.tree.unflatten(argument.tree, leaves))
        return trees


def move(
    options: CollectiveOptions,
    arguments: Sequence[Argument],
    by_collectives: Collectives | None = None,
    *,
    are_checked: bool = True,
) -> list[Any]:
    """Makes one exchange; returns results structured like the arrays.

    If `are_checked`, the arguments are arrays of this rank; otherwise those of a public call, whose
    context and sizes are checked here.
    """
    call = _prepare(options, arguments, by_collectives, are_checked)
    moved = []
    if call.exchange is not None:
        with jax.named_scope(SCOPE):
            bind = call.exchange.primitive.bind
            moved = bind(*call.operands, *call.storage, exchange=call.exchange)
    return call.results(moved)


def _prepare(
    options: CollectiveOptions,
    arguments: Sequence[Argument],
    by_collectives: Collectives | None = None,
    are_checked: bool = True,
) -> _Call:
    """Puts everything in the order of the operands, on the devices that use it."""
    op = options.op
    if are_checked:
        comm, context = find_ranks(options, [])
    else:
        options, comm, context = _check(options, arguments)
    factor = comm.num_ranks if context.is_global else 1
    groups, fields, fingerprints, arrays, storage, sums = [], [], [], [], [], []
    for argument in arguments:
        moves = argument.moves
        if not any(moves):
            continue
        planned = {name: getattr(argument.metadata, name) for name in PLANNED}
        read: dict[str, Any] = {
            name: read_wide(op, f"metadata.{name}", x)
            for name, x in planned.items()
            if x is not None
        }
        if 0 in read["dst_rank"].shape:  # one slot of padding, which moves nothing
            none = jnp.zeros((*read["seq_len"].shape[:-1], 1), jnp.int32)
            received = read["num_recv_tokens"]
            read = dict(zip(PLANNED, (received, none, none - 1, none), strict=False))
        if argument.weights is not None:
            read["weights"] = argument.weights
        rows = argument.arrays[0].shape[0] // factor, argument.num_rows
        num_tokens, capacity = rows if argument.sums is None else rows[::-1]
        has_fingerprint = argument.fingerprint is not None
        named = argument.buffer, argument.capacity_name, has_fingerprint
        groups.append(OperandGroup(sum(moves), num_tokens, capacity, tuple(read), *named))
        fields += read.values()
        fingerprints += [argument.fingerprint] if has_fingerprint else []
        for x in compress(argument.arrays, moves):
            if x.shape[0] == 0:  # padding, which the call ignores: jaxlib 0.11 takes no empty array
                x = vary_alike([jnp.zeros((factor, *x.shape[1:]), x.dtype), x])[0]
            arrays.append(x)
        if argument.storage is not None:
            storage += compress(jax.tree.leaves(argument.storage), moves)
        if argument.sums is not None:
            sums += [jnp.dtype(dtype).name for dtype in compress(argument.sums, moves)]
    if not groups:
        return _Call(None, [], [], arguments, factor)
    mesh = context.mesh if context.is_global and not context.open_axes else None
    exchange = Exchange(
        op=op,
        comm=comm,
        groups=tuple(groups),
        sums=None if arguments[0].sums is None else tuple(sums),
        is_global=context.is_global,
        by_collectives=by_collectives,
        mesh=None if mesh is None else mesh.abstract_mesh,
        num_comm_sm=options.num_comm_sm,
    )
    names, num_storage, fields = comm.axis_names, len(storage), fields + fingerprints
    arrays += storage
    if mesh is not None and is_in_program(arrays):  # arrays that are here are moved
        refuse_other_mesh(op, mesh, arrays)
    with jax.named_scope(SCOPE):
        if context.is_global or context.open_axes:
            arrays = place_arrays(context, names, arrays, num_storage)
        if not context.is_global:  # arrays vary over all mesh axes on which the result depends
            axes = frozenset().union(*map(varying_axes, fields))
            if not all(axes.union(varying_axes(x)).issuperset(names) for x in arrays):
                for name in names:  # no axis where JAX does not track them (check_vma=False)
                    axes |= varying_axes(jax.lax.axis_index(name))
            if not all(varying_axes(x) == axes for x in arrays):
                arrays = vary_alike(arrays, also=axes)
    num_arrays = len(arrays) - num_storage
    operands, storage = fields + arrays[:num_arrays], arrays[num_arrays:]
    return _Call(exchange, operands, storage, arguments, factor)


def _check(
    options: CollectiveOptions, arguments: Sequence[Argument]
) -> tuple[CollectiveOptions, Communicator, CallContext]:
    """Checks what needs the ranks, of arrays of this rank or of all; finds the deadline, too."""
    buffers = [buffer_limits(options.op, x.buffer) for x in arguments if x.buffer]
    deadlines = [limits.deadline for limits in buffers if limits.deadline]
    if options.deadline is None and deadlines:
        options = dataclasses.replace(options, deadline=max(deadlines))
    typed = [x for argument in arguments for x in (*argument.arrays, argument.metadata.seq_len)]
    comm, context = find_ranks(options, typed)
    num_ranks = comm.num_ranks or arguments[0].metadata.world_size
    comm = dataclasses.replace(comm, num_ranks=num_ranks)
    for argument in arguments:
        check_sizes(options.op, argument, comm, is_global=context.is_global)
    return options, comm, context


@door("dispatch")
def dispatch(
    x: PyTree[Shaped[Rows, "T ..."]],
    metadata: Metadata,
    *,
    capacity: int | None = None,
    buffer: int | None = None,
    out: PyTree[Shaped[Rows, "capacity ..."]] | None = None,
    **call: Unpack[ExchangeKeywords],
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
        `buffer`, or 60, on GPUs 43200 (600 in a job of one process), or
        `JAX_CP_DISPATCH_DEADLINE`. No effect with `implementation="xla"`.
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
        destroyed, or a rank missed the deadline. docs/errors.md says what follows in other groups
        and later calls. With `implementation="xla"`, or if one device holds all ranks, no error is
        raised: an invalid plan fills floating-point results with NaN. Plans are not checked if the
        result has no elements.
    """
    op = "dispatch"
    argument = read_outgoing(op, "x", x, metadata, capacity, buffer, out)
    return move(read_options(op, **call), [argument], are_checked=False)[0]


@door("dispatch_qkv")
def dispatch_qkv(
    q: PyTree[Shaped[Rows, "Tq ..."]],
    kv: PyTree[Shaped[Rows, "Tkv ..."]],
    q_metadata: Metadata,
    kv_metadata: Metadata,
    *,
    q_capacity: int | None = None,
    kv_capacity: int | None = None,
    q_buffer: int | None = None,
    kv_buffer: int | None = None,
    q_out: PyTree[Shaped[Rows, "q_capacity ..."]] | None = None,
    kv_out: PyTree[Shaped[Rows, "kv_capacity ..."]] | None = None,
    **call: Unpack[ExchangeKeywords],
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
    of_q = read_outgoing(op, "q", q, q_metadata, q_capacity, q_buffer, q_out)
    of_kv = read_outgoing(op, "kv", kv, kv_metadata, kv_capacity, kv_buffer, kv_out)
    if (q_out is None) != (kv_out is None):
        raise ValueError(f"{op}: got only one of q_out and kv_out. Pass both or none.")
    options = read_options(op, **call)
    received_q, received_kv = move(options, [of_q, of_kv], are_checked=False)
    return received_q, received_kv


@door("combine")
def combine(
    y: PyTree[Num[Rows, "capacity ..."]],
    metadata: Metadata,
    *,
    num_tokens: int,
    preferred_element_type: DTypeLike | None = None,
    buffer: int | None = None,
    **call: Unpack[ExchangeKeywords],
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
      num_tokens: rows T of the result, per rank.
      preferred_element_type: dtype of the result; None means the dtype of `y`.
      buffer: the id of a registered buffer, whose limits and deadline apply.
      axis_name, mesh, implementation, deadline, num_comm_sm: see `dispatch`.
    Returns:
      Tokens in MLP layout, in the structure of `y`; rows that no shard names are zero.
    Raises:
      TypeError: an array has a dtype that cannot be summed.
      ValueError, jax.errors.JaxRuntimeError: as `dispatch`.
    """
    op, dtype = "combine", preferred_element_type
    argument = read_returning(op, "y", y, metadata, num_tokens, dtype, buffer)
    return move(read_options(op, **call), [argument], are_checked=False)[0]


@door("combine_qkv")
def combine_qkv(
    q: PyTree[Num[Rows, "q_capacity ..."]],
    kv: PyTree[Num[Rows, "kv_capacity ..."]],
    q_metadata: Metadata,
    kv_metadata: Metadata,
    *,
    q_num_tokens: int,
    kv_num_tokens: int,
    preferred_element_type: DTypeLike | None = None,
    q_buffer: int | None = None,
    kv_buffer: int | None = None,
    **call: Unpack[ExchangeKeywords],
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
    of_q = read_returning(op, "q", q, q_metadata, q_num_tokens, dtype, q_buffer)
    of_kv = read_returning(op, "kv", kv, kv_metadata, kv_num_tokens, dtype, kv_buffer)
    options = read_options(op, **call)
    home_q, home_kv = move(options, [of_q, of_kv], are_checked=False)
    return home_q, home_kv


# ---- An exchange in two calls, beside other work.


class StartedExchange:
    """An exchange between `dispatch_start` or `combine_start` and `exchange_done`.

    Not a pytree: both calls belong to one traced function.
    """

    def __init__(self, op: str, call: _Call, values: PairValues | None):
        self.op = op
        self._call, self._values = call, values
        self._is_done = False

    def done(self, beside: Any) -> tuple[list[Any], Any]:
        """Returns the results of all arguments, and `beside`, a pytree."""
        if self._is_done:
            raise ValueError(
                f"exchange_done: this exchange of {self.op} is done. Start another one for each "
                "call."
            )
        self._is_done = True
        exchange, moved = self._call.exchange, []
        if exchange is not None and self._values is not None:
            fields, _, _ = exchange.split(self._call.operands)
            leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, beside))
            values = self._values._replace(beside=leaves)
            with jax.named_scope(SCOPE):
                outs = done_p.bind(*fields, *values.flat(), exchange=exchange)
            moved, leaves = outs[: exchange.num_arrays], outs[exchange.num_arrays :]
            beside = jax.tree.unflatten(tree, leaves)
        return self._call.results(moved), beside


def start(
    options: CollectiveOptions,
    arguments: Sequence[Argument],
    beside: Any,
    *,
    are_checked: bool = True,
) -> tuple[StartedExchange, Any]:
    """Starts one exchange; see `move`. Returns it and `beside`, a pytree."""
    call = _prepare(options, arguments, are_checked=are_checked)
    exchange, values = call.exchange, None
    if exchange is not None:
        fields, _, _ = exchange.split(call.operands)
        # The floats that hold copies of the rank and the fields; see kernels/prepare.h.
        num_held = 4 + sum(-(-x.size * x.dtype.itemsize // 16) * 4 for x in fields)
        leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, beside))
        with jax.named_scope(SCOPE):
            outs = start_p.bind(*call.operands, *leaves, exchange=exchange, num_held=num_held)
        values = PairValues.split(outs, exchange)
        beside = jax.tree.unflatten(tree, values.beside)
    return StartedExchange(options.op, call, values), beside


@door("dispatch_start")
def dispatch_start(
    x: PyTree[Shaped[Rows, "T ..."]],
    metadata: Metadata,
    *,
    beside: Any = None,
    capacity: int | None = None,
    buffer: int | None = None,
    **call: Unpack[ExchangeKeywords],
) -> tuple[StartedExchange, Any]:
    """Starts a `dispatch` that moves rows beside other work of the program.

        exchange, x = dispatch_start((k, v), metadata, beside=x, axis_name="cp", capacity=c)
        q = x @ wq
        (k, v), q = exchange_done(exchange, beside=q)

    Between GPUs, rows move while the GPU computes what depends on the returned `beside`. Elsewhere,
    and on arrays of all ranks that are split over several devices, this call is the whole exchange.
    Call where `dispatch` can be called, and call `exchange_done` in the same traced function: not
    in another `jit`, loop or branch.

    Linear in `x` and `beside`. The transpose is such a pair too: the adjoint exchange moves rows
    beside the transpose of the work.

    Args:
      beside: any arrays, the inputs of the work. Use the returned ones in it.
      x, metadata, axis_name, capacity, buffer: see `dispatch`.
      mesh, implementation, deadline, num_comm_sm: see `dispatch`.
    Returns:
      The exchange, for `exchange_done`; and `beside`, unchanged.
    Raises:
      As `dispatch`. On GPUs, `exchange_done` or a later call raises the errors of run time; see
      docs/gpu.md.
    """
    op = "dispatch_start"
    argument = read_outgoing(op, "x", x, metadata, capacity, buffer)
    return start(read_options(op, **call), [argument], beside, are_checked=False)


@door("combine_start")
def combine_start(
    y: PyTree[Num[Rows, "capacity ..."]],
    metadata: Metadata,
    *,
    beside: Any = None,
    num_tokens: int,
    preferred_element_type: DTypeLike | None = None,
    buffer: int | None = None,
    **call: Unpack[ExchangeKeywords],
) -> tuple[StartedExchange, Any]:
    """Starts a `combine` that returns rows beside other work of the program.

    See `dispatch_start`. Linear in `y` and `beside`.

    Args:
      beside: see `dispatch_start`; all others: see `combine`.
    Returns:
      As `dispatch_start`.
    Raises:
      As `combine`.
    """
    op, dtype = "combine_start", preferred_element_type
    argument = read_returning(op, "y", y, metadata, num_tokens, dtype, buffer)
    return start(read_options(op, **call), [argument], beside, are_checked=False)


def exchange_done(exchange: Any, *, beside: Any = None) -> tuple[Any, Any]:
    """Ends an exchange: returns what `dispatch` or `combine` returns.

    Call once for each `dispatch_start` and `combine_start`, in the same traced function. Its
    derivative is that of the pair.

    Args:
      exchange: of `dispatch_start` or `combine_start`.
      beside: any arrays, the outputs of the work. The exchange ends after they are computed.
    Returns:
      The rows, in the structure of `x` or `y`; and `beside`, unchanged.
    Raises:
      TypeError: `exchange` is not a started exchange.
      ValueError: it is done.
    """
    if not isinstance(exchange, StartedExchange):
        raise TypeError(
            f"exchange_done: got {type(exchange).__name__}; it needs the first result of "
            "dispatch_start or combine_start."
        )
    (rows,), beside = exchange.done(beside)
    return rows, beside


# ---- `ragged_all_to_all`: the operation of `jax.lax`, by `dispatch`.

_OP = "ragged_all_to_all"
_RAGGED = "input_offsets", "send_sizes", "output_offsets", "recv_sizes"


@door(
    _OP, output="Reshape the rows of one.", send_sizes="Pass a size of 0 for a rank without rows."
)
def ragged_all_to_all(
    operand: Shaped[Array, "N *feature"],
    output: Shaped[Array, "M *feature"],
    input_offsets: Integer[HostOrDevice, " K"],
    send_sizes: Integer[HostOrDevice, " K"],
    output_offsets: Integer[HostOrDevice, " K"],
    recv_sizes: Integer[HostOrDevice, " K"],
    *,
    axis_name: AxisName | list[str],
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Shaped[Array, "M *feature"]:
    """Sends slices of rows to the other ranks, which write them into their `output`.

    The arguments and the result are those of `jax.lax.ragged_all_to_all`, which XLA cannot run on
    CPU: this function replaces it there, also between processes. It differs in two ways. Slices
    that disagree with `recv_sizes`, exceed an array or overlap where they arrive are errors. And
    the gradient of a row that several slices send is the sum of theirs; JAX's transpose keeps one
    of them.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis. Linear in `operand` and
    `output`.

    Args:
      operand: this rank's rows.
      output: the rows of the result that no rank writes.
      input_offsets, send_sizes: the slices of `operand` to send, K / W for each rank in order.
      output_offsets: the row of the receiver's output where each of these slices begins.
      recv_sizes: the rows of the slices that this rank receives, K / W from each rank in order.
      axis_name: the mesh axis of the ranks, or several, the major one first.
      axis_index_groups: groups of ranks that exchange with each other only, of the same size;
        together all ranks, each once. Ranks of a slice are then numbered within the group.
      implementation, deadline: see `dispatch`.
    Returns:
      `output`, with the received rows.
    Raises:
      TypeError, ValueError: an argument is invalid.
      jax.errors.JaxRuntimeError: see `dispatch`.
    """
    axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    options = read_options(_OP, axis_name, None, implementation, deadline)
    num_ranks = num_ranks_here(_OP, options.axis_name, "dispatch")
    peers = _peers(axis_index_groups, num_ranks)
    check_movable(_OP, "operand", operand)
    if operand.dtype != output.dtype:
        raise ValueError(
            f"{_OP}: operand is {operand.dtype} and output {output.dtype}; they need rows of one "
            "dtype. Cast one."
        )
    given = input_offsets, send_sizes, output_offsets, recv_sizes
    if not send_sizes.size or send_sizes.size % peers.shape[1]:
        raise ValueError(
            f"{_OP}: {', '.join(_RAGGED)} are [{send_sizes.size}]; they need [K], K a positive "
            f"multiple of the {peers.shape[1]} ranks. Pass a slice of size 0 for a rank that gets "
            "nothing."
        )
    starts, sizes, places, sizes_here = (
        read_int32(_OP, name, x, 0).reshape(peers.shape[1], -1)
        for name, x in zip(_RAGGED, given, strict=True)
    )

    own = jnp.asarray(peers)[rank_index(options.axis_names)]  # the ranks of this rank's group

    def sent(slices: slice, arrays: list[Any]) -> Argument:
        """Sends some of the slices for each rank: those of equal numbers."""
        received = sizes_here[:, slices].sum(1, dtype=jnp.int32)
        from_ranks = jnp.zeros(num_ranks, jnp.int32).at[own].set(received, unique_indices=True)
        start, size, place = (x[:, slices].reshape(-1) for x in (starts, sizes, places))
        plan = Metadata(
            dst_rank=jnp.repeat(own, len(size) // len(own)),
            dst_offset=place,
            seq_len=size,
            src_offset=start,
            num_recv_tokens=jnp.append(from_ranks, received.sum(dtype=jnp.int32)),
            num_seqs=np.int32(len(size)),
            world_size=num_ranks,
        )
        return outgoing(arrays, plan, capacity=len(output), capacity_name="rows of output")

    one = jnp.ones(len(operand), jnp.bfloat16)  # NaN where XLA finds the plan wrong
    operand, one = vary_alike([operand, one], also=options.axis_names)
    parts = [sent(slice(None), [operand, one])]
    if sizes.shape[1] > 1:  # ranks compare sums of what they send and receive by a part
        parts += [sent(slice(i, i + 1), [one]) for i in range(sizes.shape[1])]
    (received, is_written), *others = move(options, parts)
    for [other] in others:
        is_written = jnp.where(jnp.isnan(other), other, is_written)
    received, is_written, output = vary_alike([received, is_written, output])
    wrong = jnp.asarray(jnp.nan if jnp.issubdtype(output.dtype, jnp.inexact) else 0, output.dtype)
    rows = chosen(is_written == 1, received, output)
    return chosen(jnp.isnan(is_written), jnp.full_like(output, wrong), rows)


def _peers(groups: Any, num_ranks: int) -> np.ndarray:
    """Returns the ranks of each rank's group, [W, ranks of a group]."""
    everyone = list(range(num_ranks))
    if groups is None:
        groups = [everyone]
    groups = [list(group) for group in groups]
    sizes = {len(group) for group in groups}
    if sorted(itertools.chain(*groups)) != everyone or len(sizes) != 1:
        raise ValueError(
            f"{_OP}: axis_index_groups is {groups}; it needs groups of one size that together hold "
            f"each of the ranks 0 to {num_ranks - 1} once."
        )
    peers = np.zeros((num_ranks, sizes.pop()), np.int32)
    for group in groups:
        peers[group] = group
    return peers
