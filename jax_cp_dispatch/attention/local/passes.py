"""The two passes of local attention over blocks, as primitives.

Lowering selects the implementation: kernels for CUDA and for TPUs if they support the blocks, else
blockwise code.
"""

from __future__ import annotations

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_cp_dispatch.attention.local import range_kernels
from jax_cp_dispatch.attention.local.backward import OutputCotangents, gradients_blockwise
from jax_cp_dispatch.attention.local.blocks import KeyRanges, accumulator
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax, attend_blockwise


@jax.named_scope("cpd.attention")
def attend_blocks(options, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None) -> OnlineSoftmax:
    """Adds key blocks to the softmax of the query blocks; None if they are the first ones."""
    return OnlineSoftmax(*_bind(attend_p, options, q, ranges, tuple(kv), seen))


@jax.named_scope("cpd.attention_backward")
def block_gradients(options, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq):
    """Adds the part of one set of keys to `dq`, `[B*K, nq, H, G*block_q]`; returns all three."""
    return _bind(gradients_p, options, q, cotangents, ranges, tuple(kv), dq)


attend_p = Primitive("attend_blocks")
gradients_p = Primitive("block_gradients")
attend_p.multiple_results = gradients_p.multiple_results = True


def _bind(primitive, options, *operands):
    leaves, tree = jax.tree.flatten(operands)
    return primitive.bind(*leaves, options=options, tree=tree)


def _call(pass_, *leaves, options, tree):
    return tuple(pass_(options, *tree.unflatten(leaves)))


# ---- Shapes; `update` keeps the mesh axes over which an array varies.


def _attend_shapes(*leaves, options, tree):
    q, _, (_, v), _ = tree.unflatten(leaves)
    row = q.update(shape=q.shape[:3], dtype=accumulator(q), weak_type=False)
    acc = q.update(shape=(*q.shape[:3], v.shape[3]), dtype=row.dtype, weak_type=False)
    return [row, row, acc]


def _gradients_shapes(*leaves, options, tree):
    *_, (k, v), dq = tree.unflatten(leaves)
    return [x.update(dtype=dq.dtype, weak_type=False) for x in (dq, k, v)]


# ---- Batching.


def batch_leading(primitive, operands, dims, **params):
    """Adds the examples to the leading axis, of matrices or batch rows, that all operands have."""
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    moved = (batching.bdim_at_front(x, d, size) for x, d in zip(operands, dims, strict=True))
    outs = primitive.bind(*(x.reshape(-1, *x.shape[2:]) for x in moved), **params)
    return [x.reshape(size, -1, *x.shape[1:]) for x in outs], [0] * len(outs)


# ---- Lowering.


def _define(primitive, shapes, blockwise, platforms):
    def lower_by(find, ctx, *leaves, options, tree):
        q, *others = tree.unflatten(ctx.avals_in)
        (ranges,) = (x for x in others if isinstance(x, KeyRanges))
        pass_ = find(ctx, options, q, ranges, others[-2]) or blockwise
        lower = mlir.lower_fun(functools.partial(_call, pass_), multiple_results=True)
        return lower(ctx, *leaves, options=options, tree=tree)

    primitive.def_abstract_eval(shapes)
    compiled = jax.jit(primitive.bind, static_argnames=("options", "tree"))
    primitive.def_impl(compiled)
    batching.primitive_batchers[primitive] = functools.partial(batch_leading, primitive)
    blocks = functools.partial(_call, blockwise)
    mlir.register_lowering(primitive, mlir.lower_fun(blocks, multiple_results=True))
    for platform, find in platforms.items():
        lower = functools.partial(lower_by, find)
        mlir.register_lowering(primitive, lower, platform=platform)


def _cuda(pass_, ctx, options, q, ranges, kv):
    return pass_ if range_kernels.take(q, kv[1]) else None


def _tpu(name, ctx, options, q, ranges, kv):
    from jax_cp_dispatch.attention.local import tpu  # imports Pallas, which takes half a second

    return getattr(tpu, name) if tpu.takes(ctx, options, q, *kv) else None


def _platforms(cuda, tpu):
    return {"cuda": functools.partial(_cuda, cuda), "tpu": functools.partial(_tpu, tpu)}


_define(
    attend_p,
    _attend_shapes,
    attend_blockwise,
    _platforms(range_kernels.attend_in_blocks, "attend"),
)
_define(
    gradients_p,
    _gradients_shapes,
    gradients_blockwise,
    _platforms(range_kernels.gradients_in_blocks, "gradients"),
)
