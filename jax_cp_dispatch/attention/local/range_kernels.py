"""The passes of local attention for CUDA by this package's kernels, for any ranges of keys.

A kernel visits the pairs of tiles, of 64 queries and 64 keys, that a range connects, and no others.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch.attention.local.backward import OutputCotangents
from jax_cp_dispatch.attention.local.blocks import KeyRanges
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax
from jax_cp_dispatch.attention.local.options import PassOptions

ATTEND_TARGET = "jax_cp_dispatch.attend"
GRADIENTS_TARGET = "jax_cp_dispatch.attention_gradients"
_HEAD_SIZES = (64, 128)
_TILE = 64  # rows


def takes(q) -> bool:
    """Whether the kernels serve such queries, of blocks that cuDNN `takes`."""
    return (
        runtime.cuda is not None
        and ATTEND_TARGET in runtime.cuda.registrations()
        and os.environ.get("JAX_CP_DISPATCH_ATTENTION_KERNEL", "1") != "0"
        and q.dtype == jnp.bfloat16
        and q.shape[3] in _HEAD_SIZES
    )


def attend(
    options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    """`attend_blocks` of `passes.py`, for queries that the kernels take."""
    row = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    acc = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    operands = q, *kv, *ranges[:2], *(seen or ())
    return OnlineSoftmax(*_call(ATTEND_TARGET, (row, row, acc), options, operands))


def gradients(options: PassOptions, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq):
    """`gradients_of_blocks` of `passes.py`, likewise."""
    num_tiles = -(-q.shape[1] * q.shape[2] // _TILE)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, *kv)]
    reach = jax.ShapeDtypeStruct((q.shape[0], num_tiles, 2), jnp.int32)
    of_rows = cotangents.dout.astype(q.dtype), cotangents.lse, cotangents.delta
    operands = q, *kv, *ranges[:2], *of_rows
    added, *dkv, _ = _call(GRADIENTS_TARGET, (*shapes, reach), options, operands)
    return dq + jnp.swapaxes(added, 2, 3), *dkv


def _call(target, shapes, options, operands):
    results = jax.ffi.ffi_call(target, shapes)(*operands, scale=np.float32(options.scale))
    return vary_like(results, operands[0])
