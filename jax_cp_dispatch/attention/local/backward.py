"""Backward pass of local attention, blockwise: recomputes the probabilities.

Logits are transposed, `[matrices, block_kv, G * block_q]`: four of the five products then read and
write them without a transposition. Only `dq` is accumulated transposed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch.attention.local.blocks import (
    KeyRanges,
    accumulator,
    each_query_block,
    matmul,
    positions,
    soft_capped,
    widen,
)
from jax_cp_dispatch.attention.local.query_ranges import each_key_block
from jax_cp_dispatch.attention.local.rows import block_of, from_rows, set_block, to_rows


class OutputCotangents(NamedTuple):
    """The whole softmax and its cotangents, for each row of the query blocks.

    dL/dlogit_j = p_j (dout . v_j - delta), delta = dout . out - dlse, because dlse/dlogit_j = p_j.
    """

    dout: Array  # [B*K, nq, G*block_q, Hv], in its own dtype
    lse: Array  # [B*K, nq, G*block_q]; inf, hence p = 0, for empty ranges
    delta: Array  # [B*K, nq, G*block_q]


class SoftmaxGradients(NamedTuple):
    """Output and lse of the whole softmax, and their cotangents; None: zero."""

    out: Array  # [B, T, N, Hv]
    lse: Array  # [B, N, T]
    dout: Array
    dlse: Array | None = None


def cut_cotangents(options, used, whole: SoftmaxGradients, num_groups) -> OutputCotangents:
    """Cuts the whole softmax into blocks; rows outside `used`, `[B, T]`, are zero."""
    out, lse, dout, dlse = whole
    dtype = accumulator(lse)
    lse = jnp.swapaxes(lse.astype(dtype), 1, 2)
    used = used[:, :, None] & (lse > -jnp.inf)
    delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)
    if dlse is not None:
        delta = delta - jnp.swapaxes(dlse, 1, 2).astype(dtype)

    def rows(x, fill: float = 0):
        return to_rows(x[..., None], num_groups, options.block_q, fill)[..., 0]

    return OutputCotangents(
        to_rows(jnp.where(used[..., None], dout, 0), num_groups, options.block_q),
        rows(jnp.where(used, lse, jnp.inf), jnp.inf),
        rows(jnp.where(used, delta, 0)),
    )


def gradients_blockwise(options, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq):
    """Implements `block_gradients` of `passes.py`."""
    q, (k, v) = options.scale * widen(q), map(widen, kv)
    cotangents = cotangents._replace(dout=widen(cotangents.dout))
    k_columns = options.scale * jnp.swapaxes(k, 2, 3)

    def one_query_block(carry, index):
        q_block, dout, lse, delta = (block_of(x, index) for x in (q, *cotangents))
        own = ranges.of_queries(index)
        blocks, rows, queries = own.key_blocks(options), own.of_heads(q.shape[2]), own.queries

        def add_block(j, carry):
            dq_block, dk, dv = carry
            there = index.at(j)
            k_block, v_block = block_of(k, there), block_of(v, there)
            position = positions(options, j)[None, :, None]
            logits, slope = soft_capped(options, matmul(k_block, q_block, (2, 2)))
            allowed = (position >= rows[:, :1]) & (position < rows[:, 1:])
            if queries is not None:
                allowed &= jnp.swapaxes(queries.of_keys(there).allow(), 1, 2)
            p = jnp.exp(jnp.where(allowed, logits, -jnp.inf) - lse[:, None])
            ds = p * (matmul(v_block, dout, (2, 2)) - delta[:, None]) * slope
            dq_block = dq_block + matmul(block_of(k_columns, there), ds, (2, 1))
            dk = set_block(dk, there, block_of(dk, there) + matmul(ds, q_block, (2, 1)))
            dv = set_block(dv, there, block_of(dv, there) + matmul(p, dout, (2, 1)))
            return dq_block, dk, dv

        dq, *dkv = carry
        row = block_of(dq, index), *dkv
        dq_block, *dkv = each_key_block(index, (blocks.first, blocks.last, queries), add_block, row)
        return set_block(dq, index, dq_block), *dkv

    zeros = vary_like((jnp.zeros_like(k), jnp.zeros_like(v)), q)
    return each_query_block(options, one_query_block, (dq, *zeros), q)


def begin_dq(q):
    """Zero gradients for query blocks q."""
    return jnp.zeros_like(jnp.swapaxes(q, 2, 3), accumulator(q))


def finish_dq(dq, shape, num_groups):
    """Returns dq as `[B, T, N, H]`."""
    return from_rows(jnp.swapaxes(dq, 2, 3), shape, num_groups)
