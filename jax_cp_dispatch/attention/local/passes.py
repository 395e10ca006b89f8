"""The two passes of local attention, as primitives: over whole arrays, and over blocks.

Lowering selects the implementation. For whole arrays, on GPUs, this package's kernels read and
write the arrays of the caller, or cuDNN does if the ranges are those of one dense document.
Otherwise arrays are tiled into blocks, which rings keep over all their steps: kernels for CUDA and
TPUs compute these if they support them, else blockwise code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch.attention.local import gpu
from jax_cp_dispatch.attention.local.ranges import (
    KeyRanges,
    OnlineSoftmax,
    OutputCotangents,
    PassOptions,
    RowRanges,
    SoftmaxGradients,
    accumulator,
    begin_dq,
    block_of,
    each_key_block,
    each_query_block,
    finish_dq,
    from_rows,
    matmul,
    positions,
    set_block,
    soft_capped,
    tile_cotangents,
    tile_operands,
    widen,
)


@jax.named_scope("cpd.attention")
def fused_attention(options: PassOptions, q, k, v, ranges: RowRanges, sink) -> tuple[Array, ...]:
    """Returns out `[B, T, N, Hv]` in `options.out_dtype`, and lse `[B, N, T]`.

    With `options.return_max_logits`, also the largest logit of each row, like lse. A sink is
    `[B, N]`, or None.
    """
    return tuple(_attention(options, q, k, v, ranges, sink))


@jax.named_scope("cpd.attention_backward")
def fused_gradients(
    options: PassOptions, q, k, v, ranges: RowRanges, whole: SoftmaxGradients
) -> tuple[Array, Array, Array]:
    """Returns dq, dk and dv in `options.gradient_dtypes`.

    The softmax may be that of more keys than these.
    """
    dq, dk, dv = _attention_gradients(options, q, k, v, ranges, whole)
    return dq, dk, dv


@jax.named_scope("cpd.attention")
def attend_blocks(options, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None) -> OnlineSoftmax:
    """Adds key blocks to the softmax of the query blocks; None if they are the first ones."""
    return OnlineSoftmax(*_blocks(options, q, ranges, tuple(kv), seen))


@jax.named_scope("cpd.attention_backward")
def block_gradients(options, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq):
    """Adds the part of one set of keys to `dq`, `[B*K, nq, H, G*block_q]`; returns all three."""
    return _block_gradients(options, q, cotangents, ranges, tuple(kv), dq)


def attention_in_tiles(options: PassOptions, q, k, v, ranges: RowRanges, sink) -> tuple[Array, ...]:
    of = tile_operands(options, q, k, v, ranges)
    softmax = attend_blocks(options, of.q, of.ranges, (of.k, of.v), None)
    out, lse = add_sink(*softmax.result(q.shape, k.shape[2]), sink)
    results = out.astype(options.out_dtype), lse
    if options.return_max_logits:
        results += (softmax.max_logits(q.shape, k.shape[2]),)
    return results


def gradients_in_tiles(
    options: PassOptions, q, k, v, ranges: RowRanges, whole: SoftmaxGradients
) -> tuple[Array, ...]:
    num_groups = k.shape[2]
    of = tile_operands(options, q, k, v, ranges)
    cotangents = tile_cotangents(options, of.used, whole, num_groups)
    kv = of.k, of.v
    dq, *dkv = block_gradients(options, of.q, cotangents, of.ranges, kv, begin_dq(of.q))
    dk, dv = (from_rows(dx, x.shape, num_groups) for dx, x in zip(dkv, (k, v), strict=True))
    found = finish_dq(dq, q.shape, num_groups), dk, dv
    return tuple(x.astype(to) for x, to in zip(found, options.gradient_dtypes, strict=True))


# ---- Blockwise, on every platform: an online softmax over each query block's keys.
#
# Forward, logits are `[matrices, G * block_q, block_kv]`: both products then read and write them
# without a transposition. Backward, which recomputes the probabilities, they are transposed, so
# that four of the five products do; only `dq` is accumulated transposed.


def attend_blockwise(
    options, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    seen = seen or OnlineSoftmax.of_nothing(q, kv[1].shape[3])
    q, (k, v) = options.scale * widen(q), map(widen, kv)

    def one_query_block(seen, index):
        q_block, own = block_of(q, index), ranges.of_queries(index)
        blocks, rows, queries = own.key_blocks(options), own.of_heads(q.shape[2]), own.queries

        def exponentials(masked, j, logits, peak, of_pair):
            logits, _ = soft_capped(options, logits)
            if masked:
                column = positions(options, j)[None, None]
                allowed = (column >= rows[:, 0, :, None]) & (column < rows[:, 1, :, None])
                if of_pair is not None:
                    allowed &= of_pair.allow()
                logits = jnp.where(allowed, logits, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=2))
            return jnp.exp(logits - new_peak[..., None]), new_peak

        def add_block(j, row):
            peak, total, acc = row
            of_pair = queries and queries.of_keys(index.at(j))
            # Most blocks are inside all ranges; a mask would cost them a pass over the logits.
            is_whole = (j >= blocks.first_whole) & (j < blocks.last_whole)
            p, new_peak = lax.cond(
                is_whole if of_pair is None else is_whole & of_pair.hide_none(),
                functools.partial(exponentials, False),
                functools.partial(exponentials, True),
                j,
                matmul(q_block, block_of(k, index.at(j)), (2, 2)),
                peak,
                of_pair,
            )
            keep = jnp.exp(peak - new_peak)
            total = total * keep + jnp.sum(p, axis=2)
            acc = acc * keep[..., None] + matmul(p, block_of(v, index.at(j)), (2, 1))
            return new_peak, total, acc

        row = tuple(block_of(x, index) for x in seen)
        row = each_key_block(index, (blocks.first, blocks.last, queries), add_block, row)
        return OnlineSoftmax(*(set_block(x, index, y) for x, y in zip(seen, row, strict=True)))

    return each_query_block(options, one_query_block, seen, q)


def gradients_blockwise(options, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq):
    q, (k, v) = options.scale * widen(q), map(widen, kv)
    cotangents = cotangents._replace(dout=widen(cotangents.dout))
    k_columns = options.scale * jnp.swapaxes(k, 2, 3)

    def one_query_block(carry, index):
        q_block, dout, lse, delta = (block_of(x, index) for x in (q, *cotangents))
        own = ranges.of_queries(index)
        blocks, rows, queries = own.key_blocks(options), own.of_heads(q.shape[2]), own.queries

        def add_block(j, carry):
            dq_block, dk, dv = carry
            there = index.at(j)
            k_block, v_block = block_of(k, there), block_of(v, there)
            position = positions(options, j)[None, :, None]
            logits, slope = soft_capped(options, matmul(k_block, q_block, (2, 2)))
            allowed = (position >= rows[:, :1]) & (position < rows[:, 1:])
            if queries is not None:
                allowed &= jnp.swapaxes(queries.of_keys(there).allow(), 1, 2)
            p = jnp.exp(jnp.where(allowed, logits, -jnp.inf) - lse[:, None])
            ds = p * (matmul(v_block, dout, (2, 2)) - delta[:, None]) * slope
            dq_block = dq_block + matmul(block_of(k_columns, there), ds, (2, 1))
            dk = set_block(dk, there, block_of(dk, there) + matmul(ds, q_block, (2, 1)))
            dv = set_block(dv, there, block_of(dv, there) + matmul(p, dout, (2, 1)))
            return dq_block, dk, dv

        dq, *dkv = carry
        row = block_of(dq, index), *dkv
        dq_block, *dkv = each_key_block(index, (blocks.first, blocks.last, queries), add_block, row)
        return set_block(dq, index, dq_block), *dkv

    zeros = vary_alike((jnp.zeros_like(k), jnp.zeros_like(v)), like=q)
    return each_query_block(options, one_query_block, (dq, *zeros), q)


# ---- The primitives.


def _define(
    name: str, shapes: Callable[..., Any], otherwise: Callable[..., Any], **platforms: Any
) -> Callable[..., Any]:
    """Returns the call of a new primitive, `(options, *operands)`, all of a leading batch axis.

    Args:
      shapes: from options and avals to the avals of the results.
      otherwise: computes the results.
      platforms: of each one, `(ctx, options, *avals)` to what computes them there, or None.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def bind(options, *operands):
        leaves, tree = jax.tree.flatten(operands)
        return primitive.bind(*leaves, options=options, tree=tree)

    def call(pass_, *leaves, options, tree):
        return tuple(pass_(options, *tree.unflatten(leaves)))

    def lower(find, ctx, *leaves, options, tree):
        pass_ = find(ctx, options, *tree.unflatten(ctx.avals_in)) or otherwise
        lower = mlir.lower_fun(functools.partial(call, pass_), multiple_results=True)
        return lower(ctx, *leaves, options=options, tree=tree)

    def batch(operands, dims, **params):
        (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
        moved = (batching.bdim_at_front(x, d, size) for x, d in zip(operands, dims, strict=True))
        outs = primitive.bind(*(x.reshape(-1, *x.shape[2:]) for x in moved), **params)
        return [x.reshape(size, -1, *x.shape[1:]) for x in outs], [0] * len(outs)

    primitive.def_abstract_eval(
        lambda *leaves, options, tree: shapes(options, *tree.unflatten(leaves))
    )
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("options", "tree")))
    batching.primitive_batchers[primitive] = batch
    for platform, find in {None: lambda *_: None, **platforms}.items():
        mlir.register_lowering(primitive, functools.partial(lower, find), platform=platform)
    return bind


