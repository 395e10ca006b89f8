"""Planning: from shards and their destinations to the `Metadata` of every exchange.

The planning functions are `jax.numpy` with static shapes. With concrete arguments the size of the
reverse plan is exact; with traced ones it is `max_recv_seqs`.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int32, Integer, Shaped, UInt32

from jax_cp_dispatch._arguments import HostOrDevice, clip_to_int32, host_value
from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch.metadata.fields import Metadata

# ---- Checks the arguments of the planning functions; every error names the argument.

_MAX_INT32 = 2**31 - 1
_MAX_UINT32 = 2**32 - 1
_TOKENS = {"seq_len", "kv_context_size", "q_to_num_kv_token", "shard_len", "shard_context"}


class Inputs(dict[str, Any]):
    """The integer arrays of one call, by name: NumPy where values are known, traced otherwise."""

    def __init__(self, op: str, annotated: Any, **arrays: Any):
        self.op = op
        for name, value in arrays.items():
            known = host_value(value)
            self[name] = value if known is None else known
        all_ranks = "Pass the plan of all ranks, not one rank's row."
        check_annotated(op, annotated, self, {"seq_len": all_ranks, "shard_len": all_ranks})
        for name, x in self.items():
            if 0 in x.shape or (name == "dispatch" and x.ndim > 3):
                raise ValueError(
                    f"{op}: {name} has shape {x.shape}; it needs [W, S], or for replicas "
                    f"[W, S, C], with at least one of each. {all_ranks}"
                )
        self.known = all(isinstance(x, np.ndarray) for x in self.values())

    def require_ranges(self, **ranges: tuple[int, int]) -> None:
        """Rejects known values outside `[low, high]`."""
        for name, (low, high) in ranges.items():
            x = self[name]
            if isinstance(x, np.ndarray):
                self.refuse(name, (x < low) | (x > high), f"needs to lie in [{low}, {high}]")

    def refuse(self, name: str, bad: np.ndarray, needs: str) -> None:
        """Raises at the first element of `name` that is `bad`."""
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            axes = ("rank", "slot", "replica", "component")
            place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))
            raise ValueError(f"{self.op}: {name} at {place} is {self[name][at]}; it {needs}.")

    def require_tokens(self, what: str, per_rank: np.ndarray, *, high: int = _MAX_UINT32) -> None:
        """Rejects token sums that exceed the range of the plan's fields."""
        if per_rank.max() > high:
            rank = int(per_rank.argmax())
            raise ValueError(
                f"{self.op}: {what} of rank {rank} is {int(per_rank[rank])} tokens; at most "
                f"{high} are possible. Give each rank fewer tokens."
            )

    def compute(
        self, function: Callable[..., Any], needed: np.ndarray | None, max_recv_seqs: Any
    ) -> tuple[Any, int]:
        """Runs a compiled planning function of all arrays, for `needed` slots per rank if known.

        Returns its result, and the number of valid slots. This is `max_recv_seqs` if it is given.
        Otherwise the computation uses the next power of two, so that plans of varying size share a
        few compiled programs.
        """
        if max_recv_seqs is not None:
            padded = num_slots = self._bound(needed, max_recv_seqs)
        elif needed is None:
            raise ValueError(
                f"{self.op}: the number of shards that a rank receives depends on traced "
                f"values. Pass max_recv_seqs, an upper bound, as a static int."
            )
        else:
            num_slots = max(1, int(needed.max()))  # arrays are never empty
            padded = 1 << (num_slots - 1).bit_length()
        arrays = [
            clip_to_int32(x, np.uint32 if name in _TOKENS else np.int32) for name, x in self.items()
        ]
        # A plan of known values is a constant, even inside jit.
        with jax.core.eval_context() if self.known else contextlib.nullcontext():
            return function(*arrays, num_slots=padded), num_slots

    def _bound(self, needed: np.ndarray | None, max_recv_seqs: Any) -> int:
        if isinstance(max_recv_seqs, Tracer):
            raise TypeError(
                f"{self.op}: max_recv_seqs is traced; it needs to be a static int, because it is a "
                "shape."
            )
        bound = operator.index(max_recv_seqs)
        if bound < 1:
            raise ValueError(f"{self.op}: max_recv_seqs is {bound}; it needs to be at least 1.")
        if needed is not None and needed.max() > bound:
            most = int(needed.max())
            raise ValueError(
                f"{self.op}: rank {int(needed.argmax())} would receive {most} shards but "
                f"max_recv_seqs is {bound}. Pass max_recv_seqs>={most}, or omit it."
            )
        return bound


