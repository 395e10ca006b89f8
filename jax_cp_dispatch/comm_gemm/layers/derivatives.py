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
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch._residuals import named_gathered_tokens
from jax_cp_dispatch.comm_gemm.layers.partitioning import (
    constrain_weight,
    partition_gather,
    partition_gather_again,
    partition_scatter,
    with_rows,
)
from jax_cp_dispatch.comm_gemm.layers.rank import (
    Matmul,
    gather_rows,
    gather_rows_again,
    real_rows,
    scatter_rows,
)
from jax_cp_dispatch.comm_gemm.layers.token_axes import keeps_token_axes, split_like
from jax_cp_dispatch.comm_gemm.scaled.scaled_operands import (
    Scales,
    check_contracted_blocks,
    tensor_amax,
)
from jax_cp_dispatch.comm_gemm.types import CommOverlapType


def _with_examples(run: Callable[..., Any], *, has_dy: bool = False):
    """Returns the same function with support for `jax.vmap`.

    If only x is mapped, the new dimension becomes a batch dimension. If weights are mapped, it is
    the first dimension of all arrays, which `run` recognizes by the dimensions of w. The same holds
    for derivatives, where each example has its own gradient of w.

    Args:
      run: function of static parts, x, w and other arrays, some of which may be None.
      has_dy: the last array is the gradient of the result.
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
                a if a is None or flag or not (of_all or i == 0) else _repeated(size, a)
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


def _repeated(size: int, array):
    return jnp.broadcast_to(array, (size, *array.shape))


_partition_gather = _with_examples(partition_gather)
_partition_scatter = _with_examples(partition_scatter)
_partition_gather_again = _with_examples(partition_gather_again, has_dy=True)
# Any, because type checkers do not know what a partial of it returns.
_with_own_derivative: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))


def gather(s: Matmul, x, w, bias, scales, *, gathers_to_aux: bool):
    """Result [..., sum of the row counts, N], and the gathered x or None."""
    run = gather_rows if s.mesh is None else _partition_gather
    if s.is_scaled:
        x = real_rows(s, x)
    return run(s, x, s.join(w), bias, _pair(scales), gathers_to_aux=gathers_to_aux)


def scatter(s: Matmul, x, w, bias, scales):
    """Result [..., largest row count, N], or that of all ranks."""
    run = scatter_rows if s.mesh is None else _partition_scatter
    return run(s, x, s.join(w), bias, _pair(scales))


def _pair(scales: Scales | None):
    """Returns the scales of x and w as one array."""
    return None if scales is None else jnp.concatenate([scales.x, scales.w])


@_with_own_derivative
def gather_again(s: Matmul, x, w, dy):
    """Returns dx and dw if the gathered x was not kept."""
    run = gather_rows_again if s.mesh is None else _partition_gather_again
    dx, dw = run(s, x, s.join(w), dy)
    return dx, s.split(dw, w)


def weight_gradient(s: Matmul, x, dy, w):
    """Returns x' dy, summed over rows and batches, for each weight."""
    if 0 in (*x.shape, *dy.shape):  # XLA fails where all operands of a shard_map are empty
        return tuple(vary_like(map(jnp.zeros_like, w), dy))
    lhs, rhs = (dy, x) if s.rhs_transposed else (x, dy)
    rows = tuple(range(x.ndim - 1))
    wide = sum_dtype(w[0].dtype)
    dw = jax.lax.dot_general(lhs, rhs, ((rows, rows), ((), ())), preferred_element_type=wide)
    if s.mesh is not None:
        dw = constrain_weight(s, dw)
    return s.split(dw.astype(w[0].dtype), w)


def _split_as(s: Matmul, dy, other):
    """Returns dy (possibly a constant) with batch and tokens sharded as in the forward pass."""
    if s.mesh is None or not keeps_token_axes(s, other):
        return dy
    return split_like(dy, other, dy.ndim - 1)


def bias_gradient(dy, bias):
    if bias is None:
        return None
    wide = sum_dtype(dy.dtype)
    return dy.astype(wide).sum(range(dy.ndim - 1)).astype(bias.dtype)


# ---- Derivatives. A forward rule calls its own function, so that it can be differentiated again.


@_with_own_derivative
def gathered_matmul(s: Matmul, x, w, bias, scales):
    return gather(s, x, w, bias, scales, gathers_to_aux=False)[0]


def _gathered_forward(s: Matmul, x, w, bias, scales):
    amaxes = _amaxes(s, real_rows(s, x), w, scales)
    if s.keeps_gathered:
        out, gathered = _gathered_and_kept(s, x, w, bias, scales)
        return out, (None, named_gathered_tokens(gathered), w, bias, scales, amaxes)
    return gathered_matmul(s, x, w, bias, scales), (x, None, w, bias, scales, amaxes)


