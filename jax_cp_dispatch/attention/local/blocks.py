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
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._arguments import clip_to_int32
from jax_cp_dispatch._arrays import divided, sum_dtype
from jax_cp_dispatch._scans import are_covered
from jax_cp_dispatch.attention.local.local_options import PassOptions
from jax_cp_dispatch.attention.local.query_ranges import (
    KeyQueries,
    QueryRanges,
    cut_query_ranges,
)
from jax_cp_dispatch.attention.local.rows import BlockIndex, block_of, cut_tokens, to_rows

_LAST = 2**31 - 1


class KeyRanges(NamedTuple):
    """The key rows of each query, which the G heads of a group share."""

    rows: Array  # [B*K, nq, 2, block_q]: start and end
    queries: QueryRanges | None = None  # that may see each key row; None: all

    def of_heads(self, num_rows: int) -> Array:
        """Returns start and end of the `num_rows` rows of each block, `[..., 2, G*block_q]`."""
        *lead, block_q = self.rows.shape
        heads = jnp.broadcast_to(self.rows[..., None, :], (*lead, num_rows // block_q, block_q))
        return heads.reshape(*lead, num_rows)

    def of_queries(self, index: BlockIndex) -> KeyRanges:
        """Returns the ranges of one block of queries, with `rows` `[matrices, 2, block_q]`."""
        queries = self.queries and self.queries.of_queries(index)
        return KeyRanges(block_of(self.rows, index), queries)

    def key_blocks(self, options: PassOptions) -> KeyBlocks:
        """Returns the key blocks of one block of queries: as one pass that compiles once."""
        start, end = self.rows[:, 0], self.rows[:, 1]
        before = lambda x: divided(x, options.block_kv)[0]
        after = lambda x: before(x + (options.block_kv - 1))
        bounds = before(start), after(end), after(start), before(end)
        extremes, fills = (lax.min, lax.max, lax.max, lax.min), (_LAST, 0, 0, _LAST)
        combined = lambda xs, ys: [f(x, y) for f, x, y in zip(extremes, xs, ys, strict=True)]
        return KeyBlocks(*lax.reduce(bounds, tuple(map(np.int32, fills)), combined, (0, 1)))


class KeyBlocks(NamedTuple):
    """The key blocks that a block of queries visits, and those that all its queries see whole."""

    first: Array
    last: Array  # one past it
    first_whole: Array
    last_whole: Array  # likewise


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
    start, end = (jnp.clip(clip_to_int32(x), 0, S) for x in (kv_start, kv_end))
    used = start < end
    attended = are_covered(start, end, S)
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


def cut_ranges(
    options: PassOptions, ranges: RowRanges, q_shape, num_groups: int, num_keys: int
) -> KeyRanges:
    """Cuts ranges in `[0, num_keys]`, for queries `[B, T, N, H]`."""
    kv_start, kv_end, queries = ranges
    used = kv_start < kv_end
    start, end = jnp.where(used, kv_start, num_keys), jnp.where(used, kv_end, 0)
    blocks = [cut_tokens(start, options.block_q, num_keys), cut_tokens(end, options.block_q, 0)]
    rows = jnp.stack(blocks, axis=2)
    rows = jnp.broadcast_to(rows[:, None], (rows.shape[0], num_groups, *rows.shape[1:]))
    rows = rows.reshape(-1, *rows.shape[2:])
    if queries is None:
        return KeyRanges(rows)
    return KeyRanges(rows, cut_query_ranges(options, queries, used, q_shape, num_groups))


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