def count_per_rank(dst: np.ndarray, world_size: int, weights: np.ndarray) -> np.ndarray:
    """Returns the sum of `weights` sent to each rank; exact below 2**53."""
    sent = dst >= 0
    total = np.bincount(
        dst[sent], weights=np.broadcast_to(weights, dst.shape)[sent], minlength=world_size
    )
    return total.astype(np.int64)


# ---- The compiled arithmetic of planning: running sums per destination, and their inverse.
#
# W ranks, S slots, C replicas, N = S * C shards per rank in global order, R slots of a reverse
# plan. Token sums wrap modulo 2**32; callers reject known values that would.

# Shards of a rank that are compared pairwise; a table [W * blocks, W] combines the blocks. Both
# parts cost about the same near 64 shards, and neither needs a sort.
_BLOCK = 64
# Rows of that table summed at a time: on CPU 10 times faster than `jnp.cumsum` at 512 rows.
_ROWS = 4


@partial(jax.jit, static_argnames="num_slots")
def plan(
    seq_len: UInt32[Array, "W S"], dispatch: Int32[Array, "W S *C"], *, num_slots: int
) -> tuple[Metadata, Metadata]:
    """`compute_metadata` for `num_slots` reverse slots."""
    replicas = dispatch.reshape(*seq_len.shape, -1)
    tokens = jnp.broadcast_to(seq_len[..., None], replicas.shape)
    (offset, matrix), (slot, counts) = _sums_per_destination(
        _flat(replicas), _flat(tokens), jnp.ones(_flat(replicas).shape, jnp.int32)
    )
    offset = offset.reshape(dispatch.shape)
    forward = _metadata(matrix.T, dst_rank=dispatch, dst_offset=offset, seq_len=seq_len)
    source = _slot_source(_flat(replicas), slot, num_slots)
    num_received = jnp.sum(counts, 0, dtype=jnp.int32)
    mask = dispatch >= 0 if dispatch.ndim == 3 else None
    return forward, _reverse(seq_len, replicas.shape[2], source, num_received, matrix, mask)


@partial(jax.jit, static_argnames="num_slots")
def plan_kv(
    kv_to_q_mapping: Int32[Array, "W S C 2"],
    kv_to_q_rank: Int32[Array, "W S C"],
    kv_context_size: UInt32[Array, "W S"],
    q_to_num_kv_seq: Int32[Array, "W S"],
    q_to_num_kv_token: UInt32[Array, "W S"],
    seq_len: UInt32[Array, "W S"],
    num_seqs: Int32[Array, " W"],
    q_dispatch: Int32[Array, "W S"],
    *,
    num_slots: int,
) -> tuple[Metadata, Metadata]:
    """`compute_metadata_kv` for `num_slots` reverse slots."""
    world_size, num_shards = seq_len.shape
    (first_row, _), (first_slot, reserved) = _sums_per_destination(
        q_dispatch, q_to_num_kv_token, q_to_num_kv_seq
    )
    q_rank, q_slot = kv_to_q_mapping[..., 0], kv_to_q_mapping[..., 1]
    query = jnp.where((q_rank >= 0) & (q_slot >= 0), q_rank * num_shards + q_slot, -1)
    dst = jnp.where(query >= 0, _take(q_dispatch, query), -1)
    row = jnp.where(dst >= 0, _take(first_row, query) + kv_context_size[..., None], 0)
    slot = _take(first_slot, query) + kv_to_q_rank
    tokens = jnp.broadcast_to(seq_len[..., None], dst.shape)

    matrix = _sum_table(_flat(dst), _flat(tokens), world_size)
    forward = _metadata(matrix.T, dst_rank=dst, dst_offset=row, seq_len=seq_len)
    forward = dataclasses.replace(forward, num_seqs=jnp.maximum(forward.num_seqs, num_seqs))
    source = _slot_source(_flat(dst), _flat(slot), num_slots)
    # Some slots may be empty, so the last used one counts. Slots beyond the bound are not in
    # `source`; then the slots that the queries reserve are counted.
    reserved = jnp.sum(reserved, 0, dtype=jnp.int32)
    place = jnp.arange(1, num_slots + 1, dtype=jnp.int32)
    last_used = jnp.max(jnp.where(source >= 0, place, 0), 1)
    num_received = jnp.where(reserved > num_slots, reserved, last_used)
    return forward, _reverse(seq_len, dst.shape[2], source, num_received, matrix, dst >= 0)