# Shapes; `update` keeps the mesh axes over which an array varies.


def _attention_shapes(options, q, k, v, *_):
    B, T, N, _ = q.shape
    out = q.update(shape=(B, T, N, v.shape[3]), dtype=options.out_dtype, weak_type=False)
    sharding = q.sharding.update(spec=P(None, None, None))
    row = q.update(shape=(B, N, T), dtype=accumulator(q), weak_type=False, sharding=sharding)
    return [out, row, *[row] * options.return_max_logits]


def _attention_gradients_shapes(options, q, k, v, *_):
    pairs = zip((q, k, v), options.gradient_dtypes, strict=True)
    return [x.update(dtype=jnp.dtype(dtype), weak_type=False) for x, dtype in pairs]


def _blocks_shapes(_, q, ranges, kv, *__):
    row = q.update(shape=q.shape[:3], dtype=accumulator(q), weak_type=False)
    return [row, row, row.update(shape=(*q.shape[:3], kv[1].shape[3]))]


def _block_gradients_shapes(_, q, cotangents, ranges, kv, dq):
    return [x.update(dtype=dq.dtype, weak_type=False) for x in (dq, *kv)]


# Which kernels.


def _cuda_attention(ctx, options, q, k, v, *ranges_and_sink):
    if ranges_and_sink[1] is None and gpu.cudnn_serves(options, q, v):
        return gpu.cudnn_attention
    return gpu.fused_attention if gpu.kernels_serve(q, v) else None


