"""Backward pass of local attention: the probabilities are computed again, block by block.

Logits are held transposed, `[block_kv, G * block_q]`: four of the five products then read and
write them without a transposition; `dq` alone is accumulated transposed.
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
    to_rows,
)


@functools.partial(jax.jit, static_argnums=0)
def backward(options, q, k, v, kv_start, kv_end, out, lse, dout, dlse):
    """`(dq, dk, dv)` as `local_attention_backward` returns them, for operands it has checked."""
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    dtype = accumulator(q)
    if B * T * N * S == 0:
        return tuple(vary_like((jnp.zeros(x.shape, dtype) for x in (q, k, v)), q))
    blocks = cut_in_blocks(options, q, k, v, kv_start, kv_end)

    # dL/dlogit_j = p_j (dout . v_j - dout . out + dlse), since dlse/dlogit_j = p_j.
    dout, lse, dlse = dout.astype(dtype), jnp.swapaxes(lse, 1, 2), jnp.swapaxes(dlse, 1, 2)
    used = blocks.used[:, :, None] & (lse > -jnp.inf)
    delta = jnp.where(used, jnp.sum(dout * out, axis=-1) - dlse, 0)
    lse = jnp.where(used, lse, jnp.inf)  # exp(logit - inf) = 0
    dout = to_rows(jnp.where(used[..., None], dout, 0), K, options.block_q)
    delta = to_rows(delta[..., None], K, options.block_q)[..., 0]
    lse = to_rows(lse[..., None], K, options.block_q, jnp.inf)[..., 0]

    k_columns = jnp.swapaxes(blocks.k, 1, 2)

    def one_query_block(carry, block):
        q, dout, lse, delta, start, end, first, last = block

        def add_block(j, carry):
            dq, dk, dv = carry
            k, v, position = blocks.k[j], blocks.v[j], positions(options, j, S)[:, None]
            logits, slope = cap_logits(options, matmul(k, q, (1, 1)))
            allowed = (position >= start) & (position < end)
            p = jnp.exp(jnp.where(allowed, logits, -jnp.inf) - lse)
            ds = p * (matmul(v, dout, (1, 1)) - delta) * slope
            dq = dq + matmul(k_columns[j], ds, (1, 0))
            dk = dk.at[j].add(matmul(ds, q, (1, 0)))
            dv = dv.at[j].add(matmul(p, dout, (1, 0)))
            return dq, dk, dv

        (dq,) = vary_like([jnp.zeros(q.shape[::-1], dtype)], q)
        dq, *carry = lax.fori_loop(first, last, add_block, (dq, *carry))
        return tuple(carry), dq

    xs = (
        blocks.q,
        dout,
        lse,
        delta,
        blocks.start,
        blocks.end,
        blocks.first,
        blocks.last,
    )
    init = tuple(vary_like((jnp.zeros(x.shape, dtype) for x in (blocks.k, blocks.v)), q))
    (dk, dv), dq = lax.scan(one_query_block, init, xs)
    # The blocks of q carry the factor `scale`, so dk has it already.
    dq = jnp.swapaxes(dq, 1, 2) * options.scale
    return tuple(from_rows(x, y.shape, K) for x, y in zip((dq, dk, dv), (q, k, v), strict=True))
