"""Local attention cut in blocks: the layout that its two passes share.

A block is a plain matrix `[rows, features]` of one batch row and one KV head, small enough for the
caches and large enough for several threads. The G query heads of a KV head lie one after another
along the rows of a query block, so K and V are never repeated, and all seven products (two forward,
five backward) are matmuls.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch.attention.local_options import Options


class Blocks(NamedTuple):
    """Operands in the accumulator's dtype; the first axis counts blocks in (B, K, block) order."""

    q: Array  # [B*K*nq, G*block_q, H], scaled, zero in rows with an empty range
    k: Array  # [B*K*nk, block_kv, H], zero in rows that nobody attends
    v: Array  # [B*K*nk, block_kv, Hv], likewise
    used: Array  # [B, T] rows with a non-empty range
    start: Array  # [B*K*nq, G*block_q]
    end: Array  # [B*K*nq, G*block_q]
    first: Array  # [B*K*nq] first block of k to visit
    last: Array  # [B*K*nq] one past the last


def cut_in_blocks(options: Options, q, k, v, kv_start, kv_end) -> Blocks:
    """Widens small floats once, here: on CPU their products are slower than those of float32."""
    B, _, N, _ = q.shape
    S, K = k.shape[1:3]
    dtype = accumulator(q)
    # Constant ranges are common, and XLA takes seconds to fold what follows from them.
    kv_start, kv_end = lax.optimization_barrier((kv_start, kv_end))
    if options.window is not None:
        kv_end = jnp.maximum(kv_end.astype(jnp.promote_types(kv_end.dtype, jnp.int32)), 0)
        kv_start = jnp.maximum(kv_start, kv_end - options.window)
    start = jnp.clip(kv_start, 0, S).astype(jnp.int32)
    end = jnp.clip(kv_end, 0, S).astype(jnp.int32)
    used = start < end
    start, end = jnp.where(used, start, S), jnp.where(used, end, 0)

    # 0 * NaN is NaN, so rows that carry no weight are cleared before the matmuls read them.
    row = jnp.arange(B)[:, None]
    step = used.astype(jnp.int32)
    edges = jnp.zeros((B, S + 1), jnp.int32).at[row, start].add(step).at[row, end].add(-step)
    attended = (jnp.cumsum(edges, axis=1)[:, :S] > 0)[:, :, None, None]
    k, v = (jnp.where(attended, x.astype(dtype), 0) for x in (k, v))
    q = jnp.where(used[:, :, None, None], q.astype(dtype) * options.scale, 0)

    of_heads = lambda x: jnp.broadcast_to(x[:, :, None, None], (*x.shape, N, 1))
    start = to_rows(of_heads(start), K, options.block_q, S)[..., 0]
    end = to_rows(of_heads(end), K, options.block_q)[..., 0]
    num_kv_blocks = -(-S // options.block_kv)
    matrix = jnp.repeat(jnp.arange(B * K), start.shape[0] // (B * K))
    low, high = jnp.min(start, axis=1), jnp.max(end, axis=1)
    return Blocks(
        q=to_rows(q, K, options.block_q),
        k=to_rows(k, K, options.block_kv),
        v=to_rows(v, K, options.block_kv),
        used=used,
        start=start,
        end=end,
        first=matrix * num_kv_blocks + low // options.block_kv,
        last=matrix * num_kv_blocks + -(-high // options.block_kv),
    )


def to_rows(x, num_groups, block, fill: int | float = 0):
    """`[B, L, K*G, F] -> [B*K*num_blocks, G*block, F]`, the last block of a row filled up."""
    B, L, N, F = x.shape
    num_blocks = -(-L // block)
    widths = ((0, 0), (0, num_blocks * block - L), (0, 0), (0, 0))
    x = jnp.pad(x, widths, constant_values=fill)
    x = x.reshape(B, num_blocks, block, num_groups, N // num_groups, F)
    x = jnp.transpose(x, (0, 3, 1, 4, 2, 5))
    return x.reshape(B * num_groups * num_blocks, -1, F)


def from_rows(x, shape, num_groups):
    """`[B*K*num_blocks, G*block, F] -> [B, L, K*G, F]`, the inverse, with F of `x`."""
    B, L, N, _ = shape
    M, rows, F = x.shape
    heads = N // num_groups
    x = x.reshape(B, num_groups, M // (B * num_groups), heads, rows // heads, F)
    return jnp.transpose(x, (0, 2, 4, 1, 3, 5)).reshape(B, -1, N, F)[:, :L]


def positions(options: Options, j, num_keys):
    """Key rows, within their batch row, of block j."""
    num_blocks = -(-num_keys // options.block_kv)
    return j % num_blocks * options.block_kv + jnp.arange(options.block_kv)


def cap_logits(options: Options, logits):
    """Soft-capped logits, and their derivative by the given ones."""
    cap = options.logit_soft_cap
    if cap is None:
        return logits, 1
    ratio = jnp.tanh(logits / cap)
    return cap * ratio, 1 - ratio * ratio


def matmul(x, y, contract):
    """Product over axis `contract[0]` of x and `contract[1]` of y, in full precision."""
    dimensions = ((contract[:1], contract[1:]), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST)


def accumulator(x):
    """The dtype of all sums."""
    return jnp.promote_types(x.dtype, jnp.float32)
