"""The derivatives of `all_gather_matmul` and `matmul_reduce_scatter`, which contain each other.

all_gather_matmul:      y = concat_q(x_q) w        dx = reduce_scatter(dy w'),  dw = concat(x)' dy
matmul_reduce_scatter:  y_r = rows r of sum_q x_q w_q    dx = concat(dy) w',  dw = x' concat(dy)

w is a tuple of the weights [K, N] of one x, which are multiplied as one: joined for each product,
so that no derivative keeps a copy of them. dx is one product, rounded once.

With 8-bit operands, rounding counts as identity. concat gives the rounded rows that were
multiplied, each product with w rounds both operands, and dw is a product of wide operands.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.options import vary_alike, varying_axes
from jax_cp_dispatch._residuals import named_gathered_tokens
from jax_cp_dispatch.comm_gemm.rank import (
    FORWARD_DTYPE,
    Matmul,
    check_contracted_blocks,
    constrain,
    gradients_of_rank,
    keeps_token_axes,
    pad_rows,
    partition_gradients,
    partition_product,
    product_of_rank,
    real_rows,
    split_like,
    weight_spec,
)
from jax_cp_dispatch.scaling import DelayedScaling, MatmulScaling, largest_magnitude

# Any, because type checkers do not know what a partial of it returns.
_with_own_derivative: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))


# ---- The matmul. A forward rule calls its own function, so that it can be differentiated again.


@_with_own_derivative
def matmul(s: Matmul, keeps: bool, x, w, bias, scales):
    """Returns the product, and the gathered x, as it is multiplied, if it `keeps` that, or None.

    x and the bias are of one rank, or of all; w is a tuple of weights; scales are `Scales`, or
    None.
    """
    run = product_of_rank if s.mesh is None else _partition_product
    if s.is_scaled and s.gathers:
        x = real_rows(s, x)
    of_both = None if scales is None else jnp.concatenate([scales.x, scales.w])
    return run(s, x, s.join(w), bias, of_both, keeps=keeps)


def _forward(s: Matmul, keeps: bool, x, w, bias, scales):
    amaxes = None
    if scales is not None:
        both = real_rows(s, x) if s.gathers else x, s.join(w)
        amaxes = [largest_magnitude(each)[None] for each in both]
    out, gathered = matmul(s, keeps or (s.gathers and s.keeps_gathered), x, w, bias, scales)
    if gathered is None:
        return (out, None), (x, w, bias, scales, amaxes)
    if not keeps:
        gathered = named_gathered_tokens(gathered)
    return (out, gathered if keeps else None), (gathered, w, bias, scales, amaxes)


def _backward(s: Matmul, keeps: bool, residuals, cotangents):
    x, w, bias, scales, amaxes = residuals  # x is the gathered one, if that was kept
    dy, dgathered = cotangents
    dy = dy if s.gathers else real_rows(s, dy)
    if s.mesh is not None and keeps_token_axes(s, x):  # dy may be a constant
        dy = split_like(dy, x, dy.ndim - 1)
    if s.gathers and not (keeps or s.keeps_gathered):
        dx, dw = _gradients(s, None, x, w, dy)
    else:
        # The adjoint contracts the columns of w, which may be sharded.
        splits_columns = s.mesh is not None and s.gathers
        columns = sum(map(s.num_columns, w)) // (s.comm.num_ranks if splits_columns else 1)
        check_contracted_blocks(s.op, s.scaling_mode, columns)
        of_adjoint = scales
        if scales is not None:  # the derivative of dy w' multiplies a tensor like x
            of_adjoint = Scales(*map(lax.stop_gradient, (scales.dy, scales.w, scales.x)))
        dx, rows_of_all = matmul(s.adjoint(x.dtype), not s.gathers, dy, w, None, of_adjoint)
        if s.gathers:
            rows_of_all = dy
        if 0 in (*x.shape, *rows_of_all.shape):
            # XLA fails if all operands of a shard_map are empty.
            dw = vary_alike(tuple(map(jnp.zeros_like, w)), like=rows_of_all)
        else:
            lhs, rhs = (rows_of_all, x) if s.rhs_transposed else (x, rows_of_all)
            rows, wide = tuple(range(x.ndim - 1)), sum_dtype(w[0].dtype)
            dims = ((rows, rows), ((), ()))
            dw = jax.lax.dot_general(lhs, rhs, dims, preferred_element_type=wide)
            if s.mesh is not None:
                dw = constrain(s, dw, *weight_spec(s))
            dw = s.split(dw.astype(w[0].dtype), [each.shape[-1] for each in w])
    if dgathered is not None:
        dx = dx + _sum_to_ranks(s, dgathered)
    if amaxes is not None:
        amaxes = Scales(*amaxes, dy=largest_magnitude(dy)[None])
    return dx, dw, bias_gradient(dy, bias), amaxes


matmul.defvjp(_forward, _backward)


@_with_own_derivative
def _gradients(s: Matmul, _, x, w, dy):
    """Returns dx and dw if the gathered x was not kept."""
    run = gradients_of_rank if s.mesh is None else _partition_gradients
    dx, dw = run(s, x, s.join(w), dy)
    return dx, s.split(dw, [each.shape[-1] for each in w])


def _gradients_backward(s: Matmul, _, residuals, cotangents):
    # dx = reduce_scatter(dy w') and dw = concat(x)' dy, each linear in both of its operands.
    x, w, dy = residuals
    of_dx, of_dw = cotangents
    more = lambda x, w: matmul(s, False, x, w, None, None)[0]
    dx, dw = _gradients(s, None, of_dx, of_dw, dy)
    return dx, dw, more(of_dx, w) + more(x, of_dw)


_gradients.defvjp(lambda *x: (_gradients(*x), x[2:]), _gradients_backward)


def bias_gradient(dy, bias):
    if bias is None:
        return None
    wide = sum_dtype(dy.dtype)
    return dy.astype(wide).sum(range(dy.ndim - 1)).astype(bias.dtype)


def _sum_to_ranks(s: Matmul, gathered):
    """Sums gathered rows over ranks and returns each rank's own; only for second derivatives."""
    room, total = max(s.row_counts), sum(s.row_counts)
    if s.mesh is not None:
        return pad_rows(gathered, s.comm.num_ranks * room)
    wide = gathered.astype(sum_dtype(gathered.dtype))
    summed = pad_rows(jax.lax.psum(wide, s.comm.axis_names), total + room)
    begins = jnp.array([sum(s.row_counts[:rank]) for rank in range(s.comm.num_ranks)])
    begin = begins[jax.lax.axis_index(s.comm.axis_names)]
    own = jax.lax.dynamic_slice_in_dim(summed, begin, room, axis=-2)
    return real_rows(s, own).astype(gathered.dtype)


