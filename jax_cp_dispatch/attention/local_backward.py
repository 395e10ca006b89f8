"""Backward pass of local attention: the probabilities are computed again, block by block.

Logits are held transposed, `[block_kv, G * block_q]`: four of the five products then read and
write them without a transposition; `dq` alone is accumulated transposed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._varying import vary_like
from jax_cp_dispatch.attention.blocks import (
    Ranges,
    accumulator,
    block_of,
    cap_logits,
    cut_operands,
    each_query_block,
    from_rows,
    matmul,
    positions,
    set_block,
    to_rows,
)


@functools.partial(jax.jit, static_argnums=0)
def backward(options, q, k, v, kv_start, kv_end, out, lse, dout, dlse=None):
    """`(dq, dk, dv)` as `local_attention_backward` returns them, for operands it has checked."""
    B, T = q.shape[:2]
    S, K = k.shape[1:3]
    if B * T * S == 0:
        dtype = accumulator(q)
        return tuple(vary_like((jnp.zeros(x.shape, dtype) for x in (q, k, v)), q))
    of = cut_operands(options, q, k, v, kv_start, kv_end)
    outcome = cut_outcome(options, of.q.dtype, of.used, out, lse, dout, dlse, K)
    dq, *dkv = gradients_of_blocks(options, of.q, outcome, of.ranges, of.k, of.v, begin_dq(of.q))
    dk, dv = (from_rows(dx, x.shape, K) for dx, x in zip(dkv, (k, v), strict=True))
    return finish_dq(options, dq, q.shape, K), dk, dv


class Outcome(NamedTuple):
    """Of the whole softmax, and its cotangents, for each row of the query blocks.

    dL/dlogit_j = p_j (dout . v_j - delta), delta = dout . out - dlse, since dlse/dlogit_j = p_j.
    """

    dout: Array  # [B*K, nq, G*block_q, Hv]
    lse: Array  # [B*K, nq, G*block_q]; inf, and so p = 0, where there is nothing
    delta: Array  # [B*K, nq, G*block_q]


def cut_outcome(options, dtype, used, out, lse, dout, dlse, num_groups) -> Outcome:
    """Of arguments of `local_attention_backward`; no gradients where `used`, `[B, T]`, is not."""
    dout, lse = dout.astype(dtype), jnp.swapaxes(lse.astype(dtype), 1, 2)
    used = used[:, :, None] & (lse > -jnp.inf)
    delta = jnp.sum(dout * out.astype(dtype), axis=-1)
    if dlse is not None:
        delta = delta - jnp.swapaxes(dlse, 1, 2).astype(dtype)

    def rows(x, fill: float = 0):
        return to_rows(x[..., None], num_groups, options.block_q, fill)[..., 0]

    return Outcome(
        to_rows(jnp.where(used[..., None], dout, 0), num_groups, options.block_q),
        rows(jnp.where(used, lse, jnp.inf), jnp.inf),
        rows(jnp.where(used, delta, 0)),
    )


def gradients_of_blocks(options, q, outcome: Outcome, ranges: Ranges, k, v, dq):
    """Adds to `dq`, `[B*K, nq, H, G*block_q]`, what one set of keys gives; and their dk and dv."""
    k_columns = jnp.swapaxes(k, 2, 3)

    def one_query_block(carry, matrix, i, q, dout, lse, delta, start, end, first, last):
        def add_block(j, carry):
            dq_block, dk, dv = carry
            k_block, v_block = block_of(k, matrix, j), block_of(v, matrix, j)
            position = positions(options, j)[:, None]
            logits, slope = cap_logits(options, matmul(k_block, q, (1, 1)))
            allowed = (position >= start) & (position < end)
            p = jnp.exp(jnp.where(allowed, logits, -jnp.inf) - lse)
            ds = p * (matmul(v_block, dout, (1, 1)) - delta) * slope
            dq_block = dq_block + matmul(block_of(k_columns, matrix, j), ds, (1, 0))
            dk_block = block_of(dk, matrix, j) + matmul(ds, q, (1, 0))
            dv_block = block_of(dv, matrix, j) + matmul(p, dout, (1, 0))
            dk, dv = set_block(dk, matrix, j, dk_block), set_block(dv, matrix, j, dv_block)
            return dq_block, dk, dv

        dq, *dkv = carry
        dq_block, *dkv = lax.fori_loop(first, last, add_block, (block_of(dq, matrix, i), *dkv))
        return set_block(dq, matrix, i, dq_block), *dkv

    zeros = vary_like((jnp.zeros_like(k), jnp.zeros_like(v)), q)
    return each_query_block(one_query_block, (dq, *zeros), (q, *outcome, *ranges))


def begin_dq(q):
    """Nothing, for query blocks q."""
    return jnp.zeros_like(jnp.swapaxes(q, 2, 3))


def finish_dq(options, dq, shape, num_groups):
    """`[B, T, N, H]`. The query blocks carry the factor `scale`, so dk has it already."""
    return from_rows(jnp.swapaxes(dq, 2, 3) * options.scale, shape, num_groups)
