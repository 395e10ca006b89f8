"""Checks scales and their modes, before anything is traced."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch.comm_gemm.scaled.mxfp8 import (
    BLOCK,
    BlockLayout,
    check_blocks,
    padded_shape,
    scales_shape,
)
from jax_cp_dispatch.comm_gemm.scaled.scaled_operands import MatmulScaling
from jax_cp_dispatch.comm_gemm.types import ScalingMode


def required_scales(op: str, mode: ScalingMode, scales: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scales of lhs and rhs: both for a scaling mode, none for NO_SCALING."""
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
    op: str,
    mode: ScalingMode,
    layouts: tuple[BlockLayout, BlockLayout],
    operands: Mapping[str, Any],
) -> None:
    """Requires the scales of the mode, in the shapes that match lhs and rhs.

    `operands` are the call's operands by name, with two-dimensional lhs and rhs; `layouts` are the
    layouts of their blocks.
    """
    scales = {name: operands[f"{name}_scale_inv"] for name in ("lhs", "rhs")}
    given = required_scales(op, mode, scales)
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
    """Returns the mode; it must match the state, the operands and the kept arrays."""
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    is_delayed = mode == ScalingMode.DELAYED_TENSOR_SCALING
    if state is not None and not isinstance(state, MatmulScaling):
        raise TypeError(
            f"{op}: scaling_state is {type(state).__name__}; it needs to be MatmulScaling. Start "
            "with MatmulScaling.init()."
        )
    if is_delayed != (state is not None):
        raise ValueError(
            f"{op}: got {'no' if is_delayed else 'a'} scaling_state with {mode}; only "
            "DELAYED_TENSOR_SCALING uses the scales of earlier steps. "
            + ("Begin with MatmulScaling.init()." if is_delayed else "Omit it.")
        )
    if mode == ScalingMode.NO_SCALING:
        return mode
    if "float64" in (x.dtype.name, w.dtype.name):
        raise TypeError(
            f"{op}: got float64 with {mode}, which would reduce it to 8 bits, summed in float32. "
            "Convert it first."
        )
    if gathered == "again":
        raise ValueError(
            f"{op}: got gathered='again' with {mode}; scaled tokens are kept. Omit it, or "
            "recompute with jax.checkpoint."
        )
    return mode


def check_contracted_blocks(op: str, mode: ScalingMode, contracted: int) -> None:
    """Requires that a rank contracts whole blocks."""
    if mode == ScalingMode.MXFP8_1D_SCALING and contracted % BLOCK:
        raise ValueError(
            f"{op}: {contracted} elements are contracted on a rank, in the forward pass or in the "
            f"derivative (columns of w); {mode} needs a multiple of {BLOCK}, the elements that "
            "share a scale. Pad with zeros."
        )
