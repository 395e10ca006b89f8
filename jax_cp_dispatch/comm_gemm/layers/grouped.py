"""A grouped gemm and its derivative: grouped gemms again, of transposed operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_cp_dispatch._ranks.varying import vary_alike, vary_like
from jax_cp_dispatch.comm_gemm.engine.grouped import GroupedCall, grouped_gemm_p


def bind_grouped(call: GroupedCall, lhs, rhs, bias, group_sizes, scales=(None, None)):
    """Binds one call; `scales` are those of lhs and rhs."""
    nothing = jnp.zeros(1, jnp.float32)
    bias = nothing if bias is None else bias.astype(call.out_dtype)
    of_lhs, of_rhs = (nothing if x is None else jnp.asarray(x) for x in scales)
    if 0 in (*lhs.shape, *rhs.shape, *group_sizes.shape):  # jaxlib 0.11 crashes on no elements
        return vary_like([_of_nothing(call, lhs, rhs, bias, group_sizes)], lhs)[0]
    operands = vary_alike([lhs, of_lhs, rhs, of_rhs, bias, group_sizes])
    return grouped_gemm_p.bind(*operands, call=call)


def _of_nothing(call: GroupedCall, lhs, rhs, bias, group_sizes):
    """Returns empty sums, plus the bias of existing rows."""
    shape = call.out_shape(lhs, rhs, group_sizes)
    if not call.fuse_bias or 0 in shape or not group_sizes.shape[0]:
        return jnp.zeros(shape, call.out_dtype)
    of_rows = jnp.repeat(bias, group_sizes, axis=0, total_repeat_length=shape[0])
    return jnp.where(jnp.arange(shape[0])[:, None] < group_sizes.sum(), of_rows, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gemm_of_groups(call: GroupedCall, lhs, rhs, bias, group_sizes) -> Any:
    return bind_grouped(call, lhs, rhs, bias, group_sizes)


def _forward(call, lhs, rhs, bias, group_sizes):
    return gemm_of_groups(call, lhs, rhs, bias, group_sizes), (
        lhs,
        rhs,
        bias,
        group_sizes,
    )


def _backward(call: GroupedCall, residuals, dy):
    lhs, rhs, bias, sizes = residuals

    def product(a, b, like, *, contracts_rows=False, rhs_transposed=False) -> Any:
        form = call.replace(
            contracts_rows=contracts_rows,
            rhs_transposed=rhs_transposed,
            out_dtype=like.dtype.name,
            fuse_bias=False,
        )
        return gemm_of_groups(form, a, b, None, sizes)

    if call.contracts_rows:  # dy [G, K, N]
        dlhs = product(rhs, dy, lhs, rhs_transposed=True)
        drhs = product(lhs, dy, rhs)
        return dlhs, drhs, None, None
    dlhs = product(dy, rhs, lhs, rhs_transposed=not call.rhs_transposed)
    of_rhs = (dy, lhs) if call.rhs_transposed else (lhs, dy)
    drhs = product(*of_rhs, rhs, contracts_rows=True)
    dbias = None
    if bias is not None:
        ones = jnp.ones((lhs.shape[0], 1), dy.dtype)
        dbias = product(ones, dy, bias, contracts_rows=True)[:, 0]
    return dlhs, drhs, dbias, None


gemm_of_groups.defvjp(_forward, _backward)