class AttnLayoutSeqlens(NamedTuple):
    """Inputs of variable-length attention kernels, per rank, in attention layout.

    R is the number of slots for received shards: the number that the busiest rank receives (at
    least 1), or `max_recv_seqs`. Lengths count tokens.

    Attributes:
      cu_seqlens_q: i32 `[W, R + 1]`; the start of each received query shard, then the total,
        repeated past the rank's last shard.
      cu_seqlens_kv: i32 `[W, R + 1]`; the same for the KV context of each query shard.
      max_seqlen_q: i32 `[W]`; the longest query shard, 0 if nothing is received.
      max_seqlen_kv: i32 `[W]`; the longest KV context.
      num_local_seqs: i32 `[W]`; query shards received; exceeds R only if traced values need more
        than `max_recv_seqs`.
    """

    cu_seqlens_q: Int32[Array, "W R_plus_1"]
    cu_seqlens_kv: Int32[Array, "W R_plus_1"]
    max_seqlen_q: Int32[Array, " W"]
    max_seqlen_kv: Int32[Array, " W"]
    num_local_seqs: Int32[Array, " W"]


@partial(jax.jit, static_argnames="num_slots")
def attn_layout(
    shard_len: UInt32[Array, "W S"],
    shard_context: UInt32[Array, "W S"],
    dispatch: Int32[Array, "W S"],
    *,
    num_slots: int,
) -> AttnLayoutSeqlens:
    """`compute_attn_layout_seqlens` for `num_slots` received shards."""
    ((slot, counts),) = _sums_per_destination(dispatch, jnp.ones(dispatch.shape, jnp.int32))
    source = _slot_source(dispatch, slot, num_slots)
    q, kv = (
        jnp.where(source >= 0, _take(x, source), 0).astype(jnp.int32)
        for x in (shard_len, shard_context)
    )
    cu_q, cu_kv = (jnp.pad(jnp.cumsum(x, 1, dtype=jnp.int32), ((0, 0), (1, 0))) for x in (q, kv))
    num_received = jnp.sum(counts, 0, dtype=jnp.int32)
    return AttnLayoutSeqlens(cu_q, cu_kv, q.max(1), kv.max(1), num_received)


def _flat(x: Shaped[Array, "W S C"]) -> Shaped[Array, "W N"]:
    return x.reshape(x.shape[0], -1)


