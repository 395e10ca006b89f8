"""8-bit operands of matmuls: quantization of x, w and dy, and its state."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._ranks.varying import vary_alike, varying_axes
from jax_cp_dispatch.comm_gemm.scaled.mxfp8 import (
    pad_scales,
    scales_shape,
    unpad_scales,
    unswizzle_scales,
)
from jax_cp_dispatch.comm_gemm.scaled.quantize import (
    DelayedScaling,
    Leaf,
    Quantized,
    dequantize,
    largest_magnitude,
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
