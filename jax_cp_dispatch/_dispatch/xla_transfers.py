"""The plan of all ranks as XLA's operations read it, with the checks of the native handlers.

The conditions are those of csrc/dispatch/dispatch.cc. Rows are counted in int32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Int32

_MAX_INT32 = 2**31 - 1

MAX_UPDATES = 4096
"""Updates of `ragged_all_to_all` per rank and call. NCCL sends each separately; not measured."""


class MetadataOperands(NamedTuple):
    """The fields of forward metadata that movement reads, as integers of 32 or 64 bits.

    Either one rank's view, or the same with a leading 1 (as sharded by `in_specs=P(axis_name)`), or
    the views of all ranks with a leading W, of which a rank reads its own.
    """

    num_recv_tokens: Any  # [W + 1]
    seq_len: Any  # [S]
    dst_rank: Any  # [S] or [S, C]
    dst_offset: Any  # as dst_rank
    src_offset: Any = None  # [S]; None: shards are contiguous
    weights: Any = None  # as dst_rank, real numbers of this rank; see `combine_weighted_with_xla`


class XlaRanks(NamedTuple):
    """The ranks of an exchange.

    Without `axis_names`, one device holds the rows and the metadata of all ranks, in their order.
    """

    rank: Any  # the one that runs, an integer scalar; not read without `axis_names`
    axis_names: tuple[str, ...]  # whose devices are the ranks, the major one first
    num_ranks: int
    may_be_ragged: bool = False  # whether `ragged_all_to_all` may be used

    def gather(self, x: Array) -> Array:
        """Returns `[W, rows, ...]`: gathered, or on one device the rows split by rank."""
        if self.axis_names:
            return lax.all_gather(x, self.axis_names)
        return x.reshape(self.num_ranks, x.shape[0] // self.num_ranks, *x.shape[1:])

    def rows_per_rank_in(self, x: Array) -> int:
        return x.shape[0] // (1 if self.axis_names else self.num_ranks)

    def are_ragged(self, num_rows: int, plan: "XlaTransfers") -> bool:
        """Whether rows move by `ragged_all_to_all`; `num_rows` is how many may be written."""
        fits = num_rows > 0 and plan.dst_rank.size <= MAX_UPDATES
        return self.may_be_ragged and bool(self.axis_names) and self.num_ranks > 1 and fits


class XlaTransfers(NamedTuple):
    """The transfers of all ranks, and whether the native handlers would accept them."""

    dst_rank: Int32[Array, "W S C"]  # -1 where nothing moves
    dst_row: Int32[Array, "W S C"]
    src_row: Int32[Array, "W S"]
    num_rows: Int32[Array, "W S"]  # 0 where nothing moves
    is_contiguous: bool  # whether shards follow each other, so that a row is in one of them
    received: tuple[Array, ...]  # by rank and row: ranks, begins, ends, and indices in [W, S, C]
    is_valid: Bool[Array, ""]

    @property
    def num_moved(self) -> Int32[Array, "W S C"]:
        """Rows of each replica; zero everywhere if the plan is invalid."""
        return jnp.where((self.dst_rank >= 0) & self.is_valid, self.num_rows[..., None], 0)

    @property
    def begin_at_home(self) -> Int32[Array, "W S C"]:
        """The first row of each replica where those of a rank's shards are in order."""
        flat = self.num_moved.reshape(self.dst_rank.shape[0], -1)
        return (lax.cumsum(flat, axis=1) - flat).reshape(self.dst_rank.shape)


