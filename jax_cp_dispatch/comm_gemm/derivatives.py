"""Gathered products and scattered sums of products, each in the derivative of the other.

all_gather_matmul:      y = concat_q(x_q) w        dx = reduce_scatter(dy w'),  dw = concat(x)' dy
matmul_reduce_scatter:  y_r = rows r of sum_q x_q w_q    dx = concat(dy) w',  dw = x' concat(dy)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_cp_dispatch.comm_gemm.call import Overlap
from jax_cp_dispatch.comm_gemm.config import CommOverlapMethod, CommOverlapType
from jax_cp_dispatch.comm_gemm.partitioning import (
    partition_gather,
    partition_scatter,
    with_rows,
)
from jax_cp_dispatch.comm_gemm.primitive import bind_gemm
from jax_cp_dispatch.comm_gemm.product import Matmul, gather_rows_of_rank, scatter_rows_of_rank

# Any: type checkers do not see what a partial of it returns.
_with_own_derivative: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))


def gather(s: Matmul, x, w, bias, *, gathers_to_aux: bool):
    """Result [..., sum of the row counts, N], and the gathered x or None."""
    run = gather_rows_of_rank if s.mesh is None else partition_gather
    return run(s, x, w, bias, gathers_to_aux=gathers_to_aux)


def scatter(s: Matmul, x, w, bias):
    """Result [..., largest row count, N], or that of all ranks."""
    return (scatter_rows_of_rank if s.mesh is None else partition_scatter)(s, x, w, bias)


@_with_own_derivative
def gather_again(s: Matmul, x, w, dy):
    """dx and dw where the gathered x was not kept: each GEMM hides one communication.

    x is gathered during dy w', and that is reduce-scattered during x' dy.
    """
    if 0 in (*x.shape, *w.shape):  # jaxlib 0.11 crashes on what has no element
        return jnp.zeros_like(x), jnp.zeros_like(w)
    bulk = lambda kind: Overlap(kind, CommOverlapMethod.BULK)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    call = s.call(
        dy,
        (*dy.shape[:-1], x.shape[-1]),
        wide,
        overlap=bulk(CommOverlapType.AG),
        rhs_transposed=not s.rhs_transposed,
    )
    first = bind_gemm(call, lhs=dy, rhs=w, aux_in=x)
    gathered, partial = first.aux_out, first.output
    lhs, rhs = (dy, gathered) if s.rhs_transposed else (gathered, dy)
    call = s.call(
        lhs,
        w.shape,
        w.dtype,
        overlap=bulk(CommOverlapType.RS),
        rhs_boundary=rhs.ndim - 1,
        lhs_transposed=True,
        rhs_transposed=False,
    )
    second = bind_gemm(call, lhs=lhs, rhs=rhs, aux_in=partial)
    return second.aux_out.astype(x.dtype), second.output


def weight_gradient(s: Matmul, x, dy, w):
    """x' dy, summed over rows and everything before them."""
    lhs, rhs = (dy, x) if s.rhs_transposed else (x, dy)
    rows = tuple(range(x.ndim - 1))
    wide = jnp.promote_types(w.dtype, jnp.float32)
    dw = jax.lax.dot_general(lhs, rhs, ((rows, rows), ((), ())), preferred_element_type=wide)
    return dw.astype(w.dtype)


def bias_gradient(dy, bias):
    if bias is None:
        return None
    wide = jnp.promote_types(dy.dtype, jnp.float32)
    return dy.astype(wide).sum(range(dy.ndim - 1)).astype(bias.dtype)


# ---- Derivatives. A forward rule calls its own function, so that it can be differentiated again.


@_with_own_derivative
def gathered_matmul(s: Matmul, x, w, bias):
    return gather(s, x, w, bias, gathers_to_aux=False)[0]


def _gathered_forward(s: Matmul, x, w, bias):
    if s.keeps_gathered:
        out, gathered = _gathered_and_kept(s, x, w, bias)
        return out, (None, gathered, w, bias)
    return gathered_matmul(s, x, w, bias), (x, None, w, bias)


def _gathered_backward(s: Matmul, residuals, dy):
    x, gathered, w, bias = residuals
    if gathered is None:
        dx, dw = gather_again(s, x, w, dy)
    else:
        dx = scattered_matmul(s.adjoint(gathered.dtype), dy, w, None)
        dw = weight_gradient(s, gathered, dy, w)
    return dx, dw, bias_gradient(dy, bias)


@_with_own_derivative
def _gathered_and_kept(s: Matmul, x, w, bias):
    return gather(s, x, w, bias, gathers_to_aux=True)


def _kept_forward(s: Matmul, x, w, bias):
    out, gathered = _gathered_and_kept(s, x, w, bias)
    return (out, gathered), (gathered, w, bias)


def _kept_backward(s: Matmul, residuals, cotangents):
    gathered, w, bias = residuals
    dy, dgathered = cotangents
    dx = scattered_matmul(s.adjoint(gathered.dtype), dy, w, None) + _sum_to_ranks(s, dgathered)
    return dx, weight_gradient(s, gathered, dy, w), bias_gradient(dy, bias)


@_with_own_derivative
def scattered_matmul(s: Matmul, x, w, bias):
    return scatter(s, x, w, bias)


def _scattered_forward(s: Matmul, x, w, bias):
    return scattered_matmul(s, x, w, bias), (x, w, bias)


def _scattered_backward(s: Matmul, residuals, dy):
    x, w, bias = residuals
    dx, gathered = _gathered_and_kept(s.adjoint(x.dtype), dy, w, None)
    return dx, weight_gradient(s, x, gathered, w), bias_gradient(_real_rows(s, dy), bias)


def _again_forward(s: Matmul, x, w, dy):
    return gather_again(s, x, w, dy), (x, w, dy)


def _again_backward(s: Matmul, residuals, cotangents):
    # dx = reduce_scatter(dy w') and dw = concat(x)' dy, each linear in both of its operands.
    x, w, dy = residuals
    of_dx, of_dw = cotangents
    more = lambda x, w: gathered_matmul(s, x, w, None)
    return *gather_again(s, of_dx, of_dw, dy), more(of_dx, w) + more(x, of_dw)


def _sum_to_ranks(s: Matmul, gathered):
    """Of the gathered rows, summed over ranks, each rank's own: only of second derivatives."""
    room, total = max(s.row_counts), sum(s.row_counts)
    if s.mesh is not None:
        return with_rows(gathered, s.num_ranks * room)
    wide = gathered.astype(jnp.promote_types(gathered.dtype, jnp.float32))
    summed = with_rows(jax.lax.psum(wide, s.axis_names), total + room)
    begins = jnp.array([sum(s.row_counts[:rank]) for rank in range(s.num_ranks)])
    begin = begins[jax.lax.axis_index(s.axis_names)]
    own = jax.lax.dynamic_slice_in_dim(summed, begin, room, axis=-2)
    return _real_rows(s, own).astype(gathered.dtype)


def _real_rows(s: Matmul, dy):
    """Without what stands in the room of a rank with fewer rows."""
    if s.mesh is not None or min(s.row_counts) == max(s.row_counts):
        return dy
    count = jnp.array(s.row_counts)[jax.lax.axis_index(s.axis_names)]
    return jnp.where(jnp.arange(dy.shape[-2])[:, None] < count, dy, 0)


gathered_matmul.defvjp(_gathered_forward, _gathered_backward)
scattered_matmul.defvjp(_scattered_forward, _scattered_backward)
_gathered_and_kept.defvjp(_kept_forward, _kept_backward)
gather_again.defvjp(_again_forward, _again_backward)