def _cuda_gradients(ctx, options, q, k, v, *ranges_and_whole):
    # cuDNN multiplies out and dout itself, and accepts no cotangent of the lse.
    if ranges_and_whole[1].dlse is None and gpu.cudnn_serves(options, q, v):
        return gpu.cudnn_gradients
    return gpu.fused_gradients if gpu.kernels_serve(q, v) else None


def _tpu(name, ctx, options, q, *others):
    from jax_cp_dispatch.attention.local import tpu  # imports Pallas, which takes half a second

    return getattr(tpu, name) if tpu.serves(ctx, options, q, *others[-2]) else None


_attention = _define("local_attention", _attention_shapes, attention_in_tiles, cuda=_cuda_attention)
_attention_gradients = _define(
    "local_attention_gradients",
    _attention_gradients_shapes,
    gradients_in_tiles,
    cuda=_cuda_gradients,
)
_blocks = _define(
    "attend_blocks",
    _blocks_shapes,
    attend_blockwise,
    cuda=lambda _, __, q, ranges, kv, *___: (
        gpu.attend_blocks if gpu.kernels_serve(q, kv[1]) else None
    ),
    tpu=functools.partial(_tpu, "attend_blocks"),
)
_block_gradients = _define(
    "block_gradients",
    _block_gradients_shapes,
    gradients_blockwise,
    cuda=lambda _, __, q, cotangents, ranges, kv, dq: (
        gpu.block_gradients if gpu.kernels_serve(q, kv[1]) else None
    ),
    tpu=functools.partial(_tpu, "block_gradients"),
)


# ---- Attention is differentiable once, in reverse mode: other derivatives raise named errors.
#
# Without these identities, JAX's errors would name primitives or `custom_vjp` instead of the
# function that was called. They leave nothing in a compiled program.


def in_reverse_only(op: str, arrays: Any) -> Any:
    """Returns a pytree, differentiable in reverse mode only; forward mode is an error."""
    return jax.tree.map(functools.partial(_in_reverse_only, op), arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_reverse_only(op: str, x: Any) -> Any:
    return x


@_in_reverse_only.defjvp
def _to_transpose(op, primals, tangents):
    return _in_reverse_only(op, *primals), _tangent_p.bind(*tangents, op=op)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forbid_second_derivative(op: str, arrays: Any) -> Any:
    """Returns a pytree for the rules of a derivative, which is not differentiable itself."""
    return arrays


@forbid_second_derivative.defjvp
def _refuse_second_derivative(op, *_):
    raise NotImplementedError(
        f"{op}: second derivatives are not supported. For the value of a gradient "
        "alone, differentiate with respect to jax.lax.stop_gradient(x)."
    )


def _refuse_forward_mode(*_, op):
    raise NotImplementedError(
        f"{op}: forward mode (jvp, linearize, jacfwd) is not supported. Use reverse mode: "
        "jax.vjp, jax.grad or jax.jacrev."
    )


_tangent_p = Primitive("tangent_to_transpose")
_tangent_p.def_abstract_eval(lambda x, op: x)
_tangent_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(_tangent_p, _refuse_forward_mode)
ad.primitive_jvps[_tangent_p] = lambda *_, op: _refuse_second_derivative(op)
ad.primitive_transposes[_tangent_p] = lambda cotangent, _, op: [cotangent]
batching.primitive_batchers[_tangent_p] = lambda xs, dims, op: (_tangent_p.bind(*xs, op=op), *dims)


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