def read_transfers(
    metadata: MetadataOperands,
    ranks: XlaRanks,
    *,
    num_tokens: int,
    capacity: int,
    fingerprint: Int32[Array, " 9"] | None = None,
) -> XlaTransfers:
    """Gathers the metadata of all ranks and checks it; the rest of an invalid plan is undefined.

    `num_tokens` are rows per rank of the sender's arrays, `capacity` those of the receive buffers.
    """
    num_ranks, is_contiguous = ranks.num_ranks, metadata.src_offset is None
    metadata = _gather_metadata(metadata, ranks)
    seq_len, src_row = metadata.seq_len, metadata.src_offset
    dst_rank, dst_row = metadata.dst_rank, metadata.dst_offset
    if dst_rank.ndim == 2:
        dst_rank, dst_row = dst_rank[..., None], dst_row[..., None]
    if dst_rank.size == 0:  # one slot of padding, so that there is one to look up
        seq_len, src_row = jnp.zeros((num_ranks, 1), jnp.int32), None
        dst_row = jnp.zeros((num_ranks, 1, 1), jnp.int32)
        dst_rank = dst_row - 1

    # Nothing below overflows: `num_rows` is at most T + 1, which is as invalid as any larger value.
    num_rows = jnp.minimum(seq_len, num_tokens + 1)
    is_negative = seq_len < 0
    if src_row is None:
        src_row = _saturating_starts(num_rows, num_tokens + 1)
    else:
        is_negative |= src_row < 0
    moves = (dst_rank != -1) & (num_rows > 0)[..., None]
    is_misplaced = (
        (dst_rank < -1)
        | (dst_rank >= num_ranks)
        | (src_row > num_tokens - num_rows)[..., None]
        | (dst_row < 0)
        | (dst_row > capacity - num_rows[..., None])
    )
    dst_rank = jnp.where(moves, dst_rank, -1)
    num_moved = jnp.where(moves, num_rows[..., None], 0)
    senders = jnp.arange(num_ranks)[:, None, None]
    moved_from = jnp.zeros((num_ranks, num_ranks), jnp.int32)
    moved_from = moved_from.at[dst_rank, senders].add(num_moved)
    index = jnp.arange(dst_rank.size, dtype=jnp.int32)
    replicas = (*(x.ravel() for x in (dst_rank, dst_row, dst_row + num_moved)), index)
    received = rank, begin, end, _ = lax.sort(replicas, num_keys=2)
    overlap = (rank[1:] == rank[:-1]) & (rank[1:] >= 0) & (begin[1:] < end[:-1])
    is_valid = ~(
        jnp.any(is_negative)
        | jnp.any(moves & is_misplaced)
        | jnp.any(metadata.num_recv_tokens[:, -1] > capacity)
        | jnp.any(metadata.num_recv_tokens[:, :-1] != moved_from)
        | jnp.any(overlap)
    )
    if fingerprint is not None:  # all ranks follow the plan of one batch, and see that batch
        all_ = lax.all_gather(fingerprint, ranks.axis_names)
        is_right = jnp.all(all_[:, 1::2] == all_[:, 2::2])
        is_valid &= is_right & jnp.all(all_[:, 0] == all_[0, 0])
    num_rows = jnp.max(num_moved, axis=2)
    return XlaTransfers(dst_rank, dst_row, src_row, num_rows, is_contiguous, received, is_valid)


def find_sources(plan: XlaTransfers, rank: Array, capacity: int) -> tuple[Array, Array]:
    """Returns, per row of the rank's receive buffer, its source rank (-1: none) and row."""
    _, num_slots, num_replicas = plan.dst_rank.shape
    ranks, begins, ends, replicas = plan.received
    begin = jnp.where(ranks == rank, begins, _MAX_INT32)
    begin = jnp.where(ranks < rank, -1, begin)
    rows = jnp.arange(capacity, dtype=jnp.int32)
    place = jnp.searchsorted(begin, rows, side="right") - 1
    is_covered = (place >= 0) & (ranks[place] == rank) & (rows < ends[place])
    shard = replicas[place] // num_replicas
    src_rank = jnp.where(is_covered, shard // num_slots, -1)
    return src_rank, plan.src_row.ravel()[shard] + rows - begins[place]


def _gather_metadata(metadata: MetadataOperands, ranks: XlaRanks) -> MetadataOperands:
    """Returns every field with a leading W, in int32, gathered by one collective."""
    metadata = jax.tree.map(_to_int32, metadata)
    shape = metadata.seq_len.shape
    if len(shape) == 2 and shape[0] == ranks.num_ranks:
        return metadata
    if len(shape) == 2:
        metadata = jax.tree.map(lambda field: field[0], metadata)
    flat, unravel = ravel_pytree(metadata)
    return jax.vmap(unravel)(ranks.gather(flat))


def _to_int32(field: Array) -> Array:
    """Clips out-of-range values to the nearest value that is also rejected."""
    limits = jnp.iinfo(field.dtype)
    return jnp.clip(field, max(limits.min, -2), min(limits.max, _MAX_INT32)).astype(jnp.int32)


def _saturating_starts(lengths: Array, limit: int) -> Array:
    """Returns the exclusive sum along axis 1 of lengths up to `limit`, clipped to `limit`."""
    lengths = lengths.astype(jnp.uint32)
    ends = lax.cumsum(lengths, axis=1)
    has_wrapped = lax.cummax((ends < lengths).astype(jnp.int32), axis=1) > 0
    ends = jnp.where(has_wrapped, limit, jnp.minimum(ends, limit)).astype(jnp.int32)
    return jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
