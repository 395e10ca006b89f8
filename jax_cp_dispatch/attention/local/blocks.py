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

from jax_cp_dispatch._dtypes import index_dtype, sum_dtype
from jax_cp_dispatch.attention.local.options import PassOptions


class KeyRanges(NamedTuple):
    """The key rows [start, end) of each query row, and the key blocks that contain them."""

    start: Array  # [B*K, nq, G*block_q]
    end: Array
    first: Array  # [B*K, nq] first key block to visit
    last: Array  # one past the last


class BlockedOperands(NamedTuple):
    """The blocks of one call of local attention."""

    q: Array  # [B*K, nq, G*block_q, H]
    k: Array  # [B*K, nk, block_kv, H]
    v: Array  # [B*K, nk, block_kv, Hv]
    ranges: KeyRanges
    used: Array  # [B, T] queries with a non-empty range


def cut_operands(options: PassOptions, q, k, v, kv_start, kv_end) -> BlockedOperands:
    """Cuts checked operands of `local_attention` into blocks."""
    B, (S, K) = q.shape[0], k.shape[1:3]
    # Constant ranges are common, and XLA takes seconds to fold the code that depends on them.
    kv_start, kv_end = lax.optimization_barrier((kv_start, kv_end))
    kv_start, kv_end = (x.astype(index_dtype(x.dtype)) for x in (kv_start, kv_end))
    start = jnp.clip(kv_start, 0, S).astype(jnp.int32)
    end = jnp.clip(kv_end, 0, S).astype(jnp.int32)
    used = start < end

    row = jnp.arange(B)[:, None]
    step = used.astype(jnp.int32)
    edges = jnp.zeros((B, S + 1), jnp.int32).at[row, start].add(step).at[row, end].add(-step)
    attended = (jnp.cumsum(edges, axis=1)[:, :S] > 0)[:, :, None, None]
    k, v = (jnp.where(attended, x, 0) for x in (k, v))
    return BlockedOperands(
        q=cut_queries(options, q, used, K),
        k=to_rows(k, K, options.block_kv),
        v=to_rows(v, K, options.block_kv),
        ranges=cut_ranges(options, start, end, q.shape, K, S),
        used=used,
    )


def cut_ranges(options: PassOptions, kv_start, kv_end, q_shape, num_groups, num_keys) -> KeyRanges:
    """Cuts `[B, T]` ranges in `[0, num_keys]`, for queries `[B, T, N, H]`."""
    used = kv_start < kv_end
    of_heads = lambda x: jnp.broadcast_to(x[:, :, None, None], (*x.shape, q_shape[2], 1))
    start = of_heads(jnp.where(used, kv_start, num_keys))
    end = of_heads(jnp.where(used, kv_end, 0))
    start = to_rows(start, num_groups, options.block_q, num_keys)[..., 0]
    end = to_rows(end, num_groups, options.block_q)[..., 0]
    first = jnp.min(start, axis=-1) // options.block_kv
    last = -(-jnp.max(end, axis=-1) // options.block_kv)
    return KeyRanges(start, end, first, last)


def cut_queries(options: PassOptions, q, used, num_groups):
    """Returns query blocks; rows outside `used`, `[B, T]`, are zero."""
    return to_rows(jnp.where(used[:, :, None, None], q, 0), num_groups, options.block_q)


def to_rows(x, num_groups, block, fill: int | float = 0):
    """`[B, L, K*G, F] -> [B*K, num_blocks, G*block, F]`; pads the last block with `fill`."""
    B, L, N, F = x.shape
    num_blocks = -(-L // block)
    widths = ((0, 0), (0, num_blocks * block - L), (0, 0), (0, 0))
    x = jnp.pad(x, widths, constant_values=fill)
    x = x.reshape(B, num_blocks, block, num_groups, N // num_groups, F)
    x = jnp.transpose(x, (0, 3, 1, 4, 2, 5))
    return x.reshape(B * num_groups, num_blocks, -1, F)


def from_rows(x, shape, num_groups):
    """The inverse: `[B*K, num_blocks, G*block, F] -> [B, L, K*G, F]`, with F of `x`."""
    B, L, N, _ = shape
    _, num_blocks, rows, F = x.shape
    heads = N // num_groups
    x = x.reshape(B, num_groups, num_blocks, heads, rows // heads, F)
    return jnp.transpose(x, (0, 2, 4, 1, 3, 5)).reshape(B, -1, N, F)[:, :L]


class BlockIndex(NamedTuple):
    """The index of one block in several matrices, which are computed together."""

    matrix: Array  # the first one
    num_matrices: int
    block: Array

    def at(self, block) -> BlockIndex:
        """Returns another block of the same matrices."""
        return self._replace(block=block)


def each_query_block(options: PassOptions, one_block, carry, xs):
    """Runs `carry = one_block(carry, index, *blocks)` over the query blocks of all matrices.

    The carry is written in place without a copy; results of a `lax.scan` would be copied.
    """
    num_matrices, num_blocks = xs[0].shape[:2]
    together = options.block_heads

    def body(number, carry):
        index = BlockIndex(number // num_blocks * together, together, number % num_blocks)
        return one_block(carry, index, *(block_of(x, index) for x in xs))

    return lax.fori_loop(0, num_matrices // together * num_blocks, body, carry)


def block_of(x, index: BlockIndex):
    """Returns `x[matrices, block]`, `[matrices, ...]`."""
    sizes = (index.num_matrices, 1, *x.shape[2:])
    x = lax.dynamic_slice(x, _corner(x, index), sizes, allow_negative_indices=False)
    return x.reshape(-1, *x.shape[2:])


def set_block(x, index: BlockIndex, block):
    """Returns `x` with `block` at `index`."""
    block = block.reshape(index.num_matrices, 1, *block.shape[1:])
    return lax.dynamic_update_slice(x, block, _corner(x, index), allow_negative_indices=False)


def _corner(x, index: BlockIndex):
    return [jnp.int32(corner) for corner in (index.matrix, index.block, *[0] * (x.ndim - 2))]


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
