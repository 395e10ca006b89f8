"""Operands of 8 bits: `quantize`, `dequantize`, and the state of delayed scaling."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jax_cp_dispatch.comm_gemm.scaled.mxfp8 import (
    Layout,
    block_scales,
    check_blocks,
    check_layout,
    divide_by_scales,
    magnitude_bits,
    multiply_by_scales,
    scales_shape,
)
from jax_cp_dispatch.comm_gemm.types import ScalingMode

# An array; or whatever a transformation maps over the leaves.
Leaf: TypeAlias = Any

_TYPES = jnp.float8_e4m3fn, jnp.float8_e5m2  # largest: 448 and 57344
_HISTORY = 1024
_LARGEST_SCALE = 2.0**126  # its inverse is the smallest normal float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """An operand of 8 bits and its scales; its value is data times scale.

    Attributes:
      data: float8_e4m3fn or float8_e5m2, in the shape of the operand.
      scale_inv: f32 `[1]` for tensor scaling; for MXFP8 e8m0 bytes, u8, `[M, K / 32]` for layout
        "row" and `[K / 32, N]` for "column": byte b stands for 2**(b - 127), 255 for NaN.
      mode: how it is scaled (static).
      layout: along which dimension MXFP8's blocks lie; nothing to tensor scaling (static).
    """

    data: Leaf
    scale_inv: Leaf
    mode: ScalingMode = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(default="row", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DelayedScaling:
    """What DELAYED_TENSOR_SCALING carries from step to step, for one tensor.

    Attributes:
      amax_history: f32 `[1024]`; largest magnitudes of the last steps, the newest first.
      scale: f32 `[1]`; what `quantize` multiplies with in the next step.
    """

    amax_history: Leaf
    scale: Leaf

    @classmethod
    def init(cls) -> "DelayedScaling":
        """The state before the first step: no history, scale 1."""
        return cls(amax_history=jnp.zeros(_HISTORY, jnp.float32), scale=jnp.ones(1, jnp.float32))

    def update(
        self,
        x: Float[Array, "..."],
        *,
        dtype: Any = jnp.float8_e4m3fn,
        margin: int = 0,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> "DelayedScaling":
        """Enters this step's tensor; the result serves the next step.

        The scale becomes the largest value of `dtype` over the largest of the history, over
        2**margin. It stays as it is if that is 0, or if x holds a NaN or an infinity; such an entry
        stays in the history, but does not count in later steps.

        Call anywhere; inside `shard_map` with `axis_name`. Its derivative by x is zero.

        Args:
          x: the tensor that this step quantizes, any shape.
          dtype: what it is quantized to.
          margin: powers of two to keep free below the largest value.
          axis_name: mesh axes over which the largest magnitude is taken.
        Returns:
          The state for the next step.
        Raises:
          ValueError: `dtype` is none of the two types of 8 bits.
        """
        amax = largest_magnitude(x, axis_name=axis_name)
        return self.record(amax, dtype=dtype, margin=margin)

    def record(
        self, amax: Float32[Array, ""], *, dtype: Any = jnp.float8_e4m3fn, margin: int = 0
    ) -> "DelayedScaling":
        """`update` with a largest magnitude that is known already."""
        dtype = _check_dtype("DelayedScaling", dtype)
        history = jnp.concatenate([amax[None], self.amax_history[:-1]])
        largest = jnp.max(jnp.where(jnp.isfinite(history), history, 0))
        keep = ~jnp.isfinite(amax) | (largest == 0)
        scale = jnp.where(keep, self.scale, _scale_for(largest, dtype, margin))
        return DelayedScaling(amax_history=history, scale=scale)


def quantize(
    x: Float[Array, "..."],
    mode: ScalingMode | str,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    layout: Layout = "row",
    state: DelayedScaling | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Quantized:
    """Scales x so that it fits into 8 bits, and rounds it to nearest, ties to even.

    It saturates: what is beyond the largest value, an infinity too, becomes the largest with its
    sign, in e5m2 as well. NaN stays NaN. The modes differ in the scale:

    - CURRENT_TENSOR_SCALING: the largest magnitude of x becomes the largest value. 1 if that
      magnitude is 0 or not finite.
    - DELAYED_TENSOR_SCALING: that of `state`; `state.update(x)` makes the one of the next step.
    - MXFP8_1D_SCALING: for each block of 32, the smallest power of two that brings its largest
      magnitude to the largest value or below; at least 2**-127 (byte 0), which a block of zeros
      has, too. A block that holds a NaN or an infinity gets byte 255, NaN, and becomes NaN: no
      other scale tells of it.

    x is rounded to float32 first if it is wider. Magnitudes below 2**-126 count as zero, on every
    platform, because XLA's CPU takes them for it. Tensor scales stay within 2**-126 and 2**126.

    Call anywhere; inside `shard_map` on this rank's part. Its derivative is zero, as that of any
    rounding; a product of quantized operands has to bring its own.

    Args:
      x: any shape for tensor scaling; for MXFP8 `[M, K]` in layout "row", `[K, N]` in "column",
        K a multiple of 32.
      mode: any but NO_SCALING, or its name.
      dtype: `jnp.float8_e4m3fn` (largest value 448) or `jnp.float8_e5m2` (57344).
      layout: along which dimension MXFP8's blocks lie: the last ("row") or the first ("column").
      state: the scale of DELAYED_TENSOR_SCALING.
      axis_name: mesh axes whose ranks share the scale of CURRENT_TENSOR_SCALING, as an all-gather
        of their parts needs it; nothing to the other modes.
    Returns:
      The data and the inverse of its scale.
    Raises:
      ValueError: an argument does not fit the mode.
    References:
      OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats Specification 1.0, for
      its block of 32, E8M0 and the NaN scale. That rounds the scale's exponent down; rounded up,
      as here, the largest magnitude of a block does not saturate.
    """
    mode = ScalingMode.read("quantize", "mode", mode)
    dtype = _check_dtype("quantize", dtype)
    check_layout("quantize", layout)
    is_delayed = mode == ScalingMode.DELAYED_TENSOR_SCALING
    if mode == ScalingMode.NO_SCALING:
        raise ValueError(
            f"quantize: mode is {mode}, which has no scales; it needs to be one of the others. "
            "Use x.astype, or pass x to the GEMM as it is."
        )
    if is_delayed != (state is not None):
        raise ValueError(
            f"quantize: got {'no state' if is_delayed else 'a state'} with {mode}; the scale of "
            "an earlier step belongs to DELAYED_TENSOR_SCALING alone. "
            + ("Begin with state=DelayedScaling.init()." if is_delayed else "Omit it.")
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"quantize: x is {x.dtype}; it needs to be real floats. Convert it first.")
    is_blocks = mode == ScalingMode.MXFP8_1D_SCALING
    if is_blocks:
        check_blocks("quantize", "x", x.shape, layout)
    wide = _float32(x)
    if is_blocks:
        scale_inv = block_scales(wide, dtype, layout=layout)
        scaled = divide_by_scales(wide, scale_inv, layout=layout)
    else:
        scale = _current_scale(_amax(wide, axis_name), dtype) if state is None else state.scale
        scale = lax.stop_gradient(scale)
        scale_inv, scaled = 1 / scale, wide * scale[0]
    return Quantized(data=_round(scaled, dtype), scale_inv=scale_inv, mode=mode, layout=layout)


def dequantize(q: Quantized, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """The value of `q`: data times scale, in float32, exact for MXFP8.

    A value below 2**-126 is zero where the platform flushes such floats; XLA's CPU does. Rounding
    may have taken a value near float32's largest up to 2**128, which is infinite here.

    Call anywhere. Linear in the data and in a tensor's scale, but `quantize` stops the derivative.

    Args:
      q: what `quantize` returned.
      dtype: of the result; rounded to it once.
    Returns:
      An array in the shape of `q.data`.
    Raises:
      ValueError: the parts of `q` do not fit each other.
    """
    mode = ScalingMode.read("dequantize", "q.mode", q.mode)
    _check_dtype("dequantize", q.data.dtype, "q.data")
    is_blocks = mode == ScalingMode.MXFP8_1D_SCALING
    if mode == ScalingMode.NO_SCALING:
        raise ValueError(
            f"dequantize: q.mode is {mode}, which has no scales, but q has scale_inv. Make q with "
            "quantize, or use q.data.astype."
        )
    if is_blocks:
        check_layout("dequantize", q.layout)
        check_blocks("dequantize", "q.data", q.data.shape, q.layout)
    shape = scales_shape(q.data.shape, q.layout) if is_blocks else (1,)
    kind = jnp.dtype(jnp.uint8 if is_blocks else jnp.float32)
    if (q.scale_inv.shape, q.scale_inv.dtype) != (shape, kind):
        raise ValueError(
            f"dequantize: q.scale_inv is {q.scale_inv.dtype}{list(q.scale_inv.shape)}; {mode} "
            f"with data of shape {q.data.shape} needs {kind}{list(shape)}. Pass it as quantize "
            "returned it, unpadded; under vmap, map both."
        )
    if is_blocks:
        value = multiply_by_scales(q.data, q.scale_inv, layout=q.layout)
    else:
        value = q.data.astype(jnp.float32) * q.scale_inv[0]
    return value.astype(dtype)


def _float32(x: Float[Array, "..."]) -> Float32[Array, "..."]:
    """x without subnormals, which XLA's CPU takes for zero and GPUs do not; and no derivative.

    On bits, because the CPU's comparisons take them for zero, too. Bits have the derivative zero.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = jnp.where(bits & 0x7F800000 != 0, bits, bits & jnp.uint32(0x80000000))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _amax(x: Float32[Array, "..."], axis_name: Any) -> Float32[Array, ""]:
    """Largest magnitude, NaN above all: as integers, since a maximum of floats may drop a NaN."""
    amax = jnp.max(magnitude_bits(x), initial=0)
    if axis_name is not None:
        amax = lax.pmax(amax, axis_name)
    return lax.bitcast_convert_type(amax, jnp.float32)


