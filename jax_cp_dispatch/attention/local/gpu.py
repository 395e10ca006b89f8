"""The passes of local attention for CUDA by this package's kernels, for any ranges.

A kernel visits the pairs of tiles, of 64 queries and 64 keys, that a range connects, and no others.
It reads and writes arrays `[B, T, N, H]`. The blocks of a ring are such arrays too, of one head.
"""

from __future__ import annotations

import inspect
import os
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_cp_dispatch._arguments import clip_to_int32
from jax_cp_dispatch._jax_private import fused_attention_stablehlo as fused
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu import compute_capability, gpus_here, why_no_kernels
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch._text import say_once
from jax_cp_dispatch.attention.local.ranges import (
    CAUSAL,
    KeyQueries,
    KeyRanges,
    OnlineSoftmax,
    OutputCotangents,
    PassOptions,
    RowRanges,
    SoftmaxGradients,
    with_rows,
)

ATTEND_TARGET = "jax_cp_dispatch.attend"
ATTEND_MORE_TARGET = "jax_cp_dispatch.attend_more"
GRADIENTS_TARGET = "jax_cp_dispatch.attention_gradients"
_DTYPES = (jnp.bfloat16, jnp.float16)
_HEAD_SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # of keys, and of values
_TILE = 64  # rows


class Taken(NamedTuple):
    """What computes a pass of whole arrays on GPUs, and why: "cudnn", "kernels" or "blockwise"."""

    name: str
    reason: str


def take(options: PassOptions, q, v, *, backward: bool = False, has_more: bool = False) -> Taken:
    """Takes the fastest that serves a pass.

    cuDNN for one dense document: on Hopper it takes two thirds of the time of this package's
    kernels. On Blackwell neither is measured; there cuDNN uses its tensor cores, for which these
    kernels have no code of their own. Nothing else serves ranges. `has_more`: there is a sink, or
    backward a cotangent of the lse.
    """
    missing = _what_cudnn_lacks(options, q, v, backward, has_more)
    if missing is None:
        return Taken("cudnn", "the ranges are those of one dense document")
    if kernels_serve(q, v):
        return Taken("kernels", f"not cuDNN: {missing}")
    return Taken("blockwise", why_not(q.dtype, (q.shape[3], v.shape[3])) or "")


def kernels_serve(q, v) -> bool:
    """Whether the kernels serve such heads, whatever the ranges and options.

    Otherwise a warning says once why not.
    """
    reason = why_not(q.dtype, (q.shape[3], v.shape[3]))
    if reason is not None:
        say_once(
            f"local attention takes slow passes on this GPU, because {reason}. See "
            "docs/gpu_attention.md."
        )
    return reason is None


def why_not(dtype, head_sizes: tuple[int, int]) -> str | None:
    if os.environ.get("JAX_CP_DISPATCH_ATTENTION_KERNEL", "1") == "0":
        return "JAX_CP_DISPATCH_ATTENTION_KERNEL=0 is set"
    if runtime.cuda is None:
        return f"the package's CUDA extension is missing ({runtime.cuda_reason})"
    if reason := why_no_kernels(gpus_here()):
        return reason
    if dtype not in _DTYPES:
        return f"its kernels need bfloat16 or float16, not {dtype}"
    served = _served(*head_sizes)
    if served is None:
        largest = max(size for size, _ in _HEAD_SIZES)
        return f"its kernels have heads of at most {largest}, not {max(head_sizes)}"
    needed, available = runtime.cuda.attention_memory(*served)
    if 0 < available < needed:  # it is 0 where no GPU is here: a program for another machine
        sizes = f"{-(-needed // 1024)} KB of shared memory in a block, and this GPU has"
        return f"its kernels of heads of {served[0]} need {sizes} {available // 1024}"
    return None


def fused_attention(options: PassOptions, q, k, v, ranges: RowRanges, sink):
    B, T, N, _ = q.shape
    row = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    narrow = jnp.dtype(options.out_dtype) == q.dtype
    call = _Call.of(options, q, k, v, ranges)
    out = jax.ShapeDtypeStruct((B, T, N, call.v.shape[3]), q.dtype if narrow else jnp.float32)
    shapes = out, row, *[row] * options.return_max_logits
    sinks = () if sink is None else (sink.astype(jnp.float32),)
    out, *others = call.run(ATTEND_TARGET, shapes, sinks)
    return out[..., : v.shape[3]].astype(options.out_dtype), *others


