"""Checks of narrow operands and their scales, before anything is traced."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch.comm_gemm.buffers.config import BYTE_FLOATS, FLOATS, ScalingMode
from jax_cp_dispatch.comm_gemm.engine.call import GemmCall
from jax_cp_dispatch.comm_gemm.scaled.mxfp8 import check_blocks, padded_shape, scales_shape


def check_operand_types(op: str, lhs: Array, rhs: Array, mode: ScalingMode) -> None:
    """The types go together, and with the mode."""
    if all(x.dtype.name == "float8_e5m2" for x in (lhs, rhs)):
        raise ValueError(
            f"{op}: got float8_e5m2 for lhs and rhs; at least one needs to be float8_e4m3fn. "
            "Quantize it to that."
        )
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        is_scaled = mode != ScalingMode.NO_SCALING
        allowed = BYTE_FLOATS if is_scaled else FLOATS
        if array.dtype.name in allowed:
            continue
        other = array.dtype.name in BYTE_FLOATS + FLOATS
        remedy = "Quantize it first" if is_scaled else "Pass its scaling_mode and inverse scale"
        raise TypeError(
            f"{op}: {name} is {array.dtype} with {mode}; it needs to be one of {allowed}."
            + (f" {remedy}." if other else "")
        )
    if (lhs.dtype.name == "float64") != (rhs.dtype.name == "float64"):
        raise TypeError(
            f"{op}: lhs is {lhs.dtype} and rhs {rhs.dtype}; float64 goes with float64 alone. "
            "Convert one."
        )


def scales_of_mode(op: str, mode: ScalingMode, scales: Mapping[str, Any]) -> dict[str, Any]:
    """Those of lhs and rhs, which a mode needs both, and NO_SCALING none."""
    given = {name: scale for name, scale in scales.items() if scale is not None}
    if mode == ScalingMode.NO_SCALING and given:
        raise ValueError(
            f"{op}: got {next(iter(given))}_scale_inv with {mode}; scales need another "
            "scaling_mode. Leave it away."
        )
    missing = [name for name in scales if name not in given]
    if mode != ScalingMode.NO_SCALING and missing:
        raise ValueError(
            f"{op}: missing inverse scaling factor of {' and '.join(missing)} for {mode}. "
            f"Pass {missing[0]}_scale_inv."
        )
    return given


def check_scales(op: str, call: GemmCall, operands: Mapping[str, Any]) -> None:
    """Every scale that the mode needs is there and has the shape that lhs and rhs ask for.

    `operands` are those of the call by name, lhs and rhs with two dimensions.
    """
    mode = call.scaling_mode
    scales = {name: operands[f"{name}_scale_inv"] for name in ("lhs", "rhs")}
    given = scales_of_mode(op, mode, scales)
    for (name, scale), layout in zip(given.items(), call.scale_layouts, strict=False):
        data = operands[name]
        shape, dtype, remedy = (1,), jnp.dtype(jnp.float32), "Pass quantize's scale_inv."
        if call.is_mxfp8:
            rows, columns = data.shape
            check_blocks(op, name, data.shape, layout)
            shape, dtype = padded_shape((rows, columns), layout), jnp.dtype(jnp.uint8)
            is_unpadded = scale.shape == scales_shape((rows, columns), layout)
            what = "These are unpadded: call" if is_unpadded else "Pass"
            remedy = f"{what} pad_scales(q.scale_inv, layout={layout!r})."
        if (scale.shape, scale.dtype) != (shape, dtype):
            raise ValueError(
                f"{op}: {name}_scale_inv is {scale.dtype}{list(scale.shape)}; {mode} with {name} "
                f"of shape {data.shape} needs {dtype}{list(shape)}. {remedy}"
            )
