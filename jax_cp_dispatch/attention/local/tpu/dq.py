"""Backward pass for TPUs, of queries: dq of each block of queries, over the keys that it meets."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax_cp_dispatch.attention.local.options import PassOptions
from jax_cp_dispatch.attention.local.tpu.kernel_call import Arrays, Kernel, call
from jax_cp_dispatch.attention.local.tpu.layout import TpuBlocks, cut_queries, uncut_queries
from jax_cp_dispatch.attention.local.tpu.scores import allowed, dot, gradients_of
from jax_cp_dispatch.attention.local.tpu.visits import Visits


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