def fused_gradients(options: PassOptions, q, k, v, ranges: RowRanges, whole: SoftmaxGradients):
    out, lse, dout, dlse = whole
    out = out if out.dtype == q.dtype else out.astype(jnp.float32)
    call = _Call.of(options, q, k, v, ranges)
    dout, out = (with_rows(x, call.v.shape[3], 3) for x in (dout.astype(q.dtype), out))
    others = () if dlse is None else (dlse.astype(jnp.float32),)
    wide = [jnp.dtype(x) != q.dtype for x in options.gradient_dtypes]
    results = call.gradients(wide, (dout, lse.astype(jnp.float32)), (out, *others))
    of = zip(results, (q, k, v), options.gradient_dtypes, strict=True)
    return tuple(dx[..., : x.shape[3]].astype(to) for dx, x, to in of)


# Blocks `[M, blocks, rows, ...]` are arrays of M batch rows and one head.


def attend_blocks(
    options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    call = _Call.of_blocks(options, q, kv, ranges)
    rows, size = q.shape[:3], call.v.shape[3]
    M, num_rows = rows[0], rows[1] * rows[2]
    row = jax.ShapeDtypeStruct((M, 1, num_rows), jnp.float32)
    acc = jax.ShapeDtypeStruct((M, num_rows, 1, size), jnp.float32)
    others = ()
    if seen is not None:
        others = _row(seen.peak), _row(seen.total), with_rows(_head(seen.acc), size, 3)
    peak, total, acc = call.run(ATTEND_MORE_TARGET, (row, row, acc), others, in_place=len(others))
    acc = acc.reshape(*rows, size)[..., : kv[1].shape[3]]
    return OnlineSoftmax(peak.reshape(rows), total.reshape(rows), acc)


def block_gradients(
    options: PassOptions, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq
):
    dout, lse, delta = cotangents
    call = _Call.of_blocks(options, q, kv, ranges)
    dout = with_rows(_head(dout.astype(q.dtype)), call.v.shape[3], 3)
    before = with_rows(_head(jnp.swapaxes(dq, 2, 3)), call.q.shape[3], 3)
    results = call.gradients([True] * 3, (dout, _row(lse)), (_row(delta), before), has_delta=True)
    of = zip(results, (q, *kv), strict=True)
    dq, *dkv = (dx[..., : x.shape[3]].reshape(x.shape) for dx, x in of)
    return jnp.swapaxes(dq, 2, 3), *dkv


def _head(x):
    return x.reshape(x.shape[0], -1, 1, x.shape[3])


def _row(x):
    return x.reshape(x.shape[0], 1, -1)


class _Call(NamedTuple):
    """What all calls read: heads of a size that the kernels have, and ranges of rows that exist."""

    options: PassOptions
    q: Array
    k: Array
    v: Array
    ranges: tuple[Array, ...]  # start and end
    queries: tuple[Array, ...]  # index of rows, first and end query of keys; or none

    @classmethod
    def of(cls, options: PassOptions, q, k, v, ranges: RowRanges) -> _Call:
        size, value_size = cast(tuple[int, int], _served(q.shape[3], v.shape[3]))
        bounds = tuple(jnp.clip(clip_to_int32(x), 0, k.shape[1]) for x in ranges[:2])
        queries = () if ranges.queries is None else tuple(ranges.queries)
        sizes = zip((q, k, v), (size, size, value_size), strict=True)
        q, k, v = (with_rows(x, n, 3) for x, n in sizes)
        return cls(options, q, k, v, bounds, queries)

    @classmethod
    def of_blocks(cls, options: PassOptions, q, kv, ranges: KeyRanges) -> _Call:
        tokens = lambda x: x.reshape(x.shape[0], -1)
        queries = ranges.queries
        if queries is not None:
            queries = KeyQueries(*map(tokens, (queries.index, queries.start, queries.end)))
        bounds = ranges.of_heads(q.shape[2])
        rows = RowRanges(tokens(bounds[:, :, 0]), tokens(bounds[:, :, 1]), queries)
        k, v = map(_head, kv)
        return cls.of(options, _head(q), k, v, rows)

    def gradients(self, wide, of_rows, others, *, has_delta: bool = False):
        """Returns dq, dk and dv; float32 those that are `wide`. A dq that is given is added to."""
        B, T, N, _ = self.q.shape
        pairs = zip((self.q, self.k, self.v), wide, strict=True)
        shapes = [(x.shape, jnp.float32 if is_wide else x.dtype) for x, is_wide in pairs]
        shapes += [((B, -(-T // _TILE), 8), jnp.int32), ((B, N, T, 2), jnp.float32)]  # scratch
        shapes = [jax.ShapeDtypeStruct(*x) for x in shapes]
        in_place, flag = int(has_delta), np.bool_(has_delta)  # the last operand
        return self.run(GRADIENTS_TARGET, shapes, others, of_rows, in_place, has_delta=flag)[:3]

    def run(self, target, shapes, others, of_rows=(), in_place: int = 0, **attributes):
        operands = (*self[1:4], *self.ranges, *of_rows, *self.queries, *others)
        aliases = {len(operands) - in_place + i: i for i in range(in_place)}
        attributes |= {
            "scale": np.float32(self.options.scale),
            "soft_cap": np.float32(self.options.logit_soft_cap or 0),
            "has_queries": np.bool_(bool(self.queries)),
        }
        return _call(target, shapes, operands, aliases, **attributes)


def _call(target, shapes, operands, aliases, **attributes):
    call = jax.ffi.ffi_call(target, shapes, input_output_aliases=aliases)
    return vary_alike(list(call(*operands, **attributes)), like=operands[0])


def _served(size: int, value_size: int) -> tuple[int, int] | None:
    large = (one for one in _HEAD_SIZES if size <= one[0] and value_size <= one[1])
    return next(large, None)


# ---- The passes of local attention for CUDA by cuDNN's flash attention: of one dense document.
#
# cuDNN has no key range per query, so the ranges must be known to be dense when a program is
# traced. It reads and writes the arrays of the caller. `jax.nn.dot_product_attention` stops the
# gradient of the logarithm of the sum, and does not return it, so these passes use the primitives
# below it.

_CALL: dict[str, Any] = {
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),  # no bias, no gradient of a bias
    "layout": fused.AttentionLayout.BTNH.value,
    "sliding_window_length": None,
}
if "score_mod" in inspect.signature(fused.dot_product_attention).parameters:  # since jax 0.12
    _CALL |= {"score_mod_name": None, "score_mod_jaxpr": None}


def largest_of_cudnn(backward: bool) -> int:
    """Returns the largest heads that cuDNN serves on the GPUs of this process.

    By NVIDIA's table for cuDNN 9.18: 256 on Hopper; on Blackwell 256 forward, from 9.10, and 128
    backward. Where no GPU is here, the program may run on any.
    """
    number = compute_capability()
    is_hopper, is_blackwell = 90 <= number < 100, 100 <= number < 110
    if is_hopper or (is_blackwell and not backward and cudnn_version() >= 91000):
        return 256
    return 128


def cudnn_version() -> int:
    """Returns the version of cuDNN, 91800 for 9.18; 0 without it."""
    try:
        return fused.check_cudnn_version()
    except RuntimeError:
        return 0


def _what_cudnn_lacks(options: PassOptions, q, v, backward: bool, has_more: bool) -> str | None:
    H, Hv = q.shape[3], v.shape[3]
    if options.dense is None:
        return "it has no ranges, and these are not known to be dense"
    if has_more or options.logit_soft_cap is not None or options.return_max_logits:
        return "it has no sink, soft cap, largest logits or cotangent of the lse"
    if q.dtype not in _DTYPES:
        return f"it needs bfloat16 or float16, not {q.dtype}"
    largest = largest_of_cudnn(backward)
    if H == Hv <= largest and H % 8 == 0:
        return None
    return f"it needs equal heads, a multiple of 8 and at most {largest}, not {H} and {Hv}"


def cudnn_attention(options: PassOptions, q, k, v, ranges: RowRanges, sink: None):
    forward = fused._dot_product_attention_fwd_p
    out, lse = _cudnn(forward, options, (q, k, v), is_training=True)
    return out.astype(options.out_dtype), lse


def cudnn_gradients(options: PassOptions, q, k, v, ranges: RowRanges, whole: SoftmaxGradients):
    """`fused_gradients` of `passes.py`, without a cotangent of the lse. Results are rounded."""
    of_outputs = whole.lse, whole.out.astype(q.dtype), whole.dout.astype(q.dtype)
    results = _cudnn(fused._dot_product_attention_bwd_p, options, (q, k, v), *of_outputs)
    return tuple(x.astype(to) for x, to in zip(results, options.gradient_dtypes, strict=True))


def _cudnn(primitive, options: PassOptions, qkv, *of_outputs, **others):
    unused = [jnp.zeros(0, qkv[0].dtype)] * 7  # bias, lengths, offsets and tables of pages
    others |= {"mask_type": fused.MaskType.NO_MASK, "scale": options.scale, **_CALL}
    if options.dense == CAUSAL:
        others["mask_type"] = fused.MaskType.CAUSAL
    return primitive.bind(*qkv, *unused, *of_outputs, **others)
