"""Cuts local attention into blocks: the common layout of its two passes.

A block is a matrix `[rows, features]` of one batch row and one KV head. A pass computes blocks of
several KV heads together: they fit the caches, and give work to several threads. The rows of a
query block contain the G query heads of its KV head in turn, so K and V are never repeated, and all
seven products (two forward, five backward) are matmuls. Blocked arrays have axes [B*K, blocks,
rows, ...]: q, k and v in their own dtype, which a pass widens if necessary, and all others in the
accumulator's. Unused rows are zero, because 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._arrays import divided, index_dtype, sum_dtype
from jax_cp_dispatch._scans import running_sum
from jax_cp_dispatch.attention.local.local_options import PassOptions
from jax_cp_dispatch.attention.local.query_ranges import (
    KeyQueries,
    QueryRanges,
    cut_query_ranges,
)
from jax_cp_dispatch.attention.local.rows import BlockIndex, block_of, to_rows


class KeyRanges(NamedTuple):
    """The key rows [start, end) of each query row, and the key blocks that contain them."""

    start: Array  # [B*K, nq, G*block_q]
    end: Array
    first: Array  # [B*K, nq] first key block to visit
    last: Array  # one past the last
    queries: QueryRanges | None = None  # that may see each key row; None: all

    def of_queries(self, index: BlockIndex) -> KeyRanges:
        """Returns the ranges of one block of queries."""
        start, end, first, last = (block_of(x, index) for x in self[:4])
        return KeyRanges(start, end, first, last, self.queries and self.queries.of_queries(index))


class RowRanges(NamedTuple):
    """The key rows [kv_start, kv_end) of each query, `[B, T]`, and who may see each key row."""

    kv_start: Array
    kv_end: Array
    queries: KeyQueries | None = None


class BlockedOperands(NamedTuple):
    """The blocks of one call of local attention."""

    q: Array  # [B*K, nq, G*block_q, H]
    k: Array  # [B*K, nk, block_kv, H]
    v: Array  # [B*K, nk, block_kv, Hv]
    ranges: KeyRanges
    used: Array  # [B, T] queries with a non-empty range


def cut_operands(options: PassOptions, q, k, v, ranges: RowRanges) -> BlockedOperands:
    """Cuts checked operands of `local_attention` into blocks."""
    kv_start, kv_end, queries = ranges
    S, K = k.shape[1:3]
    # Constant ranges are common, and XLA takes seconds to fold the code that depends on them.
    kv_start, kv_end = lax.optimization_barrier((kv_start, kv_end))
    kv_start, kv_end = (x.astype(index_dtype(x.dtype)) for x in (kv_start, kv_end))
    start = jnp.clip(kv_start, 0, S).astype(jnp.int32)
    end = jnp.clip(kv_end, 0, S).astype(jnp.int32)
    used = start < end
    attended = attended_keys(start, end, S)
    if queries is not None:
        attended &= queries.start < queries.end
    k, v = (jnp.where(attended[:, :, None, None], x, 0) for x in (k, v))
    return BlockedOperands(
        q=cut_queries(options, q, used, K),
        k=to_rows(k, K, options.block_kv),
        v=to_rows(v, K, options.block_kv),
        ranges=cut_ranges(options, RowRanges(start, end, queries), q.shape, K, S),
        used=used,
    )


def attended_keys(start: Array, end: Array, num_keys: int) -> Array:
    """Returns which of the keys are in one of the ranges at least, bool `[B, num_keys]`."""
    B, used = start.shape[0], start < end
    row = jnp.arange(B, dtype=jnp.uint32)[:, None]
    step = used.astype(jnp.int32)
    edges = jnp.zeros((B, num_keys + 1), jnp.int32).at[row, start].add(step)
    edges = edges.at[row, end].add(-step)
    return running_sum(edges)[:, :num_keys] > 0


def cut_ranges(
    options: PassOptions, ranges: RowRanges, q_shape, num_groups: int, num_keys: int
) -> KeyRanges:
    """Cuts ranges in `[0, num_keys]`, for queries `[B, T, N, H]`."""
    kv_start, kv_end, queries = ranges
    used = kv_start < kv_end
    of_heads = lambda x: jnp.broadcast_to(x[:, :, None, None], (*x.shape, q_shape[2], 1))
    start = of_heads(jnp.where(used, kv_start, num_keys))
    end = of_heads(jnp.where(used, kv_end, 0))
    start = to_rows(start, num_groups, options.block_q, num_keys)[..., 0]
    end = to_rows(end, num_groups, options.block_q)[..., 0]
    first, _ = divided(jnp.min(start, axis=-1), options.block_kv)
    last, _ = divided(jnp.max(end, axis=-1) + options.block_kv - 1, options.block_kv)
    if queries is None:
        return KeyRanges(start, end, first, last)
    of_keys = cut_query_ranges(options, queries, used, q_shape, num_groups)
    return KeyRanges(start, end, first, last, of_keys)


def cut_queries(options: PassOptions, q, used, num_groups):
    """Returns query blocks; rows outside `used`, `[B, T]`, are zero."""
    return to_rows(jnp.where(used[:, :, None, None], q, 0), num_groups, options.block_q)


def each_query_block(options: PassOptions, one_block, carry, q):
    """Runs `carry = one_block(carry, index)` over the blocks of q, of all matrices.

    The carry is written in place without a copy; results of a `lax.scan` would be copied.
    """
    num_matrices, num_blocks = q.shape[:2]
    together = options.block_heads

    def body(number, carry):
        matrices, block = divided(number, num_blocks)
        return one_block(carry, BlockIndex(matrices * together, together, block))

    return lax.fori_loop(0, num_matrices // together * num_blocks, body, carry)


def positions(options: PassOptions, j):
    """Returns the key rows of block j."""
    return j * options.block_kv + jnp.arange(options.block_kv, dtype=jnp.int32)


def soft_capped(options: PassOptions, logits):
    """Returns soft-capped logits, and their derivative with respect to the given ones."""
    cap = options.logit_soft_cap
    if cap is None:
        return logits, 1
    ratio = jnp.tanh(logits / cap)
    return cap * ratio, 1 - ratio * ratio


def matmul(x, y, contract):
    """Multiplies per matrix at highest precision; `contract`: axis of x, axis of y."""
    dimensions = ((contract[:1], contract[1:]), ((0,), (0,)))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST)


def widen(x):
    """Converts `x` to the accumulator's dtype: on CPU, GEMMs in narrower types are slower."""
    return x.astype(accumulator(x))


def accumulator(x):
    """Returns the dtype of all sums."""
    return sum_dtype(x.dtype)