def largest_magnitude(x: Float[Array, "..."], *, axis_name: Any = None) -> Float32[Array, ""]:
    """The amax of x, without derivative; NaN if x holds one; of all ranks of `axis_name`."""
    return _amax(_float32(x), axis_name)


def _scale_for(amax: Float32[Array, ""], dtype: Any, margin: int) -> Float32[Array, "1"]:
    scale = float(jnp.finfo(dtype).max) * 2.0**-margin / amax[None]
    return jnp.clip(scale, 1 / _LARGEST_SCALE, _LARGEST_SCALE)


def _current_scale(amax: Float32[Array, ""], dtype: Any) -> Float32[Array, "1"]:
    is_usable = jnp.isfinite(amax) & (amax > 0)
    return jnp.where(is_usable, _scale_for(amax, dtype, margin=0), 1)


def _round(scaled: Float32[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Clamped, then XLA's own conversion, which rounds float32 once and to even.

    Without the clamp, what is too large becomes NaN in e4m3fn and an infinity in e5m2.
    """
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def _check_dtype(op: str, dtype: Any, name: str = "dtype") -> Any:
    names = [jnp.dtype(kind).name for kind in _TYPES]
    try:
        got = jnp.dtype(dtype).name
    except TypeError:
        got = repr(dtype)
    if got not in names:
        raise ValueError(f"{op}: {name} is {got}; it needs to be {' or '.join(names)}.")
    return jnp.dtype(dtype)
