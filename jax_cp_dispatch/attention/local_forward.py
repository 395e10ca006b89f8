"""Forward pass of local attention: an online softmax over the key blocks of each query block.

Logits are held `[G * block_q, block_kv]`: both products then read them, and write them, without
a transposition.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_cp_dispatch._varying import vary_like
from jax_cp_dispatch.attention.blocks import (
    accumulator,
    cap_logits,
    cut_in_blocks,
    from_rows,
    matmul,
    positions,
)


@functools.partial(jax.jit, static_argnums=0)
def forward(options, q, k, v, kv_start, kv_end):
    """`(out, lse)` as `local_attention` returns them, for operands that it has checked."""
    B, T, N, _ = q.shape
    S, K, Hv = v.shape[1:]
    dtype = accumulator(q)
    if B * T * N * S == 0:
        empty = jnp.zeros((B, T, N, Hv), dtype), jnp.full((B, N, T), -jnp.inf, dtype)
        return tuple(vary_like(empty, q))
    blocks = cut_in_blocks(options, q, k, v, kv_start, kv_end)

    def one_query_block(_, block):
        q, start, end, first, last = block
        rows = q.shape[0]
        start_of_all, end_of_all = jnp.max(start), jnp.min(end)

        def exponentials(masked, position, products, peak):
            logits, _ = cap_logits(options, products)
            if masked:
                allowed = (position >= start[:, None]) & (position < end[:, None])
                logits = jnp.where(allowed, logits, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
            return jnp.exp(logits - new_peak[:, None]), new_peak

        def add_block(j, carry):
            peak, total, acc = carry
            position = positions(options, j, S)
            # Most blocks lie inside all ranges; a mask would cost them a pass over the logits.
            p, new_peak = lax.cond(
                (position[0] >= start_of_all) & (position[-1] < end_of_all),
                functools.partial(exponentials, False),
                functools.partial(exponentials, True),
                position,
                matmul(q, blocks.k[j], (1, 1)),
                peak,
            )
            keep = jnp.exp(peak - new_peak)
            total = total * keep + jnp.sum(p, axis=1)
            acc = acc * keep[:, None] + matmul(p, blocks.v[j], (1, 0))
            return new_peak, total, acc

        # A finite first peak keeps exp(-inf - peak) = 0 where nothing has been allowed yet.
        init = (
            jnp.full(rows, jnp.finfo(dtype).min),
            jnp.zeros(rows, dtype),
            jnp.zeros((rows, Hv), dtype),
        )
        peak, total, acc = lax.fori_loop(first, last, add_block, tuple(vary_like(init, q)))
        empty = total == 0
        total = jnp.where(empty, 1, total)
        lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
        return None, (acc / total[:, None], lse)

    xs = (blocks.q, blocks.start, blocks.end, blocks.first, blocks.last)
    _, (out, lse) = lax.scan(one_query_block, None, xs)
    lse = from_rows(lse[..., None], q.shape, K)[..., 0]
    return from_rows(out, q.shape, K), jnp.swapaxes(lse, 1, 2)
