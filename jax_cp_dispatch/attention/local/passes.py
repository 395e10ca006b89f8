"""The two passes of local attention, as primitives: over whole arrays, and over blocks.

Lowering selects the implementation. For whole arrays, on GPUs, this package's kernels read and
write the arrays of the caller, or cuDNN does if the ranges are those of one dense document.
Otherwise arrays are tiled into blocks, which rings keep over all their steps: kernels for CUDA and
TPUs compute these if they support them, else blockwise code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jax_cp_dispatch._arrays import divided, sum_dtype
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch.attention.local import gpu
from jax_cp_dispatch.attention.local.ranges import (
    BlockIndex,
    KeyRanges,
    OnlineSoftmax,
    OutputCotangents,
    PassOptions,
    RowRanges,
    SoftmaxGradients,
    block_of,
    from_rows,
    set_block,
    soft_capped,
    tile_cotangents,
    tile_operands,
)

_Pass = TypeVar("_Pass", bound=Callable[..., Any])


def local_pass(
    name: str,
    scope: str,
    shapes: Callable[..., Any],
    results: Callable[[Any], Any] = tuple,
    **platforms: Callable[..., Any],
) -> Callable[[_Pass], _Pass]:
    """Makes a pass `(options, *operands)` a primitive; all arrays have a leading batch axis.

    Args:
      scope: of its operations, in profiles.
      shapes: from options and avals to the avals of the results.
      results: from the list of arrays to what the pass returns.
      platforms: of each one, `(ctx, options, *avals)` to what computes the pass there; None: the
        decorated function, as on all other platforms.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def decorate(otherwise):
        @functools.wraps(otherwise)
        @jax.named_scope(scope)
        def bind(options, *operands):
            leaves, tree = jax.tree.flatten(operands)
            return results(primitive.bind(*leaves, options=options, tree=tree))

        def lower(find, ctx, *leaves, options, tree):
            chosen = find(ctx, options, *tree.unflatten(ctx.avals_in)) or otherwise
            call = lambda *leaves: tuple(chosen(options, *tree.unflatten(leaves)))
            return mlir.lower_fun(call, multiple_results=True)(ctx, *leaves)

        for platform, find in {None: lambda *_: None, **platforms}.items():
            mlir.register_lowering(primitive, functools.partial(lower, find), platform=platform)
        return cast(Any, bind)

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
    return decorate


# ---- Over whole arrays. `update` keeps the mesh axes over which an array varies.


def _attention_shapes(options, q, k, v, *_):
    B, T, N, _ = q.shape
    out = q.update(shape=(B, T, N, v.shape[3]), dtype=options.out_dtype, weak_type=False)
    sharding = q.sharding.update(spec=P(None, None, None))
    dtype = sum_dtype(q.dtype)
    row = q.update(shape=(B, N, T), dtype=dtype, weak_type=False, sharding=sharding)
    return [out, row, *[row] * options.return_max_logits]


def _cuda_attention(ctx, options, q, k, v, *ranges_and_sink):
    taken = gpu.take(options, q, v, has_more=ranges_and_sink[1] is not None)
    return {"cudnn": gpu.cudnn_attention, "kernels": gpu.fused_attention}.get(taken.name)


@local_pass("local_attention", "cpd.attention", _attention_shapes, cuda=_cuda_attention)
def fused_attention(options: PassOptions, q, k, v, ranges: RowRanges, sink) -> tuple[Array, ...]:
    """Returns out `[B, T, N, Hv]` in `options.out_dtype`, and lse `[B, N, T]`.

    With `options.return_max_logits`, also the largest logit of each row, like lse. A sink is
    `[B, N]`, or None.
    """
    q_blocks, kv, key_ranges, _ = tile_operands(options, q, k, v, ranges)
    softmax = attend_blocks(options, q_blocks, key_ranges, kv, None)
    out, lse = add_sink(*softmax.result(q.shape, k.shape[2]), sink)
    results = out.astype(options.out_dtype), lse
    if options.return_max_logits:
        results += (softmax.max_logits(q.shape, k.shape[2]),)
    return results


def _cuda_gradients(ctx, options, q, k, v, *ranges_and_whole):
    has_dlse = ranges_and_whole[1].dlse is not None
    taken = gpu.take(options, q, v, backward=True, has_more=has_dlse)
    return {"cudnn": gpu.cudnn_gradients, "kernels": gpu.fused_gradients}.get(taken.name)


