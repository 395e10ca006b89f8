"""The passes of local attention for CUDA by this package's kernels, for any ranges of keys.

A kernel visits the pairs of tiles, of 64 queries and 64 keys, that a range connects, and no others.
It reads and writes arrays `[B, T, N, H]`. The blocks of a ring are such arrays too, of one head.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._dtypes import index_dtype
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch._warning import say_once
from jax_cp_dispatch.attention.local.backward import OutputCotangents
from jax_cp_dispatch.attention.local.blocks import KeyRanges
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax
from jax_cp_dispatch.attention.local.options import PassOptions

ATTEND_TARGET = "jax_cp_dispatch.attend"
ATTEND_MORE_TARGET = "jax_cp_dispatch.attend_more"
GRADIENTS_TARGET = "jax_cp_dispatch.attention_gradients"
_DTYPES = (jnp.bfloat16,)
_HEAD_SIZES = ((64, 64), (128, 128))
_TILE = 64  # rows


def take(options: PassOptions, q, v, has_query_ranges: bool) -> bool:
    """Whether the kernels serve such heads and options, whatever the ranges of keys.

    Otherwise a warning says once why not.
    """
    reason = why_not(options, q.dtype, (q.shape[3], v.shape[3]), has_query_ranges)
    if reason is not None:
        say_once(
            f"local attention takes slow passes on this GPU, because {reason}. See "
            "docs/gpu_attention.md."
        )
    return reason is None


def why_not(
    options: PassOptions, dtype, head_sizes: tuple[int, int], has_query_ranges: bool
) -> str | None:
    """Returns why the kernels do not serve a call; None if they do."""
    if os.environ.get("JAX_CP_DISPATCH_ATTENTION_KERNEL", "1") == "0":
        return "JAX_CP_DISPATCH_ATTENTION_KERNEL=0 is set"
    if runtime.cuda is None:
        return f"the package's CUDA extension is missing ({runtime.cuda_reason})"
    if dtype not in _DTYPES:
        return f"its kernels need bfloat16, not {dtype}"
    if head_sizes not in _HEAD_SIZES:
        sizes = ", ".join(str(size) for size, _ in _HEAD_SIZES)
        return f"its kernels have heads of {sizes}, not {head_sizes[0]} and {head_sizes[1]}"
    if options.logit_soft_cap is not None:
        return "its kernels have no logit_soft_cap"
    return "its kernels have no ranges of queries" if has_query_ranges else None


def attend(options: PassOptions, operands):
    """`attend` of `uncut.py`, for operands that the kernels take."""
    q, k, v, ranges, sink = operands
    B, T, N, _ = q.shape
    row = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    narrow = jnp.dtype(options.out_dtype) == q.dtype
    out = _array((B, T, N, v.shape[3]), q.dtype if narrow else jnp.float32)
    shapes = out, row, *[row] * options.return_max_logits
    sinks = () if sink is None else (sink.astype(jnp.float32),)
    operands = q, k, v, *_rows(ranges, k.shape[1]), *sinks
    out, *others = _call(ATTEND_TARGET, shapes, operands, {}, scale=options.scale)
    return out.astype(options.out_dtype), *others


def gradients(options: PassOptions, operands):
    """`gradients` of `uncut.py`, likewise."""
    q, k, v, ranges, (out, lse, dout, dlse) = operands
    out = out if out.dtype == q.dtype else out.astype(jnp.float32)
    others = [x.astype(jnp.float32) for x in (lse, dlse) if x is not None]
    operands = q, k, v, *_rows(ranges, k.shape[1]), dout.astype(q.dtype), others[0], out
    operands += tuple(others[1:])
    wide = [jnp.dtype(x) != q.dtype for x in options.gradient_dtypes]
    results = _gradients(operands, wide, options, in_place={}, has_delta=False)
    return tuple(x.astype(to) for x, to in zip(results, options.gradient_dtypes, strict=True))


def attend_in_blocks(
    options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    """`attend_blocks` of `passes.py`, likewise."""
    rows, wide = (*q.shape[:3],), (*q.shape[:3], kv[1].shape[3])
    shapes = [_array(_as_row(x), jnp.float32) for x in (rows, rows)]
    shapes.append(_array(_as_head(wide), jnp.float32))
    others = () if seen is None else (*map(_row, seen[:2]), _head(seen.acc))
    operands = *map(_head, (q, *kv)), *map(_tokens, ranges[:2]), *others
    in_place = {5 + i: i for i in range(len(others))}
    results = _call(ATTEND_MORE_TARGET, shapes, operands, in_place, scale=options.scale)
    return OnlineSoftmax(*(x.reshape(s) for x, s in zip(results, (rows, rows, wide), strict=True)))


def gradients_in_blocks(
    options: PassOptions, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq
):
    """`gradients_of_blocks` of `passes.py`, likewise."""
    dout, lse, delta = cotangents
    before = _head(jnp.swapaxes(dq, 2, 3))
    of_rows = _head(dout.astype(q.dtype)), _row(lse), _row(delta), before
    operands = *map(_head, (q, *kv)), *map(_tokens, ranges[:2]), *of_rows
    dq, *dkv = _gradients(operands, [True] * 3, options, in_place={8: 0}, has_delta=True)
    dq = jnp.swapaxes(dq.reshape(q.shape), 2, 3)
    return dq, *(dx.reshape(x.shape) for dx, x in zip(dkv, kv, strict=True))


def _gradients(operands, wide, options, *, in_place, has_delta):
    q = operands[0]
    B, T, N, _ = q.shape
    pairs = zip(operands[:3], wide, strict=True)
    shapes = [_array(x.shape, jnp.float32 if is_wide else q.dtype) for x, is_wide in pairs]
    scratch = _array((B, -(-T // _TILE), 4), jnp.int32), _array((B, N, T, 2), jnp.float32)
    shapes = *shapes, *scratch
    attributes = {"scale": options.scale, "has_delta": np.bool_(has_delta)}
    return _call(GRADIENTS_TARGET, shapes, operands, in_place, **attributes)[:3]


def _rows(ranges, num_keys):
    """The kernels take ranges of rows that exist."""
    start, end = (x.astype(index_dtype(x.dtype)) for x in ranges[:2])
    return [jnp.clip(x, 0, num_keys).astype(jnp.int32) for x in (start, end)]


# ---- Blocks `[M, blocks, rows, ...]` as arrays of M batch rows and one head.


def _as_head(shape):
    return shape[0], shape[1] * shape[2], 1, shape[3]


def _as_row(shape):
    return shape[0], 1, shape[1] * shape[2]


def _head(x):
    return x.reshape(_as_head(x.shape))


def _row(x):
    return x.reshape(_as_row(x.shape))


def _tokens(x):
    return x.reshape(x.shape[0], -1)


def _array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def _call(target, shapes, operands, in_place, *, scale, **attributes):
    call = jax.ffi.ffi_call(target, shapes, input_output_aliases=in_place)
    results = call(*operands, scale=np.float32(scale), **attributes)
    return vary_like(results, operands[0])