def _take(x: Shaped[Array, "W S"], index: Int32[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Returns `x.ravel()[index]`; the caller masks the entries of negative indices."""
    return jnp.take(x.ravel(), index, mode="clip")


def _sum_table(
    dst: Int32[Array, "A N"], weight: Shaped[Array, "A N"], world_size: int
) -> Shaped[Array, "A W"]:
    """Returns, per row, the sum of the weights for each destination."""
    sent = dst >= 0
    row = jnp.arange(dst.shape[0])[:, None]
    table = jnp.zeros((dst.shape[0], world_size), weight.dtype)
    return table.at[row, jnp.where(sent, dst, 0)].add(jnp.where(sent, weight, 0))


def _sums_per_destination(
    dst: Int32[Array, "W N"], *weights: Shaped[Array, "W N"]
) -> list[tuple[Shaped[Array, "W N"], Shaped[Array, "W W"]]]:
    """Returns each weight's sums over earlier shards to the same rank, and per [src, dst]."""
    world_size, num = dst.shape
    block = min(num, _BLOCK)
    pad = ((0, 0), (0, -num % block))
    dst = jnp.pad(dst, pad, constant_values=-1).reshape(-1, block)
    weights = tuple(jnp.pad(weight, pad).reshape(-1, block) for weight in weights)
    tables = [_sum_table(dst, weight, world_size) for weight in weights]
    column = jnp.maximum(dst, 0)
    before = tuple(jnp.take_along_axis(_rows_before(t), column, 1) for t in tables)

    # A loop, because XLA would repeat one [block, block] comparison for each use of the sums.
    def add_shard(sums, shard):
        index, shard_dst, shard_weights = shard
        later = (dst == shard_dst[:, None]) & (jnp.arange(block)[None] > index)
        added = (jnp.where(later, weight[:, None], 0) for weight in shard_weights)
        return tuple(x + y for x, y in zip(sums, added, strict=True)), None

    shards = (jnp.arange(block), dst.T, tuple(weight.T for weight in weights))
    sums, _ = jax.lax.scan(add_shard, before, shards)
    sums = [jnp.where(dst >= 0, x, 0).reshape(world_size, -1)[:, :num] for x in sums]
    matrices = [jnp.sum(t.reshape(world_size, -1, world_size), 1, dtype=t.dtype) for t in tables]
    return list(zip(sums, matrices, strict=True))


def _rows_before(table: Shaped[Array, "A W"]) -> Shaped[Array, "A W"]:
    """Returns the exclusive cumulative sum along the rows, computed in nested groups."""
    num_rows, width = table.shape
    if num_rows == 1:
        return jnp.zeros_like(table)
    groups = jnp.pad(table, ((0, -num_rows % _ROWS), (0, 0))).reshape(-1, _ROWS, width)
    before = _rows_before(jnp.sum(groups, 1, dtype=table.dtype))
    earlier = jnp.tril(jnp.ones((_ROWS, _ROWS), bool), -1)[:, :, None]
    within = jnp.sum(jnp.where(earlier, groups[:, None], 0), 2, dtype=table.dtype)
    return (before[:, None] + within).reshape(-1, width)[:num_rows]


def _slot_source(
    dst: Int32[Array, "W N"], slot: Int32[Array, "W N"], num_slots: int
) -> Int32[Array, "W R"]:
    """Returns the global index of the shard in each slot of each destination; -1 if empty."""
    world_size = dst.shape[0]
    size = world_size * num_slots
    position = jnp.where((dst >= 0) & (slot < num_slots), dst * num_slots + slot, size)
    index = jnp.arange(dst.size, dtype=jnp.int32)
    source = jnp.full(size, -1, jnp.int32).at[position.ravel()].set(index, mode="drop")
    return source.reshape(world_size, num_slots)


def _reverse(
    seq_len: UInt32[Array, "W S"],
    num_replicas: int,
    source: Int32[Array, "W R"],
    num_received: Int32[Array, " W"],
    matrix: UInt32[Array, "W W"],
    mask: Bool[Array, "W S C"] | None,
) -> Metadata:
    """Returns each received shard to its sender: replica c of row o goes to row c * T + o."""
    filled = source >= 0
    shard, replica = source // num_replicas, source % num_replicas
    home = jnp.where(filled, shard // seq_len.shape[1], -1)
    start = jnp.cumsum(seq_len, 1, dtype=seq_len.dtype) - seq_len
    total = jnp.sum(seq_len, 1, dtype=seq_len.dtype)
    row = jnp.take(total, home, mode="clip") * replica.astype(seq_len.dtype) + _take(start, shard)
    offset = jnp.where(filled, row, 0)
    lengths = jnp.where(filled, _take(seq_len, shard), 0)
    return _metadata(
        matrix,
        dst_rank=home,
        dst_offset=offset,
        seq_len=lengths,
        num_seqs=num_received,
        seq_recv_mask=mask,
        recv_seq_lens=seq_len,
    )


def _metadata(received: UInt32[Array, "W W"], **fields: Any) -> Metadata:
    total = jnp.sum(received, 1, keepdims=True, dtype=received.dtype)
    num_recv_tokens = jnp.concatenate([received, total], 1)
    return Metadata(**fields, num_recv_tokens=num_recv_tokens, world_size=len(received))


def compute_metadata(
    seq_len: Integer[HostOrDevice, "W S"],
    dispatch: Integer[HostOrDevice, "W S *C"],
    *,
    max_recv_seqs: int | None = None,
) -> tuple[Metadata, Metadata]:
    """Plans an exchange; shards arrive in the order (rank, slot, replica) of their senders.

    Call anywhere, also inside `jit` and `vmap`. Not differentiable (integers).

    Args:
      seq_len: integer `[W, S]`; tokens in each shard.
      dispatch: integer `[W, S]` or `[W, S, C]`; the rank each shard (replica) goes to, -1 = none.
      max_recv_seqs: slots of the reverse plan. None: as many as the busiest rank receives (at least
        1); the arguments must then be concrete.
    Returns:
      The forward plan, and the reverse plan, which returns every received shard to its sender.
      Reverse slots are in the order of arrival. Replica c of the shard at row o returns to row `c *
      T + o`, where T is the sender's `sum(seq_len)`. If traced values need more slots than
      `max_recv_seqs`, the slots beyond it are missing, and `num_seqs` is the number needed.
    Raises:
      TypeError: an argument is not of integers.
      ValueError: wrong shapes, values out of range, more shards than `max_recv_seqs`, or traced
        arguments without `max_recv_seqs`.
    """
    inputs = Inputs("compute_metadata", compute_metadata, seq_len=seq_len, dispatch=dispatch)
    world_size, _ = shape = inputs["seq_len"].shape
    inputs.require_ranges(seq_len=(0, _MAX_UINT32), dispatch=(-1, world_size - 1))
    needed = None
    if inputs.known:
        lengths, dst = inputs["seq_len"].astype(np.int64), inputs["dispatch"]
        dst = dst.reshape(*shape, -1)
        inputs.require_tokens("seq_len x C", lengths.sum(1) * dst.shape[2])
        received = count_per_rank(dst, world_size, lengths[..., None])
        inputs.require_tokens("what seq_len sends to the buffer", received)
        needed = count_per_rank(dst, world_size, np.ones(1))
    return _forward_reverse(plan, inputs, needed, max_recv_seqs)


def compute_metadata_kv(
    kv_to_q_mapping: Integer[HostOrDevice, "W S C 2"],
    kv_to_q_rank: Integer[HostOrDevice, "W S C"],
    kv_context_size: Integer[HostOrDevice, "W S"],
    q_to_num_kv_seq: Integer[HostOrDevice, "W S"],
    q_to_num_kv_token: Integer[HostOrDevice, "W S"],
    seq_len: Integer[HostOrDevice, "W S"],
    num_seqs: Integer[HostOrDevice, " W"],
    q_dispatch: Integer[HostOrDevice, "W S"],
    *,
    max_recv_seqs: int | None = None,
) -> tuple[Metadata, Metadata]:
    """Plans the exchange of keys and values for planned queries: each query gets its own KV.

    A rank receives the KV in the order of its queries; the shards of one query are in
    `kv_to_q_rank` order. Call anywhere, also inside `jit` and `vmap`. Not differentiable.

    Args:
      kv_to_q_mapping: integer `[W, S, C, 2]`; (rank, slot) of the query shard that replica c of a
        KV shard serves; unused if either is -1.
      kv_to_q_rank: integer `[W, S, C]`; the position of the KV shard among those of that query.
      kv_context_size: integer `[W, S]`; tokens of the document before the KV shard.
      q_to_num_kv_seq: integer `[W, S]`; KV shards of each query shard.
      q_to_num_kv_token: integer `[W, S]`; their tokens.
      seq_len: integer `[W, S]`; tokens in each KV shard.
      num_seqs: integer `[W]`; slots in use. The plan covers these, and every slot with a
        destination or a length.
      q_dispatch: integer `[W, S]`; the rank each query shard goes to, -1 = none.
      max_recv_seqs: slots of the reverse plan, as in `compute_metadata`.
    Returns:
      The forward plan `[W, S, C]`, and the reverse plan, with one slot per received KV shard. It
      returns rows in layout `(C, sum(seq_len))`.
    Raises:
      TypeError: an argument is not of integers.
      ValueError: as in `compute_metadata`; or KV that exceeds the rows reserved for its query.
    """
    inputs = Inputs(
        "compute_metadata_kv",
        compute_metadata_kv,
        kv_to_q_mapping=kv_to_q_mapping,
        kv_to_q_rank=kv_to_q_rank,
        kv_context_size=kv_context_size,
        q_to_num_kv_seq=q_to_num_kv_seq,
        q_to_num_kv_token=q_to_num_kv_token,
        seq_len=seq_len,
        num_seqs=num_seqs,
        q_dispatch=q_dispatch,
    )
    world_size, num_shards = inputs["seq_len"].shape
    tokens = 0, _MAX_UINT32
    inputs.require_ranges(
        q_dispatch=(-1, world_size - 1),
        num_seqs=(0, num_shards),
        seq_len=tokens,
        kv_context_size=tokens,
        q_to_num_kv_token=tokens,
        q_to_num_kv_seq=(0, _MAX_INT32),
    )
    needed = _check_kv(inputs) if inputs.known else None
    return _forward_reverse(plan_kv, inputs, needed, max_recv_seqs)


def compute_attn_layout_seqlens(
    shard_len: Integer[HostOrDevice, "W S"],
    shard_context: Integer[HostOrDevice, "W S"],
    dispatch: Integer[HostOrDevice, "W S"],
    *,
    max_recv_seqs: int | None = None,
) -> AttnLayoutSeqlens:
    """Returns the lengths of the received query shards and of their KV, in attention layout.

    Call anywhere, also inside `jit` and `vmap`. Not differentiable.

    Args:
      shard_len: integer `[W, S]`; tokens in each query shard.
      shard_context: integer `[W, S]`; tokens of the shard's KV context, itself included.
      dispatch: integer `[W, S]`; the rank each query shard goes to, -1 = none.
      max_recv_seqs: R, the slots of the result; None as in `compute_metadata`.
    Raises:
      TypeError: an argument is not of integers.
      ValueError: as in `compute_metadata`.
    """
    inputs = Inputs(
        "compute_attn_layout_seqlens",
        compute_attn_layout_seqlens,
        shard_len=shard_len,
        shard_context=shard_context,
        dispatch=dispatch,
    )
    world_size, _ = inputs["shard_len"].shape
    tokens, needed = (0, _MAX_INT32), None
    inputs.require_ranges(dispatch=(-1, world_size - 1), shard_len=tokens, shard_context=tokens)
    if inputs.known:
        for name in ("shard_len", "shard_context"):
            received = count_per_rank(inputs["dispatch"], world_size, inputs[name])
            inputs.require_tokens(f"what {name} sends to the layout", received, high=_MAX_INT32)
        needed = count_per_rank(inputs["dispatch"], world_size, np.ones(1))
    result, num_slots = inputs.compute(attn_layout, needed, max_recv_seqs)
    return result._replace(
        cu_seqlens_q=_cut(result.cu_seqlens_q, num_slots + 1),
        cu_seqlens_kv=_cut(result.cu_seqlens_kv, num_slots + 1),
    )


def _check_kv(inputs: Inputs) -> np.ndarray:
    """Checks known KV inputs against each other; returns the slots that each rank needs."""
    mapping, dispatch = inputs["kv_to_q_mapping"], inputs["q_dispatch"]
    outside = (mapping < -1) | (mapping >= dispatch.shape)
    inputs.refuse("kv_to_q_mapping", outside, "needs to name a rank and a slot, or be -1")
    rank, slot = np.moveaxis(mapping.clip(0), -1, 0)
    dst = np.where((mapping < 0).any(-1), -1, dispatch[rank, slot])

    needs = "needs to lie in [0, q_to_num_kv_seq of its query)"
    position = inputs["kv_to_q_rank"].astype(np.int64)
    room = inputs["q_to_num_kv_seq"][rank, slot]
    inputs.refuse("kv_to_q_rank", (dst >= 0) & ((position < 0) | (position >= room)), needs)
    sent = np.flatnonzero(dst >= 0)
    place = (np.ravel_multi_index((rank, slot), dispatch.shape) << 31) + position
    again = dst >= 0
    again.flat[sent[np.unique(place.flat[sent], return_index=True)[1]]] = False
    inputs.refuse("kv_to_q_rank", again, "needs to differ from the other KV shards of its query")
    lengths = inputs["seq_len"].astype(np.int64)
    context = inputs["kv_context_size"].astype(np.int64)
    room = inputs["q_to_num_kv_token"].astype(np.int64)[rank, slot]
    too_long = (dst >= 0) & ((context + lengths)[..., None] > room)
    needs = "needs to leave space for seq_len within q_to_num_kv_token of its query"
    inputs.refuse("kv_context_size", too_long.any(-1), needs)

    world_size = len(lengths)
    inputs.require_tokens("seq_len x C", lengths.sum(1) * dst.shape[2])
    for name, to, tokens in (
        ("what seq_len sends to the buffer", dst, lengths[..., None]),
        ("what q_to_num_kv_token reserves in the buffer", dispatch, inputs["q_to_num_kv_token"]),
    ):
        inputs.require_tokens(name, count_per_rank(to, world_size, tokens))
    return count_per_rank(dispatch, world_size, inputs["q_to_num_kv_seq"])


def _forward_reverse(
    function: Callable[..., Any],
    inputs: Inputs,
    needed: np.ndarray | None,
    max_recv_seqs: int | None,
) -> tuple[Metadata, Metadata]:
    (forward, reverse), num_slots = inputs.compute(function, needed, max_recv_seqs)
    slots = {
        name: _cut(getattr(reverse, name), num_slots)
        for name in ("dst_rank", "dst_offset", "seq_len")
    }
    return forward, dataclasses.replace(reverse, **slots)


def _cut(x: Array, num_slots: int) -> Array:
    """Returns `x[:, :num_slots]`; cut on the host, so that sizes do not compile new programs."""
    if x.shape[1] == num_slots:
        return x
    with jax.core.eval_context():
        return jnp.asarray(np.asarray(x)[:, :num_slots])