@local_pass(
    "local_attention_gradients",
    "cpd.attention_backward",
    lambda options, q, k, v, *_: [
        x.update(dtype=jnp.dtype(dtype), weak_type=False)
        for x, dtype in zip((q, k, v), options.gradient_dtypes, strict=True)
    ],
    cuda=_cuda_gradients,
)
def fused_gradients(
    options: PassOptions, q, k, v, ranges: RowRanges, whole: SoftmaxGradients
) -> tuple[Array, ...]:
    """Returns dq, dk and dv in `options.gradient_dtypes`.

    The softmax may be that of more keys than these.
    """
    num_groups = k.shape[2]
    q_blocks, kv, key_ranges, used = tile_operands(options, q, k, v, ranges)
    cotangents = tile_cotangents(options, used, whole, num_groups)
    dq = jnp.zeros_like(jnp.swapaxes(q_blocks, 2, 3), sum_dtype(q.dtype))
    dq, *dkv = block_gradients(options, q_blocks, cotangents, key_ranges, kv, dq)
    dk, dv = (from_rows(dx, x.shape, num_groups) for dx, x in zip(dkv, (k, v), strict=True))
    found = from_rows(jnp.swapaxes(dq, 2, 3), q.shape, num_groups), dk, dv
    return tuple(x.astype(to) for x, to in zip(found, options.gradient_dtypes, strict=True))


# ---- Over blocks: an online softmax over each query block's keys, in loops on every platform.
#
# Forward, logits are `[matrices, G * block_q, block_kv]`: both products then read and write them
# without a transposition. Backward, which recomputes the probabilities, they are transposed, so
# that four of the five products do; only `dq` is accumulated transposed.
#
# A loop over query blocks writes its carry in place; a `lax.scan` would copy its results. Products
# are of the dtype of sums: on CPU, GEMMs in narrower types are slower.


# In both passes, the operand before the last is k and v.


def _cuda_blocks(name, ctx, options, q, *others):
    return getattr(gpu, name) if gpu.kernels_serve(q, others[-2][1]) else None


def _tpu_blocks(name, ctx, options, q, *others):
    from jax_cp_dispatch.attention.local import tpu  # imports Pallas, which takes half a second

    return getattr(tpu, name) if tpu.serves(ctx, options, q, *others[-2]) else None


def block_matmul(x, y, contract):
    """Multiplies per matrix at highest precision; `contract`: axis of x, axis of y."""
    dimensions = ((contract[:1], contract[1:]), ((0,), (0,)))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST)


