"""Forward pass for TPUs: an online softmax per block of queries, over the keys that it meets."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax_cp_dispatch.attention.local.blocks import KeyRanges
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax
from jax_cp_dispatch.attention.local.options import PassOptions
from jax_cp_dispatch.attention.local.tpu.kernel_call import Arrays, Kernel, call
from jax_cp_dispatch.attention.local.tpu.layout import cut, cut_queries, cut_rows, uncut_queries
from jax_cp_dispatch.attention.local.tpu.scores import allowed, dot, logits_of
from jax_cp_dispatch.attention.local.tpu.visits import find_visits


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
            logits, _ = logits_of(options, q[h], k[h])  # [128, R]
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
