"""The two passes of local attention over blocks, as primitives.

Lowering selects the implementation: kernels for CUDA and for TPUs if they support the blocks, else
blockwise code.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from jax_cp_dispatch.attention.local import gpu
from jax_cp_dispatch.attention.local.blockwise import (
    OnlineSoftmax,
    OutputCotangents,
    SoftmaxGradients,
    attend_blockwise,
    gradients_blockwise,
)
from jax_cp_dispatch.attention.local.ranges import KeyRanges, accumulator


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
    return pass_ if gpu.take(q, kv[1]) else None


def _tpu(name, ctx, options, q, ranges, kv):
    from jax_cp_dispatch.attention.local import tpu  # imports Pallas, which takes half a second

    return getattr(tpu, name) if tpu.takes(ctx, options, q, *kv) else None


def _platforms(cuda, tpu):
    return {"cuda": functools.partial(_cuda, cuda), "tpu": functools.partial(_tpu, tpu)}


_define(
    attend_p,
    _attend_shapes,
    attend_blockwise,
    _platforms(gpu.attend_in_blocks, "attend"),
)
_define(
    gradients_p,
    _gradients_shapes,
    gradients_blockwise,
    _platforms(gpu.gradients_in_blocks, "gradients"),
)


# ---- Attention is differentiable once, in reverse mode: other derivatives raise named errors.
#
# Without these markers, JAX's errors would name primitives or `custom_vjp` instead of the function
# that was called. They are identities and leave nothing in a compiled program.


def in_reverse_only(op: str, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays, differentiable in reverse mode only; forward mode is an error."""
    return reverse_only_p.bind(*arrays, op=op)


def forbid_second_derivative(op: str, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays for the rules of a derivative, which is not differentiable itself."""
    return first_only_p.bind(*arrays, op=op)


def _refuse_forward_mode(*_, op, **__):
    raise NotImplementedError(
        f"{op}: forward mode (jvp, linearize, jacfwd) is not supported. Use reverse mode: "
        "jax.vjp, jax.grad or jax.jacrev."
    )


def _refuse_second_derivative(*_, op, **__):
    raise NotImplementedError(
        f"{op}: second derivatives are not supported. For the value of a gradient "
        "alone, differentiate with respect to jax.lax.stop_gradient(x)."
    )


reverse_only_p = Primitive("in_reverse_only")
first_only_p = Primitive("forbid_second_derivative")
tangents_p = Primitive("tangents_to_transpose")


def _jvp(primals, tangents, *, op):
    outs = in_reverse_only(op, primals)
    moving = [t for t in tangents if type(t) is not ad.Zero]
    moved = iter(tangents_p.bind(*moving, op=op) if moving else ())
    return outs, [t if type(t) is ad.Zero else next(moved) for t in tangents]


def _transpose(cotangents, *_, op):
    return list(cotangents)


def _batch(primitive, operands, dims, *, op):
    return primitive.bind(*operands, op=op), list(dims)


def _complete(primitive: Primitive) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, op: list(avals))
    primitive.def_impl(lambda *arrays, op: list(arrays))
    batching.primitive_batchers[primitive] = lambda *args, **kwargs: _batch(
        primitive, *args, **kwargs
    )
    mlir.register_lowering(primitive, lambda ctx, *arrays, op: list(arrays))


for _primitive in (reverse_only_p, first_only_p, tangents_p):
    _complete(_primitive)
ad.primitive_jvps[reverse_only_p] = _jvp
ad.primitive_jvps[first_only_p] = _refuse_second_derivative
tangents_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(tangents_p, _refuse_forward_mode)
ad.primitive_jvps[tangents_p] = _refuse_second_derivative
ad.primitive_transposes[tangents_p] = _transpose


# ---- Sinks: a learned logit per head without a value, added to a complete softmax.


def add_sink(
    out: Float[Array, "B T N Hv"], lse: Float[Array, "B N T"], sink: Float[Array, "*B N"] | None
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Adds `exp(sink)` to the denominators of rows with keys; other rows stay (0, -inf)."""
    if sink is None:
        return out, lse
    sink = lax.expand_dims(sink.astype(lse.dtype)[..., None], range(lse.ndim - sink.ndim - 1))
    share = jax.nn.sigmoid(lse - sink)
    out = out * jnp.swapaxes(share, 1, 2)[..., None]
    return out, jnp.where(lse > -jnp.inf, jnp.logaddexp(lse, sink), -jnp.inf)


def sink_gradient(sink: Float[Array, " N"], whole: SoftmaxGradients) -> Float[Array, " N"]:
    """Returns the gradient of the sink over these rows, in its dtype.

    A sink is a key whose value is 0, so dL/dsink = -p (dout . out - dlse), with p = exp(sink - lse)
    and out and lse of the softmax with the sink. Keys need no other rule than without a sink.
    """
    out, lse, dout, dlse = whole
    delta = jnp.swapaxes(jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1), 1, 2)
    delta = delta if dlse is None else delta - dlse
    p = jnp.exp(sink.astype(lse.dtype)[None, :, None] - lse)
    used = lse > -jnp.inf
    return -jnp.sum(jnp.where(used, p * delta, 0), axis=(0, 2)).astype(sink.dtype)