@local_pass(
    "attend_blocks",
    "cpd.attention",
    lambda options, q, ranges, kv, seen: [
        q.update(shape=(*q.shape[:3], *features), dtype=sum_dtype(q.dtype), weak_type=False)
        for features in ((), (), kv[1].shape[3:])
    ],
    OnlineSoftmax._make,
    cuda=functools.partial(_cuda_blocks, "attend_blocks"),
    tpu=functools.partial(_tpu_blocks, "attend_blocks"),
)
def attend_blocks(
    options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    """Adds key blocks to the softmax of the query blocks; None if they are the first ones."""
    (num_matrices, num_blocks, num_rows), together = q.shape[:3], options.block_heads
    dtype = sum_dtype(q.dtype)
    seen = seen or OnlineSoftmax.of_nothing(q, kv[1].shape[3])
    q, (k, v) = options.scale * q.astype(dtype), (x.astype(dtype) for x in kv)

    def one_query_block(number, seen):
        matrices, block = divided(number, num_blocks)
        index = BlockIndex(matrices * together, together, block)
        q_block, own = block_of(q, index), ranges.of_block(options, index, num_rows)

        def exponentials(masked, j, logits, peak, of_pair):
            logits, _ = soft_capped(options.logit_soft_cap, logits)
            if masked:
                column = j * options.block_kv + jnp.arange(options.block_kv, dtype=jnp.int32)
                column, start = column[None, None], own.rows[:, 0, :, None]
                allowed = (column >= start) & (column < own.rows[:, 1, :, None])
                if of_pair is not None:
                    allowed &= of_pair.allow()
                logits = jnp.where(allowed, logits, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=2))
            return jnp.exp(logits - new_peak[..., None]), new_peak

        def add_block(j, row):
            peak, total, acc = row
            there = index._replace(block=j)
            of_pair = own.queries and own.queries.of_keys(there)
            # Most blocks are inside all ranges; a mask would cost them a pass over the logits.
            is_whole = (j >= own.first_whole) & (j < own.last_whole)
            if of_pair is not None:
                is_early = jnp.max(of_pair.indices[:, 1]) < jnp.min(of_pair.ends[:, 0])
                is_late = jnp.min(of_pair.indices[:, 0]) >= jnp.max(of_pair.starts[:, 1])
                is_whole &= is_early & is_late
            p, new_peak = lax.cond(
                is_whole,
                functools.partial(exponentials, False),
                functools.partial(exponentials, True),
                *(j, block_matmul(q_block, block_of(k, there), (2, 2)), peak, of_pair),
            )
            keep = jnp.exp(peak - new_peak)
            total = total * keep + jnp.sum(p, axis=2)
            acc = acc * keep[..., None] + block_matmul(p, block_of(v, there), (2, 1))
            return new_peak, total, acc

        row = own.each_key_block(add_block, tuple(block_of(x, index) for x in seen))
        return OnlineSoftmax(*(set_block(x, index, y) for x, y in zip(seen, row, strict=True)))

    return lax.fori_loop(0, num_matrices // together * num_blocks, one_query_block, seen)


@local_pass(
    "block_gradients",
    "cpd.attention_backward",
    lambda options, q, cotangents, ranges, kv, dq: [
        x.update(dtype=dq.dtype, weak_type=False) for x in (dq, *kv)
    ],
    cuda=functools.partial(_cuda_blocks, "block_gradients"),
    tpu=functools.partial(_tpu_blocks, "block_gradients"),
)
def block_gradients(
    options: PassOptions, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq
) -> tuple[Array, ...]:
    """Adds the part of one set of keys to `dq`, `[B*K, nq, H, G*block_q]`; returns all three."""
    (num_matrices, num_blocks, num_rows), together = q.shape[:3], options.block_heads
    dtype = sum_dtype(q.dtype)
    q, (k, v) = options.scale * q.astype(dtype), (x.astype(dtype) for x in kv)
    cotangents = cotangents._replace(dout=cotangents.dout.astype(dtype))
    k_columns = options.scale * jnp.swapaxes(k, 2, 3)

    def one_query_block(number, carry):
        matrices, block = divided(number, num_blocks)
        index = BlockIndex(matrices * together, together, block)
        q_block, dout, lse, delta = (block_of(x, index) for x in (q, *cotangents))
        own = ranges.of_block(options, index, num_rows)

        def add_block(j, carry):
            dq_block, dk, dv = carry
            there = index._replace(block=j)
            k_block, v_block = block_of(k, there), block_of(v, there)
            column = j * options.block_kv + jnp.arange(options.block_kv, dtype=jnp.int32)
            column = column[None, :, None]
            logits, slope = soft_capped(
                options.logit_soft_cap, block_matmul(k_block, q_block, (2, 2))
            )
            allowed = (column >= own.rows[:, :1]) & (column < own.rows[:, 1:])
            if own.queries is not None:
                allowed &= jnp.swapaxes(own.queries.of_keys(there).allow(), 1, 2)
            p = jnp.exp(jnp.where(allowed, logits, -jnp.inf) - lse[:, None])
            ds = p * (block_matmul(v_block, dout, (2, 2)) - delta[:, None]) * slope
            dq_block = dq_block + block_matmul(block_of(k_columns, there), ds, (2, 1))
            dk = set_block(dk, there, block_of(dk, there) + block_matmul(ds, q_block, (2, 1)))
            dv = set_block(dv, there, block_of(dv, there) + block_matmul(p, dout, (2, 1)))
            return dq_block, dk, dv

        dq, *dkv = carry
        dq_block, *dkv = own.each_key_block(add_block, (block_of(dq, index), *dkv))
        return set_block(dq, index, dq_block), *dkv

    zeros = vary_alike((jnp.zeros_like(k), jnp.zeros_like(v)), like=q)
    return lax.fori_loop(0, num_matrices // together * num_blocks, one_query_block, (dq, *zeros))


# ---- Attention is differentiable once, in reverse mode: other derivatives raise named errors.
#
# Without these identities, JAX's errors would name primitives or `custom_vjp` instead of the
# function that was called. They leave nothing in a compiled program.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def in_reverse_only(op: str, x: Any) -> Any:
    """Returns an array, differentiable in reverse mode only; forward mode is an error."""
    return x


@in_reverse_only.defjvp
def _to_transpose(op, primals, tangents):
    return in_reverse_only(op, *primals), _tangent_p.bind(*tangents, op=op)


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
