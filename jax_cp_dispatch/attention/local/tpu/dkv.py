"""Backward pass for TPUs, of keys: dk and dv of each block, over the queries that it meets."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax_cp_dispatch.attention.local.options import PassOptions
from jax_cp_dispatch.attention.local.tpu.kernel_call import Arrays, Kernel, call
from jax_cp_dispatch.attention.local.tpu.layout import TpuBlocks
from jax_cp_dispatch.attention.local.tpu.scores import allowed, dot, gradients_of
from jax_cp_dispatch.attention.local.tpu.visits import Visits


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
