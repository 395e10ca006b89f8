"""The passes of local attention for TPUs: Pallas kernels over blocks of 128 queries and 128 keys.

Larger blocks waste more pairs: a document rarely ends at the end of a block.
"""

from __future__ import annotations

import jax.numpy as jnp

from jax_cp_dispatch.attention.local.backward import OutputCotangents
from jax_cp_dispatch.attention.local.blocks import KeyRanges
from jax_cp_dispatch.attention.local.local_options import PassOptions
from jax_cp_dispatch.attention.local.tpu.kernels import add_to_dq, attend as attend, dk_and_dv
from jax_cp_dispatch.attention.local.tpu.layout import (
    cut,
    cut_queries,
    cut_rows,
    find_visits,
    uncut_keys,
)

# What has been compiled: larger blocks exceed a TPU core's memory.
_LARGEST_HEAD, _MOST_HEADS = 256, 16


def takes(ctx, options: PassOptions, q, k, v) -> bool:
    """Whether the kernels support such blocks, whatever their ranges; otherwise all is blockwise.

    Args:
      ctx: of the lowering rule. XLA does not partition a kernel over automatic mesh axes.
    """
    axes, heads = ctx.module_context.axis_context, q.shape[2] // options.block_q
    manual = getattr(axes, "manual_axes", None)
    if manual is None:
        alone = getattr(axes, "num_devices", 1) == 1
    else:
        alone = manual | set(axes.mesh.manual_axes) == set(axes.mesh.axis_names)
    is_small = heads <= _MOST_HEADS and max(k.shape[3], v.shape[3]) <= _LARGEST_HEAD
    return alone and is_small and q.dtype in (jnp.bfloat16, jnp.float32)


def gradients(options: PassOptions, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq):
    """`block_gradients` of `passes.py`, for operands that the kernels take."""
    blocks = cut(options, q, ranges, kv)
    visits = find_visits(options, blocks)
    lse, delta = cut_rows(options, cotangents.lse, jnp.inf), cut_rows(options, cotangents.delta)
    dout = cut_queries(options, cotangents.dout).astype(q.dtype)
    of_outputs = dout, jnp.stack([lse, delta], 2)
    dq = add_to_dq(options, blocks, visits, of_outputs, dq)
    dk, dv = dk_and_dv(options, blocks, visits, of_outputs)
    return dq, *map(uncut_keys, (dk, dv), kv)
