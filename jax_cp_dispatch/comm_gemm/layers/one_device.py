"""A gemm that does not communicate, and its derivative: gemms again, of transposed operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.varying import vary_alike, whole_on_explicit_axes
from jax_cp_dispatch.comm_gemm.engine.by_xla import dequantized_operands
from jax_cp_dispatch.comm_gemm.engine.gemm_call import GemmCall, GemmOperands, GemmResults
from jax_cp_dispatch.comm_gemm.engine.primitive import bind_gemm
from jax_cp_dispatch.comm_gemm.layers.derivatives import bias_gradient
from jax_cp_dispatch.comm_gemm.types import ScalingMode


def gemm_on_one_device(call: GemmCall, **operands: Any) -> GemmResults:
    """Computes a call without communication from the operands that are not None.

    Differentiable without scales and without `grad`.
    """
    given = {name: x for name, x in operands.items() if x is not None}
    whole = whole_on_explicit_axes(given.values())
    arrays: Any = dict(zip(given, vary_alike(whole), strict=True))
    absent = GemmResults(*[None] * 7)
    if 0 in (*arrays["lhs"].shape, *arrays["rhs"].shape):
        return _empty_sum(call, GemmOperands.of(arrays))
    if call.scaling_mode != ScalingMode.NO_SCALING or call.grad:
        return bind_gemm(call, **arrays)
    bias = arrays.get("bias")
    if call.fuse_gelu:
        both: Any = _with_gelu(call, arrays["lhs"], arrays["rhs"], bias)
        return absent._replace(output=both[0], pre_gelu_out=both[1])
    return absent._replace(output=_gemm(call, arrays["lhs"], arrays["rhs"], bias))


def _empty_sum(call: GemmCall, operands: GemmOperands) -> GemmResults:
    """Returns empty sums, since jaxlib 0.11 crashes on empty arrays."""
    output = jnp.zeros(call.out_shape, call.out_dtype)
    results = GemmResults(output, *[None] * 6)
    if call.grad and call.fuse_bias:
        _, values = dequantized_operands(call, operands)
        sums = output.sum(0) if call.fuse_gelu else values.sum(1 if call.rhs_transposed else 0)
        return results._replace(bias_grad=sums.astype(call.out_dtype))
    if operands.bias is not None:
        output = output + operands.bias[None].astype(output.dtype)
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
    return _gemm_backward(call.replace(fuse_gelu=False), (lhs, rhs, bias), dy)


_with_gelu.defvjp(_with_gelu_forward, _with_gelu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gemm(call: GemmCall, lhs, rhs, bias) -> jax.Array:
    return bind_gemm(call, lhs=lhs, rhs=rhs, bias=bias).output


def _gemm_forward(call, lhs, rhs, bias):
    return _gemm(call, lhs, rhs, bias), (lhs, rhs, bias)


def _gemm_backward(call: GemmCall, residuals, dy):
    lhs, rhs, bias = residuals

    def product(like, left, right, *, lhs_transposed, rhs_transposed):
        form = call.replace(
            fuse_bias=False,
            lhs_transposed=lhs_transposed,
            rhs_transposed=rhs_transposed,
            out_shape=like.shape,
            out_dtype=like.dtype.name,
        )
        return _gemm(form, left, right, None)

    # dlhs = dy rhs', or its transpose rhs dy'; drhs = lhs' dy, or dy' lhs.
    of_lhs = {"lhs_transposed": False, "rhs_transposed": not call.rhs_transposed}
    pair = dy, rhs
    if call.lhs_transposed:
        of_lhs = {"lhs_transposed": call.rhs_transposed, "rhs_transposed": True}
        pair = rhs, dy
    dlhs = product(lhs, *pair, **of_lhs)
    of_rhs = {"lhs_transposed": not call.lhs_transposed, "rhs_transposed": False}
    pair = lhs, dy
    if call.rhs_transposed:
        of_rhs = {"lhs_transposed": True, "rhs_transposed": call.lhs_transposed}
        pair = dy, lhs
    drhs = product(rhs, *pair, **of_rhs)
    return dlhs, drhs, bias_gradient(dy, bias)


_gemm.defvjp(_gemm_forward, _gemm_backward)
