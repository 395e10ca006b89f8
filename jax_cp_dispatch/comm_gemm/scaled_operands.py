"""8-bit operands of matmuls: quantization of x, w and dy, and its state."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._ranks.options import vary_alike, varying_axes
from jax_cp_dispatch.comm_gemm.quantize import (
    BLOCK,
    BlockLayout,
    DelayedScaling,
    Leaf,
    Quantized,
    check_blocks,
    dequantize,
    largest_magnitude,
    pad_scales,
    padded_shape,
    scales_shape,
    unpad_scales,
    unswizzle_scales,
)
from jax_cp_dispatch.comm_gemm.types import ScalingMode

FORWARD_DTYPE = "float8_e4m3fn"


def gradient_dtype(mode: ScalingMode) -> str:
    """Returns the type of gradients; they need range rather than precision, except in MXFP8."""
    return FORWARD_DTYPE if mode == ScalingMode.MXFP8_1D_SCALING else "float8_e5m2"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MatmulScaling:
    """The state of DELAYED_TENSOR_SCALING of one matmul, the same on all ranks.

    The gradient of a loss with respect to it is not a derivative but the state for the next step,
    because only the backward pass sees dy. Replace the old state with it, and exclude it from
    optimizers.

    Attributes:
      x, w, dy: states of the operands and of the result's gradient.
    """

    x: Leaf
    w: Leaf
    dy: Leaf

    @classmethod
    def init(cls) -> "MatmulScaling":
        """Returns the state before the first step: no history, scales 1."""
        return cls(x=DelayedScaling.init(), w=DelayedScaling.init(), dy=DelayedScaling.init())


class Scales(NamedTuple):
    """Scales of x, w and dy, f32 [1] each; as cotangents, their amaxes."""

    x: Any
    w: Any
    dy: Any

    def of_adjoint(self) -> "Scales":
        """Scales of the product dy w', whose own derivative multiplies a tensor like x."""
        return Scales(*map(lax.stop_gradient, (self.dy, self.w, self.x)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def use_scales(mode: ScalingMode, axes: tuple[str, ...], state: MatmulScaling) -> Scales:
    """Returns the state's scales; their cotangents are amaxes, which give the next state.

    `axes` are the mesh axes whose ranks share the state.
    """
    scales = (state.x.scale, state.w.scale, state.dy.scale)
    return Scales(*vary_alike(scales, also=axes))


def _scales_forward(mode, axes, state):
    return use_scales(mode, axes, state), state


def _scales_backward(mode, axes, state: MatmulScaling, amaxes: Scales):
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
            dy=next_state(state.dy, amaxes.dy, gradient_dtype(mode)),
        ),
    )


use_scales.defvjp(_scales_forward, _scales_backward)


def tensor_amax(x: Array) -> Array:
    return largest_magnitude(x)[None]


class ScaledOperands(NamedTuple):
    """x [..., T, K] and w [K, N] or [N, K] as 8 bits.

    Attributes:
      x, w: with two dimensions, those before the last collapsed.
      x_shape: that of x.
    """

    x: Quantized
    w: Quantized
    x_shape: tuple[int, ...]

    def operands(self) -> dict[str, Array]:
        """Returns the operands by name, as a gemm takes them."""
        return {
            "lhs": self.x.data.reshape(self.x_shape),
            "lhs_scale_inv": _padded(self.x),
            "rhs": self.w.data,
            "rhs_scale_inv": _padded(self.w),
        }

    def values(self, dtype: Any) -> tuple[Array, Array]:
        """Returns the dequantized operands."""
        return dequantize(self.x, dtype).reshape(self.x_shape), dequantize(self.w, dtype)


def dequantize_gathered(gathered: Array, tiles: Array | None, x: Quantized, dtype: Any) -> Array:
    """Dequantizes gathered data [..., M, K]; `tiles` are the swizzled scales of MXFP8."""
    rows_of_all = flat(gathered)
    scale_inv = x.scale_inv
    if tiles is not None:
        rows, columns = rows_of_all.shape
        shape = scales_shape((rows, columns), "row")
        scale_inv = unpad_scales(unswizzle_scales(tiles), shape=shape)
    whole = dataclasses.replace(x, data=rows_of_all, scale_inv=scale_inv)
    return dequantize(whole, dtype).reshape(gathered.shape)


def flat(x: Array) -> Array:
    """Collapses the dimensions before the last."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _padded(q: Quantized) -> Array:
    if q.mode != ScalingMode.MXFP8_1D_SCALING:
        return q.scale_inv
    return pad_scales(q.scale_inv, layout=q.layout)


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
