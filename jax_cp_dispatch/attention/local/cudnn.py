"""The passes of local attention for CUDA, by cuDNN if it can express the ranges.

cuDNN's flash attention has no key range per query. But in one step of dense attention, a rank's
mask is empty, causal, or, for each contiguous piece of its queries, all keys up to some length. The
program detects the case at run time. Other cases, such as packed documents, go to this package's
kernels (`range_kernels.py`) or, where there are none, to tiles: most have such a mask, the others
are masked explicitly. The derivative uses the logarithm of the sum and the output of the whole
softmax, so it also works for merged results.

jax.nn.dot_product_attention stops the gradient of that logarithm and does not accept it as input,
so this module uses the primitives below it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools

import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Array, Bool, Int

from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch.attention.local import range_kernels
from jax_cp_dispatch.attention.local.backward import OutputCotangents, gradients_blockwise
from jax_cp_dispatch.attention.local.blocks import KeyRanges, widen
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax
from jax_cp_dispatch.attention.local.options import PassOptions
from jax_cp_dispatch.attention.local.tiles import (
    attend_in_tiles,
    gradients_in_tiles,
    masked_attention,
    masked_gradients,
)

_LARGEST_HEAD = 128  # 256 on Hopper and later, which is unknown when a program is lowered
_CALL = {
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),  # no bias, no gradient of a bias
    "layout": fused.AttentionLayout.BNTH.value,
    "sliding_window_length": None,
}
if "score_mod" in inspect.signature(fused.dot_product_attention).parameters:  # since jax 0.12
    _CALL |= {"score_mod_name": None, "score_mod_jaxpr": None}


def takes(options: PassOptions, q, k, v) -> bool:
    """Whether cuDNN supports such blocks, whatever their ranges; otherwise all is blockwise."""
    H, Hv = k.shape[-1], v.shape[-1]
    return (
        q.dtype in (jnp.bfloat16, jnp.float16)
        and H == Hv <= _LARGEST_HEAD
        and H % 8 == 0
        and options.logit_soft_cap is None
        and not options.return_max_logits  # cuDNN returns no largest logits
    )


def attend(
    options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    """`attend_blocks` of `passes.py`, for blocks that cuDNN `takes`."""
    tile = functools.partial(_attend, dataclasses.replace(options, piece_rows=None), None)
    in_tiles = functools.partial(attend_in_tiles, tile, options)
    by_kernel = functools.partial(range_kernels.attend, options)
    of_any = by_kernel if range_kernels.takes(q) else in_tiles
    return _attend(options, of_any, q, ranges, kv, seen)


def _attend(options, of_any, q, ranges, kv, seen):
    """Computes attention that is not dense by `of_any`; None: masked."""
    rows = _QueryRows(options, q, ranges)

    def calls_of(parts):
        of_rows = rows.of(_here(q))
        outs, lses = zip(*(call(of_rows, *part) for part in parts()), strict=True)
        lse = jnp.where(rows.used[:, None], jnp.concatenate(lses, axis=2), -jnp.inf)
        out = jnp.where(rows.used[:, None, :, None], jnp.concatenate(outs, axis=2), 0)
        lse, out = rows.blocks(lse[..., None])[..., 0], rows.blocks(widen(out))
        if seen is None:  # saves one pass over the output
            peak = jnp.maximum(lse, jnp.finfo(lse.dtype).min)
            return OnlineSoftmax(peak, jnp.exp(lse - peak), out)
        peak = jnp.maximum(seen.peak, lse)
        keep, add = jnp.exp(seen.peak - peak), jnp.exp(lse - peak)
        acc = seen.acc * keep[..., None] + out * add[..., None]
        return OnlineSoftmax(peak, seen.total * keep + add, acc)

    def call(q, mask, piece, k, v, lengths):
        if mask is None:
            return masked_attention(q, (k, v), (rows.start, rows.end), options.scale)
        operands = _operands(mask, q[:, :, piece], k, v, lengths)
        return fused._dot_product_attention_fwd_p.bind(
            *operands, mask_type=mask, scale=options.scale, is_training=True, **_CALL
        )

    before = lambda: seen or OnlineSoftmax.of_nothing(q, kv[1].shape[3])
    other = of_any and (lambda: of_any(q, ranges, kv, seen))
    return rows.switch(before, calls_of, kv, other)


def gradients(options: PassOptions, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq):
    """`gradients_of_blocks` of `passes.py`, for blocks that cuDNN `takes`.

    Gradients of one set of keys are rounded to their dtype before they are added to others.
    """
    has_kernel = range_kernels.takes(q)
    if cotangents.out is None:  # cuDNN multiplies out and dout, and accepts no cotangent of the lse
        of_any = range_kernels.gradients if has_kernel else gradients_blockwise
        return of_any(options, q, cotangents, ranges, kv, dq)
    tile = functools.partial(_gradients, dataclasses.replace(options, piece_rows=None), None)
    in_tiles = functools.partial(gradients_in_tiles, tile, options)
    by_kernel = lambda queries, *others: range_kernels.gradients(options, *queries, *others)
    of_any = by_kernel if has_kernel else in_tiles
    return _gradients(options, of_any, (q, cotangents), ranges, kv, dq)


def _gradients(options, of_any, queries, ranges, kv, dq):
    q, cotangents = queries
    dout, out = (x.astype(q.dtype) for x in (cotangents.dout, cotangents.out))
    cotangents = cotangents._replace(dout=dout, out=out)
    rows = _QueryRows(options, q, ranges)
    nothing = dq, *vary_like((jnp.zeros(x.shape, dq.dtype) for x in kv), dq)

    def calls_of(parts):
        of_q, of = _here((q, cotangents))
        out, dout = rows.of(of.out), rows.of(of.dout)
        lse, delta = (rows.of(x[..., None])[..., 0] for x in (of.lse, of.delta))
        # Queries without keys here get no part of the softmax: exp(logit - lse) is 0.
        lse = jnp.minimum(jnp.where(rows.used[:, None], lse, jnp.inf), 1e30)
        of_rows = OutputCotangents(dout, lse, delta, out)
        dqs, dks, dvs = zip(*(call(rows.of(of_q), of_rows, *part) for part in parts()), strict=True)
        added = jnp.swapaxes(rows.blocks(widen(jnp.concatenate(dqs, axis=2))), 2, 3)
        return dq + added, *map(_key_blocks, (dks, dvs), kv)

    def call(q, of_rows, mask, piece, k, v, lengths):
        if mask is None:
            ranges = rows.start, rows.end
            return masked_gradients(q, (k, v), ranges, options.scale, of_rows)
        operands = _operands(mask, q[:, :, piece], k, v, lengths)
        of_piece = (x[:, :, piece] for x in (of_rows.lse, of_rows.out, of_rows.dout))
        dq, *dkv = fused._dot_product_attention_bwd_p.bind(
            *operands, *of_piece, mask_type=mask, scale=options.scale, **_CALL
        )
        attended = jnp.arange(k.shape[2])[None] < lengths[:, None]
        return dq, *(jnp.where(attended[:, None, :, None], dx, 0) for dx in dkv)

    other = of_any and (lambda: of_any((q, cotangents), ranges, kv, dq))
    return rows.switch(lambda: nothing, calls_of, kv, other)


class _QueryRows:
    """Queries in cuDNN's layout, `[B*K, G, rows, ...]`, and the kind of their ranges."""

    def __init__(self, options: PassOptions, q, ranges: KeyRanges):
        self.block_q = options.block_q
        self.num_rows = num_rows = q.shape[1] * options.block_q
        self.start, self.end = (self.of(x[..., None])[:, 0, :, 0] for x in ranges[:2])
        self.used: Bool[Array, "M rows"] = self.start < self.end
        size = options.piece_rows or num_rows
        edges = [*range(0, num_rows - size + 1, size), num_rows]
        self.pieces = [slice(*edge) for edge in itertools.pairwise(edges)]

    def of(self, x):
        M, nq, rows, F = x.shape
        x = x.reshape(M, nq, rows // self.block_q, self.block_q, F)
        return jnp.swapaxes(x, 1, 2).reshape(M, rows // self.block_q, nq * self.block_q, F)

    def blocks(self, x):
        """The inverse of `of`."""
        M, G, rows, F = x.shape
        x = x.reshape(M, G, rows // self.block_q, self.block_q, F)
        return jnp.swapaxes(x, 1, 2).reshape(M, rows // self.block_q, G * self.block_q, F)

    def switch(self, nothing, calls_of, kv, other):
        """Selects the computation for the ranges; `calls_of` receives a list of calls' operands.

        If they are not dense, this is `other`, or without it one call without a mask of cuDNN.
        """
        k, v = (x.reshape(x.shape[0], 1, -1, x.shape[3]) for x in kv)
        lengths = [self._length(piece) for piece in self.pieces]
        longest = functools.reduce(jnp.maximum, lengths)

        def causal():
            keys = (_resized(x, self.num_rows) for x in (k, v))
            return [(fused.MaskType.CAUSAL, slice(None), *keys, longest)]

        def prefixes():
            parts = zip(self.pieces, lengths, strict=True)
            return [(fused.MaskType.PADDING, piece, k, v, length) for piece, length in parts]

        def masked():
            return [(None, slice(None), k, v, longest)]

        is_causal = self._all_end_at(jnp.arange(1, self.num_rows + 1)[None])
        ends = [
            jnp.broadcast_to(x[:, None], self.end[:, p].shape)
            for x, p in zip(lengths, self.pieces, strict=True)
        ]
        is_prefix = self._all_end_at(jnp.concatenate(ends, axis=1))
        case = jnp.where(is_causal, 1, jnp.where(is_prefix, 2, 3))
        case = jnp.where(jnp.any(self.used), case, 0)
        calls = [functools.partial(calls_of, parts) for parts in (causal, prefixes, masked)]
        return lax.switch(case, [nothing, *calls[:2], other or calls[2]])

    def _length(self, piece) -> Int[Array, " M"]:
        return jnp.max(jnp.where(self.used[:, piece], self.end[:, piece], 0), axis=1)

    def _all_end_at(self, end) -> Bool[Array, ""]:
        return jnp.all(~self.used | (self.start == 0) & (self.end == end))


def _here(operands):
    """Keeps XLA from moving what a branch computes of them ahead of the conditional."""
    return lax.optimization_barrier(operands)


def _operands(mask, q, k, v, lengths):
    none = jnp.zeros(0, q.dtype)
    counts = none, none
    if mask is fused.MaskType.PADDING:
        # At least one key; queries without keys ignore it.
        counts = jnp.full(q.shape[0], q.shape[2], jnp.int32), jnp.maximum(lengths, 1)
    return q, k, v, none, *counts, none, none, none, none


def _resized(x, num_rows):
    missing = max(0, num_rows - x.shape[2])
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))[:, :, :num_rows]


def _key_blocks(parts, x):
    """Sums the pieces' gradients of x, `[M, blocks, rows, F]`, in the accumulator's dtype."""
    total = sum(map(widen, parts[1:]), widen(parts[0]))
    total = _resized(total, x.shape[1] * x.shape[2])
    return total.reshape(x.shape)
