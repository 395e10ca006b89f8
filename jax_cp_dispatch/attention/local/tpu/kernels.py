"""The kernels for TPUs: an online softmax and dq by queries, dk and dv by keys.

Logits of a block are `[128, R]`: queries lie on lanes. What a query has one of, such as its
maximum, is then a row of a vector register, and broadcasts without copies.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from jax_cp_dispatch.attention.local.blocks import KeyRanges, soft_capped
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax
from jax_cp_dispatch.attention.local.local_options import PassOptions
from jax_cp_dispatch.attention.local.tpu.kernel_call import Arrays, Kernel, call
from jax_cp_dispatch.attention.local.tpu.layout import (
    LANES,
    TpuBlocks,
    Visits,
    cut,
    cut_queries,
    cut_rows,
    find_visits,
    uncut_queries,
)


def dot(x, y, axis_x, axis_y):
    """Contracts two matrices with float32 sums; float32 matrices with all of their bits."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((axis_x,), (axis_y,)), ((), ()))
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def block_logits(options, q, k):
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
    logits, slope = block_logits(options, q, k)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    p = jnp.exp(logits - sums[0:1])
    return p, p * (dot(v, dout, 1, 1) - sums[1:2]) * slope * options.scale


def attend(
    options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    """`attend_blocks` of `passes.py`, for operands that the kernels take."""
    blocks = cut(options, q, ranges, kv)
    visits = find_visits(options, blocks)
    M, nq, R, _ = blocks.q.shape
    state = ()
    if seen is not None:
        peak, total = (cut_rows(options, x)[:, :, None] for x in seen[:2])
        state = peak, total, cut_queries(options, seen.acc)
    Hv = blocks.v.shape[3]
    peak, total, acc = call(
        functools.partial(_forward, options),
        visits,
        Arrays((blocks.of_queries, blocks.q), blocks.key_arrays, state),
        [(M, nq, 1, R), (M, nq, 1, R), (M, nq, R, Hv)],
        of_queries=True,
        scratch=[(M // visits.of_queries.shape[0], Hv, R)],
    )
    uncut = functools.partial(uncut_queries, options, num_blocks=q.shape[1])
    peak, total = (uncut(jnp.swapaxes(x, 2, 3))[..., 0] for x in (peak, total))
    return OnlineSoftmax(peak, total, uncut(acc))


def _forward(options, own, seen, outs, scratch) -> Kernel:
    (of_queries, q), (peak, total, out), (acc,) = own, outs, scratch
    heads = range(q.shape[0])

    def begin():
        if not seen:
            peak[...] = jnp.full(peak.shape, jnp.finfo(jnp.float32).min, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
            return
        peak[...], total[...] = seen[0][...], seen[1][...]
        for h in heads:
            acc[h] = seen[2][h].T

    def add(walked, j, masked):
        k, v, *of_keys = walked
        for h in heads:
            logits, _ = block_logits(options, q[h], k[h])  # [128, R]
            if masked:
                mask = allowed(j, of_queries[h], *(x[h] for x in of_keys))
                logits = jnp.where(mask, logits, -jnp.inf)
            old = peak[h]  # [1, R]
            new = jnp.maximum(old, logits.max(0, keepdims=True))
            p, keep = jnp.exp(logits - new), jnp.exp(old - new)
            peak[h] = new
            total[h] = keep * total[h] + p.sum(0, keepdims=True)
            acc[h] = keep * acc[h] + dot(v[h], p.astype(v.dtype), 0, 0)  # [Hv, R]

    def end():
        for h in heads:
            out[h] = acc[h].T

    return Kernel(begin, add, end)


def add_to_dq(options: PassOptions, blocks: TpuBlocks, visits: Visits, cotangents, dq):
    """Returns `dq`, `[M, nq, H, G*block_q]`, plus the part of these keys.

    Args:
      cotangents: dout `[M, nq, R, Hv]`; lse and delta `[M, nq, 2, R]`.
    """
    num_blocks = dq.shape[1]
    dq = jnp.swapaxes(cut_queries(options, jnp.swapaxes(dq, 2, 3)), 2, 3)
    (dq,) = call(
        functools.partial(_dq, options),
        visits,
        Arrays((blocks.of_queries, blocks.q, *cotangents), blocks.key_arrays, (dq,)),
        [dq.shape],
        of_queries=True,
    )
    return jnp.swapaxes(uncut_queries(options, jnp.swapaxes(dq, 2, 3), num_blocks), 2, 3)


def _dq(options, own, first, outs, scratch) -> Kernel:
    (of_queries, q, dout, sums), (before,), (dq,) = own, first, outs

    def begin():
        dq[...] = before[...]

    def add(walked, j, masked):
        k, v, *of_keys = walked
        for h in range(q.shape[0]):
            mask = allowed(j, of_queries[h], *(x[h] for x in of_keys)) if masked else None
            _, ds = gradients_of(options, q[h], (dout[h], sums[h]), (k[h], v[h]), mask)
            dq[h] += dot(k[h], ds.astype(k.dtype), 0, 0)  # [H, R]

    return Kernel(begin, add, lambda: None)


def dk_and_dv(options: PassOptions, blocks: TpuBlocks, visits: Visits, cotangents):
    """Returns the float32 gradients of `blocks.k` and `blocks.v`; `cotangents`: see `add_to_dq`."""
    return call(
        functools.partial(_dkv, options),
        visits,
        Arrays(blocks.key_arrays, (blocks.of_queries, blocks.q, *cotangents)),
        [blocks.k.shape, blocks.v.shape],
        of_queries=False,
    )


def _dkv(options, own, first, outs, scratch) -> Kernel:
    (k, v, *of_keys), (dk, dv) = own, outs

    def begin():
        for x in outs:
            x[...] = jnp.zeros(x.shape, x.dtype)

    def add(walked, j, masked):
        of_queries, q, dout, sums = walked
        for h in range(k.shape[0]):
            mask = allowed(j, of_queries[h], *(x[h] for x in of_keys)) if masked else None
            p, ds = gradients_of(options, q[h], (dout[h], sums[h]), (k[h], v[h]), mask)
            dv[h] += dot(p.astype(dout.dtype), dout[h], 1, 0)  # [128, Hv]
            dk[h] += dot(ds.astype(q.dtype), q[h], 1, 0)

    return Kernel(begin, add, lambda: None)
