"""A product on one device, and its derivative: products again, of transposed operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_cp_dispatch._dtypes import sum_dtype
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.comm_gemm.buffers.config import ScalingMode
from jax_cp_dispatch.comm_gemm.engine.by_xla import values_of_operands
from jax_cp_dispatch.comm_gemm.engine.call import GemmCall, GemmOperands, GemmResults
from jax_cp_dispatch.comm_gemm.engine.primitive import bind_gemm
from jax_cp_dispatch.comm_gemm.layers.derivatives import bias_gradient


def plain_product(call: GemmCall, **operands: Any) -> GemmResults:
    """Results of a call without communication, from the operands that are not None.

    Differentiable without scales and without `grad`.
    """
    given = {name: x for name, x in operands.items() if x is not None}
    arrays: Any = dict(zip(given, vary_alike(given.values()), strict=True))
    absent = GemmResults(*[None] * 7)
    if 0 in (*arrays["lhs"].shape, *arrays["rhs"].shape):
        return _of_nothing(call, **arrays)
    if call.scaling_mode != ScalingMode.NO_SCALING or call.grad:
        return bind_gemm(call, **arrays)
    bias = arrays.get("bias")
    if call.fuse_gelu:
        both: Any = _with_gelu(call, arrays["lhs"], arrays["rhs"], bias)
        return absent._replace(output=both[0], pre_gelu_out=both[1])
    return absent._replace(output=_product(call, arrays["lhs"], arrays["rhs"], bias))


def _of_nothing(
    call: GemmCall, *, lhs, rhs, bias=None, lhs_scale_inv=None, rhs_scale_inv=None, gelu_input=None
) -> GemmResults:
    """Sums of nothing: jaxlib 0.11 crashes on what has no element."""
    output = jnp.zeros(call.out_shape, call.out_dtype)
    results = GemmResults(output, *[None] * 6)
    if call.grad and call.fuse_bias:
        operands = GemmOperands(lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, None, None)
        _, values = values_of_operands(call, operands)
        sums = output.sum(0) if call.fuse_gelu else values.sum(1 if call.rhs_transposed else 0)
        return results._replace(bias_grad=sums.astype(call.out_dtype))
    if bias is not None:
        output = output + bias[None].astype(output.dtype)
    if call.fuse_gelu and not call.grad:
        return results._replace(output=jax.nn.gelu(output), pre_gelu_out=output)
    return results._replace(output=output)


def _gelu_call(call: GemmCall, lhs, rhs, bias):
    results = bind_gemm(call, lhs=lhs, rhs=rhs, bias=bias)
    return results.output, results.pre_gelu_out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gelu(call: GemmCall, lhs, rhs, bias) -> Any:
    return _gelu_call(call, lhs, rhs, bias)


def _with_gelu_forward(call, lhs, rhs, bias):
    both: Any = _with_gelu(call, lhs, rhs, bias)
    return both, (lhs, rhs, bias, both[1])


def _with_gelu_backward(call: GemmCall, residuals, cotangents):
    lhs, rhs, bias, pre_gelu = residuals
    doutput, dpre_gelu = cotangents
    wide = sum_dtype(pre_gelu.dtype)
    _, pull = jax.vjp(jax.nn.gelu, pre_gelu.astype(wide))
    dy = (pull(doutput.astype(wide))[0] + dpre_gelu.astype(wide)).astype(pre_gelu.dtype)
    return _product_backward(call.replace(fuse_gelu=False), (lhs, rhs, bias), dy)


_with_gelu.defvjp(_with_gelu_forward, _with_gelu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: GemmCall, lhs, rhs, bias) -> jax.Array:
    return bind_gemm(call, lhs=lhs, rhs=rhs, bias=bias).output


def _product_forward(call, lhs, rhs, bias):
    return _product(call, lhs, rhs, bias), (lhs, rhs, bias)


def _product_backward(call: GemmCall, residuals, dy):
    lhs, rhs, bias = residuals
    plain = functools.partial(call.replace, fuse_bias=False)
    # dlhs = dy rhs', or its transpose rhs dy'; drhs = lhs' dy, or dy' lhs.
    if call.lhs_transposed:
        of_lhs = plain(lhs_transposed=call.rhs_transposed, rhs_transposed=True)
        dlhs = _product(
            of_lhs.replace(out_shape=lhs.shape, out_dtype=lhs.dtype.name), rhs, dy, None
        )
    else:
        of_lhs = plain(lhs_transposed=False, rhs_transposed=not call.rhs_transposed)
        dlhs = _product(
            of_lhs.replace(out_shape=lhs.shape, out_dtype=lhs.dtype.name), dy, rhs, None
        )
    if call.rhs_transposed:
        of_rhs = plain(lhs_transposed=True, rhs_transposed=call.lhs_transposed)
        drhs = _product(
            of_rhs.replace(out_shape=rhs.shape, out_dtype=rhs.dtype.name), dy, lhs, None
        )
    else:
        of_rhs = plain(lhs_transposed=not call.lhs_transposed, rhs_transposed=False)
        drhs = _product(
            of_rhs.replace(out_shape=rhs.shape, out_dtype=rhs.dtype.name), lhs, dy, None
        )
    return dlhs, drhs, bias_gradient(dy, bias)


_product.defvjp(_product_forward, _product_backward)
