"""The logits of one block of keys and one of queries, `[128, R]`: queries lie on lanes.

What a query has one of, such as its maximum, is then a row of a vector register, and broadcasts
without copies.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jax_cp_dispatch.attention.local.blocks import soft_capped
from jax_cp_dispatch.attention.local.tpu.layout import LANES


def dot(x, y, axis_x, axis_y):
    """Contracts two matrices with float32 sums; float32 matrices with all of their bits."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((axis_x,), (axis_y,)), ((), ()))
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def logits_of(options, q, k):
    """Returns scaled and capped logits, and their derivative with respect to the scaled ones."""
    return soft_capped(options, options.scale * dot(k, q, 1, 1))


def allowed(j, of_queries, of_keys=None):
    """Which pairs the ranges allow, for block j of keys; see `TpuBlocks`."""
    shape = (LANES, of_queries.shape[1])
    key = j * LANES + lax.broadcasted_iota(jnp.int32, shape, 0)
    inside = (of_queries[0:1] <= key) & (key < of_queries[1:2])
    if of_keys is None:
        return inside
    start, end = (_column(of_keys[n : n + 1]) for n in range(2))
    index = of_queries[2:3]
    return inside & (start <= index) & (index < end)


def _column(row):
    """`[1, 128] -> [128, 1]`, by a transposition that TPUs have."""
    return jnp.broadcast_to(row, (LANES, LANES)).T[:, :1]


def gradients_of(options, q, cotangents, kv, mask):
    """Returns p and the gradient of `k q^T`, `[128, R]`, of one query head's `kv`."""
    (dout, sums), (k, v) = cotangents, kv
    logits, slope = logits_of(options, q, k)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    p = jnp.exp(logits - sums[0:1])
    return p, p * (dot(v, dout, 1, 1) - sums[1:2]) * slope * options.scale
