"""Checks of scales and their modes, before anything is traced."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch.comm_gemm.scaled.mxfp8 import (
    BLOCK,
    Layout,
    check_blocks,
    padded_shape,
    scales_shape,
)
from jax_cp_dispatch.comm_gemm.scaled.operands import MatmulScaling
from jax_cp_dispatch.comm_gemm.types import ScalingMode


def scales_of_mode(op: str, mode: ScalingMode, scales: Mapping[str, Any]) -> dict[str, Any]:
    """Those of lhs and rhs, which a mode needs both, and NO_SCALING none."""
    given = {name: scale for name, scale in scales.items() if scale is not None}
    if mode == ScalingMode.NO_SCALING and given:
        raise ValueError(
            f"{op}: got {next(iter(given))}_scale_inv with {mode}; scales need another "
            "scaling_mode. Omit it."
        )
    missing = [name for name in scales if name not in given]
    if mode != ScalingMode.NO_SCALING and missing:
        raise ValueError(
            f"{op}: missing inverse scaling factor of {' and '.join(missing)} for {mode}. "
            f"Pass {missing[0]}_scale_inv."
        )
    return given


def check_scales(
    op: str, mode: ScalingMode, layouts: tuple[Layout, Layout], operands: Mapping[str, Any]
) -> None:
    """Every scale that the mode needs is there and has the shape that lhs and rhs ask for.

    `operands` are those of the call by name, lhs and rhs with two dimensions; `layouts` those of
    their blocks.
    """
    scales = {name: operands[f"{name}_scale_inv"] for name in ("lhs", "rhs")}
    given = scales_of_mode(op, mode, scales)
    for (name, scale), layout in zip(given.items(), layouts, strict=False):
        data = operands[name]
        shape, dtype, remedy = (1,), jnp.dtype(jnp.float32), "Pass quantize's scale_inv."
        if mode == ScalingMode.MXFP8_1D_SCALING:
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


def read_scaling(
    op: str, scaling_mode: Any, state: Any, x: Array, w: Array, gathered: str
) -> ScalingMode:
    """The mode, which goes with the state, the operands and what is kept."""
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    is_delayed = mode == ScalingMode.DELAYED_TENSOR_SCALING
    if state is not None and not isinstance(state, MatmulScaling):
        raise TypeError(
            f"{op}: scaling_state is {type(state).__name__}; it needs to be MatmulScaling, as "
            "MatmulScaling.init() begins it."
        )
    if is_delayed != (state is not None):
        raise ValueError(
            f"{op}: got {'no' if is_delayed else 'a'} scaling_state with {mode}; the scales of "
            "earlier steps belong to DELAYED_TENSOR_SCALING. "
            + ("Begin with MatmulScaling.init()." if is_delayed else "Omit it.")
        )
    if mode == ScalingMode.NO_SCALING:
        return mode
    if "float64" in (x.dtype.name, w.dtype.name):
        raise TypeError(
            f"{op}: got float64 with {mode}, of which 8 bits would be left, summed in float32. "
            "Convert it first."
        )
    if gathered == "again":
        raise ValueError(
            f"{op}: got gathered='again' with {mode}; scaled tokens are kept. Omit it, or "
            "recompute with jax.checkpoint."
        )
    return mode


def check_contracted_blocks(op: str, mode: ScalingMode, contracted: int) -> None:
    """What a rank contracts is whole blocks."""
    if mode == ScalingMode.MXFP8_1D_SCALING and contracted % BLOCK:
        raise ValueError(
            f"{op}: {contracted} elements are contracted on a rank, forward or in the derivative, "
            f"where these are the columns of w; {mode} needs a multiple of {BLOCK}, the elements "
            "that share a scale. Pad with zeros."
        )