# ---- Delayed scales.


class Scales(NamedTuple):
    """Scales of x, w and dy, f32 [1] each; as cotangents, their amaxes."""

    x: Any
    w: Any
    dy: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def use_scales(dy_dtype: str, axes: tuple[str, ...], state: MatmulScaling) -> Scales:
    """Returns the state's scales; their cotangents are amaxes, which give the next state.

    `dy_dtype` is the 8-bit type of the result's gradient. The ranks of `axes` share the state.
    """
    scales = (state.x.scale, state.w.scale, state.dy.scale)
    return Scales(*vary_alike(scales, also=axes))


def _scales_backward(dy_dtype, axes, state: MatmulScaling, amaxes: Scales):
    def next_state(old: DelayedScaling, amax: Array, dtype: str) -> DelayedScaling:
        own = varying_axes(old.scale)
        shared = tuple(a for a in axes if a not in own)
        if shared:  # as integers, since a maximum of floats may drop a NaN
            bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), shared)
            amax = lax.bitcast_convert_type(bits, jnp.float32)
        return old.record(amax[0], dtype=jnp.dtype(dtype))

    return (
        MatmulScaling(
            x=next_state(state.x, amaxes.x, FORWARD_DTYPE),
            w=next_state(state.w, amaxes.w, FORWARD_DTYPE),
            dy=next_state(state.dy, amaxes.dy, dy_dtype),
        ),
    )


use_scales.defvjp(lambda *x: (use_scales(*x), x[2]), _scales_backward)


# ---- Examples of `jax.vmap`, on global arrays.


def _with_examples(run: Callable[..., Any], *, has_dy: bool = False):
    """Returns the same function with support for `jax.vmap`.

    If only x is mapped, the new dimension becomes a batch dimension. If weights are mapped, it is
    the first dimension of all arrays, which `run` recognizes by the dimensions of w. The same holds
    for derivatives, where each example has its own gradient of w. With `has_dy`, the last array is
    the gradient of the result. Arrays after w may be None.
    """

    def call(s, *arrays, **static):
        @custom_vmap
        def mapped(*arrays):
            return run(s, *arrays, **static)

        @mapped.def_vmap
        def _(size, is_mapped, *arrays):
            had_examples = arrays[1].ndim - is_mapped[1] == 3
            of_all = has_dy or had_examples or any(flag is True for flag in is_mapped[1:])
            arrays = [
                a
                if a is None or flag or not (of_all or i == 0)
                else jnp.broadcast_to(a, (size, *a.shape))
                for i, (a, flag) in enumerate(zip(arrays, is_mapped, strict=True))
            ]
            if not had_examples:
                results = call(s, *arrays, **static)
            else:  # two vmaps: all pairs of examples, in order
                join = lambda a: a.reshape(-1, *a.shape[2:])
                split = lambda a: a.reshape(size, -1, *a.shape[1:])
                results = jax.tree.map(split, call(s, *jax.tree.map(join, arrays), **static))
            return results, jax.tree.map(lambda _: True, results)

        return mapped(*arrays)

    return call


_partition_product = _with_examples(partition_product)
_partition_gradients = _with_examples(partition_gradients, has_dy=True)
