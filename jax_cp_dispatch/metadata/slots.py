"""The compiled arithmetic of planning: running sums per destination, and their inverse.

W ranks, S slots, C replicas, N = S * C shards per rank in global order, R slots of a reverse plan.
Token sums wrap modulo 2**32; callers reject known values that would.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from jax_cp_dispatch.metadata.fields import Metadata

# Shards of a rank that are compared pairwise; a table [W * blocks, W] combines the blocks. Both
# parts cost about the same near 64 shards, and neither needs a sort.
_BLOCK = 64
# Rows of that table that are summed at a time: on CPU 10 times faster than `jnp.cumsum` at 512
# rows.
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
    forward = _forward(seq_len, dispatch, offset.reshape(dispatch.shape), matrix)
    source = _slot_source(_flat(replicas), slot, num_slots)
    num_received = jnp.sum(counts, 0, dtype=jnp.int32)
    mask = dispatch >= 0 if dispatch.ndim == 3 else None
    return forward, _reverse(seq_len, replicas.shape[2], source, num_received, matrix, mask)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KvInputs:
    """The arguments of `compute_metadata_kv`, in its order."""

    kv_to_q_mapping: Int32[Array, "W S C 2"]
    kv_to_q_rank: Int32[Array, "W S C"]
    kv_context_size: UInt32[Array, "W S"]
    q_to_num_kv_seq: Int32[Array, "W S"]
    q_to_num_kv_token: UInt32[Array, "W S"]
    seq_len: UInt32[Array, "W S"]
    num_seqs: Int32[Array, " W"]
    q_dispatch: Int32[Array, "W S"]


@partial(jax.jit, static_argnames="num_slots")
def plan_kv(kv: KvInputs, *, num_slots: int) -> tuple[Metadata, Metadata]:
    """`compute_metadata_kv` for `num_slots` reverse slots."""
    world_size, num_shards = kv.seq_len.shape
    (first_row, _), (first_slot, reserved) = _sums_per_destination(
        kv.q_dispatch, kv.q_to_num_kv_token, kv.q_to_num_kv_seq
    )
    q_rank, q_slot = kv.kv_to_q_mapping[..., 0], kv.kv_to_q_mapping[..., 1]
    query = jnp.where((q_rank >= 0) & (q_slot >= 0), q_rank * num_shards + q_slot, -1)
    dst = jnp.where(query >= 0, _take(kv.q_dispatch, query), -1)
    row = jnp.where(dst >= 0, _take(first_row, query) + kv.kv_context_size[..., None], 0)
    slot = _take(first_slot, query) + kv.kv_to_q_rank
    tokens = jnp.broadcast_to(kv.seq_len[..., None], dst.shape)

    matrix = _sum_table(_flat(dst), _flat(tokens), world_size)
    forward = _forward(kv.seq_len, dst, row, matrix, at_least=kv.num_seqs)
    source = _slot_source(_flat(dst), _flat(slot), num_slots)
    # Some slots may be empty, so the last used one counts. Slots beyond the bound are not in
    # `source`; then the slots that the queries reserve are counted.
    reserved = jnp.sum(reserved, 0, dtype=jnp.int32)
    num_received = jnp.where(reserved > num_slots, reserved, _last_used(source >= 0))
    return forward, _reverse(kv.seq_len, dst.shape[2], source, num_received, matrix, dst >= 0)


@partial(jax.jit, static_argnames="num_slots")
def attn_layout(
    shard_len: UInt32[Array, "W S"],
    shard_context: UInt32[Array, "W S"],
    dispatch: Int32[Array, "W S"],
    *,
    num_slots: int,
) -> tuple[
    Int32[Array, "W R_plus_1"],
    Int32[Array, "W R_plus_1"],
    Int32[Array, " W"],
    Int32[Array, " W"],
    Int32[Array, " W"],
]:
    """The fields of `compute_attn_layout_seqlens` for `num_slots` received shards."""
    ((slot, counts),) = _sums_per_destination(dispatch, jnp.ones(dispatch.shape, jnp.int32))
    source = _slot_source(dispatch, slot, num_slots)
    q, kv = (
        jnp.where(source >= 0, _take(x, source), 0).astype(jnp.int32)
        for x in (shard_len, shard_context)
    )
    cu_q, cu_kv = (jnp.pad(jnp.cumsum(x, 1, dtype=jnp.int32), ((0, 0), (1, 0))) for x in (q, kv))
    return cu_q, cu_kv, q.max(1), kv.max(1), jnp.sum(counts, 0, dtype=jnp.int32)


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


def _last_used(used: Bool[Array, "W S"]) -> Int32[Array, " W"]:
    """Returns the last used slot of each rank, plus one."""
    return jnp.max(jnp.where(used, jnp.arange(1, used.shape[1] + 1, dtype=jnp.int32), 0), 1)


def _forward(
    seq_len: UInt32[Array, "W S"],
    dst: Int32[Array, "W S *C"],
    offset: UInt32[Array, "W S *C"],
    matrix: UInt32[Array, "W W"],
    *,
    at_least: Int32[Array, " W"] | int = 0,
) -> Metadata:
    used = (dst.reshape(*seq_len.shape, -1) >= 0).any(-1) | (seq_len > 0)
    num_seqs = jnp.maximum(_last_used(used), at_least)
    return _metadata(dst, offset, seq_len, num_seqs, matrix.T)


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
    metadata = _metadata(home, offset, lengths, num_received, matrix)
    return dataclasses.replace(metadata, seq_recv_mask=mask, recv_seq_lens=seq_len)


def _metadata(
    dst_rank: Int32[Array, "..."],
    dst_offset: UInt32[Array, "..."],
    seq_len: UInt32[Array, "W slots"],
    num_seqs: Int32[Array, " W"],
    received: UInt32[Array, "W W"],
) -> Metadata:
    total = jnp.sum(received, 1, dtype=received.dtype)
    return Metadata(
        dst_rank=dst_rank,
        dst_offset=dst_offset,
        seq_len=seq_len,
        num_recv_tokens=jnp.concatenate([received, total[:, None]], 1),
        num_seqs=num_seqs,
        num_total_recv_tokens=total,
        world_size=received.shape[0],
    )