def _gathered_backward(s: Matmul, residuals, dy):
    x, gathered, w, bias, scales, amaxes = residuals
    if gathered is None:
        dx, dw = gather_again(s, x, w, _split_as(s, dy, x))
    else:
        dy = _split_as(s, dy, gathered)
        dx = scattered_matmul(_adjoint(s, w, gathered.dtype), dy, w, None, _adjoint_scales(scales))
        dw = weight_gradient(s, gathered, dy, w)
    return dx, dw, bias_gradient(dy, bias), _with_amax(amaxes, dy)


@_with_own_derivative
def _gathered_and_kept(s: Matmul, x, w, bias, scales):
    return gather(s, x, w, bias, scales, gathers_to_aux=True)


def _kept_forward(s: Matmul, x, w, bias, scales):
    out, gathered = _gathered_and_kept(s, x, w, bias, scales)
    amaxes = _amaxes(s, real_rows(s, x), w, scales)
    return (out, gathered), (gathered, w, bias, scales, amaxes)


def _kept_backward(s: Matmul, residuals, cotangents):
    gathered, w, bias, scales, amaxes = residuals
    dy, dgathered = cotangents
    dx = scattered_matmul(_adjoint(s, w, gathered.dtype), dy, w, None, _adjoint_scales(scales))
    dw = weight_gradient(s, gathered, dy, w)
    dx = dx + _sum_to_ranks(s, dgathered)
    return dx, dw, bias_gradient(dy, bias), _with_amax(amaxes, dy)


@_with_own_derivative
def scattered_matmul(s: Matmul, x, w, bias, scales):
    return scatter(s, x, w, bias, scales)


def _scattered_forward(s: Matmul, x, w, bias, scales):
    return scattered_matmul(s, x, w, bias, scales), (x, w, bias, scales, _amaxes(s, x, w, scales))


def _scattered_backward(s: Matmul, residuals, dy):
    x, w, bias, scales, amaxes = residuals
    dy = _split_as(s, real_rows(s, dy), x)
    dx, gathered = _gathered_and_kept(_adjoint(s, w, x.dtype), dy, w, None, _adjoint_scales(scales))
    dw = weight_gradient(s, x, gathered, w)
    return dx, dw, bias_gradient(dy, bias), _with_amax(amaxes, dy)


# ---- Delayed scales, whose cotangents are the amaxes of x, w and dy: see `use_scales`.


def _adjoint(s: Matmul, w, dtype) -> Matmul:
    """Returns the matmul that computes dx; it contracts the columns of w, which may be sharded."""
    splits_columns = s.mesh is not None and s.overlap.comm_type == CommOverlapType.AG
    columns = sum(map(s.num_columns, w)) // (s.comm.num_ranks if splits_columns else 1)
    check_contracted_blocks(s.op, s.scaling_mode, columns)
    return s.adjoint(dtype)


def _adjoint_scales(scales: Scales | None) -> Scales | None:
    return None if scales is None else scales.of_adjoint()


def _amaxes(s: Matmul, x, w, scales: Scales | None):
    return None if scales is None else (tensor_amax(x), tensor_amax(s.join(w)))


def _with_amax(amaxes, dy):
    return None if amaxes is None else Scales(x=amaxes[0], w=amaxes[1], dy=tensor_amax(dy))


def _again_forward(s: Matmul, x, w, dy):
    return gather_again(s, x, w, dy), (x, w, dy)


def _again_backward(s: Matmul, residuals, cotangents):
    # dx = reduce_scatter(dy w') and dw = concat(x)' dy, each linear in both of its operands.
    x, w, dy = residuals
    of_dx, of_dw = cotangents
    more = lambda x, w: gathered_matmul(s, x, w, bias=None, scales=None)
    dx, dw = gather_again(s, of_dx, of_dw, dy)
    return dx, dw, more(of_dx, w) + more(x, of_dw)


def _sum_to_ranks(s: Matmul, gathered):
    """Sums gathered rows over ranks and returns each rank's own; only for second derivatives."""
    room, total = max(s.row_counts), sum(s.row_counts)
    if s.mesh is not None:
        return with_rows(gathered, s.comm.num_ranks * room)
    wide = gathered.astype(sum_dtype(gathered.dtype))
    summed = with_rows(jax.lax.psum(wide, s.comm.axis_names), total + room)
    begins = jnp.array([sum(s.row_counts[:rank]) for rank in range(s.comm.num_ranks)])
    begin = begins[jax.lax.axis_index(s.comm.axis_names)]
    own = jax.lax.dynamic_slice_in_dim(summed, begin, room, axis=-2)
    return real_rows(s, own).astype(gathered.dtype)


gathered_matmul.defvjp(_gathered_forward, _gathered_backward)
scattered_matmul.defvjp(_scattered_forward, _scattered_backward)
_gathered_and_kept.defvjp(_kept_forward, _kept_backward)
gather_again.defvjp(_again_forward, _again_backward)
