"""The two passes of local attention over whole arrays, as primitives.

Lowering selects the implementation before anything is cut. On GPUs, this package's kernels read and
write the arrays of the caller, or cuDNN does if the ranges are those of one dense document.
Otherwise the arrays are cut into blocks, for `passes.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jax_cp_dispatch.attention.local import gpu
from jax_cp_dispatch.attention.local.blockwise import (
    SoftmaxGradients,
    begin_dq,
    cut_cotangents,
    finish_dq,
)
from jax_cp_dispatch.attention.local.options import PassOptions
from jax_cp_dispatch.attention.local.passes import (
    add_sink,
    attend_blocks,
    batch_leading,
    block_gradients,
)
from jax_cp_dispatch.attention.local.ranges import RowRanges, accumulator, cut_operands, from_rows


class Forward(NamedTuple):
    """The operands of the forward pass; all have a leading axis of B batch rows."""

    q: Array
    k: Array
    v: Array
    ranges: RowRanges
    sink: Array | None  # [B, N]


class Backward(NamedTuple):
    """Likewise of the backward pass; the softmax may have further keys."""

    q: Array
    k: Array
    v: Array
    ranges: RowRanges
    whole: SoftmaxGradients


@jax.named_scope("cpd.attention")
def attend(options: PassOptions, operands: Forward) -> tuple[Array, ...]:
    """Returns out `[B, T, N, Hv]` in `options.out_dtype`, and lse `[B, N, T]`.

    With `options.return_max_logits`, also the largest logit of each row, like lse.
    """
    return _bind(attend_p, options, operands)


@jax.named_scope("cpd.attention_backward")
def gradients(options: PassOptions, operands: Backward) -> tuple[Array, Array, Array]:
    """Returns dq, dk and dv in `options.gradient_dtypes`."""
    return _bind(gradients_p, options, operands)


attend_p = Primitive("local_attention")
gradients_p = Primitive("local_attention_gradients")
attend_p.multiple_results = gradients_p.multiple_results = True


def _bind(primitive, options, operands):
    leaves, tree = jax.tree.flatten(operands)
    return tuple(primitive.bind(*leaves, options=options, tree=tree))


# ---- By blocks.


def attend_cut(options: PassOptions, operands: Forward) -> tuple[Array, ...]:
    """`attend` by blocks."""
    q, k, v, ranges, sink = operands
    of = cut_operands(options, q, k, v, ranges)
    softmax = attend_blocks(options, of.q, of.ranges, (of.k, of.v), None)
    out, lse = add_sink(*softmax.result(q.shape, k.shape[2]), sink)
    results = out.astype(options.out_dtype), lse
    if options.return_max_logits:
        results += (softmax.max_logits(q.shape, k.shape[2]),)
    return results


def gradients_cut(options: PassOptions, operands: Backward) -> tuple[Array, Array, Array]:
    """`gradients` by blocks."""
    q, k, v, ranges, whole = operands
    num_groups = k.shape[2]
    of = cut_operands(options, q, k, v, ranges)
    cotangents = cut_cotangents(options, of.used, whole, num_groups)
    dq, kv = begin_dq(of.q), (of.k, of.v)
    dq, *dkv = block_gradients(options, of.q, cotangents, of.ranges, kv, dq)
    dk, dv = (from_rows(dx, x.shape, num_groups) for dx, x in zip(dkv, (k, v), strict=True))
    found = finish_dq(dq, q.shape, num_groups), dk, dv
    dq, dk, dv = (x.astype(to) for x, to in zip(found, options.gradient_dtypes, strict=True))
    return dq, dk, dv


# ---- Shapes; `update` keeps the mesh axes over which an array varies.


def _attend_shapes(*leaves, options, tree):
    q, _, v, *_ = tree.unflatten(leaves)
    B, T, N, _ = q.shape
    out = q.update(shape=(B, T, N, v.shape[3]), dtype=options.out_dtype, weak_type=False)
    row = _like(q, (B, N, T), accumulator(q))
    return [out, row, *[row] * options.return_max_logits]


def _like(x, shape, dtype):
    sharding = x.sharding.update(spec=P(*[None] * len(shape)))
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _gradients_shapes(*leaves, options, tree):
    arrays = tree.unflatten(leaves)[:3]
    pairs = zip(arrays, options.gradient_dtypes, strict=True)
    return [x.update(dtype=jnp.dtype(dtype), weak_type=False) for x, dtype in pairs]


# ---- Lowering.


def _define(primitive, shapes, cut, find_cuda):
    def call(pass_, *leaves, options, tree):
        return pass_(options, tree.unflatten(leaves))

    def lower_for_cuda(ctx, *leaves, options, tree):
        pass_ = find_cuda(options, tree.unflatten(ctx.avals_in)) or cut
        lower = mlir.lower_fun(functools.partial(call, pass_), multiple_results=True)
        return lower(ctx, *leaves, options=options, tree=tree)

    primitive.def_abstract_eval(shapes)
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("options", "tree")))
    batching.primitive_batchers[primitive] = functools.partial(batch_leading, primitive)
    by_blocks = mlir.lower_fun(functools.partial(call, cut), multiple_results=True)
    mlir.register_lowering(primitive, by_blocks)
    mlir.register_lowering(primitive, lower_for_cuda, platform="cuda")


def _cuda_attend(options: PassOptions, operands: Forward):
    if gpu.takes(options, operands.q, operands.v) and operands.sink is None:
        return gpu.cudnn_attend
    return gpu.attend if gpu.take(operands.q, operands.v) else None


def _cuda_gradients(options: PassOptions, operands: Backward):
    # cuDNN multiplies out and dout itself, and accepts no cotangent of the lse.
    if gpu.takes(options, operands.q, operands.v) and operands.whole.dlse is None:
        return gpu.cudnn_gradients
    return gpu.gradients if gpu.take(operands.q, operands.v) else None


_define(attend_p, _attend_shapes, attend_cut, _cuda_attend)
_define(gradients_p, _gradients_shapes, gradients_cut, _cuda_gradients)
