"""8-bit operands of GEMMs: scaling modes, quantization, and the layouts of block scales."""

import dataclasses
import enum
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from jax_cp_dispatch._arguments import check_integer, check_type
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import check_axis_name, num_ranks_here

__all__ = [
    "DelayedScaling",
    "MatmulScaling",
    "Quantized",
    "ScalingMode",
    "dequantize",
    "pad_scales",
    "quantize",
    "swizzle_scales",
    "unpad_scales",
    "unswizzle_scales",
]

FLOATS = ("bfloat16", "float16", "float32", "float64")
BYTE_FLOATS = ("float8_e4m3fn", "float8_e5m2")  # with scales; largest: 448 and 57344

BlockLayout: TypeAlias = Literal["row", "column"]
Leaf: TypeAlias = Any  # an array, or anything that a transformation maps over the leaves

BLOCK = 32  # elements of MXFP8 that share a scale
_FLOAT32_INF = 0x7F800000
_FLOAT32_QUIET_BIT = 0x00400000
_HISTORY = 1024
_LARGEST_SCALE = 2.0**126  # its inverse is the smallest normal float32

_Member = TypeVar("_Member", bound=enum.Enum)  # Self, for the run-time checks of the tests


class Named(enum.IntEnum):
    """An enumeration whose members may also be given by name."""

    @classmethod
    def read(cls: type[_Member], op: str, name: str, value: Any) -> _Member:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        if isinstance(value, cls):
            return value
        raise ValueError(
            f"{op}: {name} is {value!r}; it needs to be one of "
            f"{', '.join(repr(member.name) for member in cls)}, or that member of {cls.__name__}."
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class ScalingMode(Named):
    """The scaling of 8-bit operands."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    CURRENT_TENSOR_SCALING = 2
    MXFP8_1D_SCALING = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """An 8-bit operand and its scales; its value is data times scale.

    Attributes:
      data: float8_e4m3fn or float8_e5m2, in the shape of the operand.
      scale_inv: f32 `[1]` for tensor scaling; for MXFP8 e8m0 bytes, u8, `[M, K / 32]` for layout
        "row" and `[K / 32, N]` for "column": byte b means 2**(b - 127), 255 means NaN.
      mode: how it is scaled (static).
      layout: the dimension along which MXFP8's blocks lie; unused for tensor scaling (static).
    """

    data: Leaf
    scale_inv: Leaf
    mode: ScalingMode = dataclasses.field(metadata={"static": True})
    layout: BlockLayout = dataclasses.field(default="row", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DelayedScaling:
    """The state of DELAYED_TENSOR_SCALING for one tensor, carried from step to step.

    Attributes:
      amax_history: f32 `[1024]`; largest magnitudes of the last steps, newest first.
      scale: f32 `[1]`; the factor that `quantize` uses in the next step.
    """

    amax_history: Leaf
    scale: Leaf

    @classmethod
    def init(cls) -> "DelayedScaling":
        """Returns the state before the first step: no history, scale 1."""
        return cls(amax_history=jnp.zeros(_HISTORY, jnp.float32), scale=jnp.ones(1, jnp.float32))

    def update(
        self,
        x: Float[Array, "..."],
        *,
        dtype: Any = jnp.float8_e4m3fn,
        margin: int = 0,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> "DelayedScaling":
        """Records this step's tensor and returns the state for the next step.

        The scale becomes the largest value of `dtype` divided by the largest of the history and by
        2**margin. It is unchanged if the latter is 0, or if x contains a NaN or an infinity; such
        an entry stays in the history but is ignored in later steps.

        Call anywhere; inside `shard_map` with `axis_name`. Its derivative in x is zero.

        Args:
          x: the tensor that this step quantizes, any shape.
          dtype: the type to which it is quantized.
          margin: powers of two to keep free below the largest value.
          axis_name: mesh axes over which the largest magnitude is taken.
        Returns:
          The state for the next step.
        Raises:
          ValueError: `dtype` is neither of the two 8-bit types.
        """
        if axis_name is not None:
            check_axis_name("DelayedScaling.update", axis_name)
            num_ranks_here("DelayedScaling.update", axis_name, instead="axis_name=None")
        amax = largest_magnitude(x, axis_name=axis_name)
        return self.record(amax, dtype=dtype, margin=margin)

    def record(
        self, amax: Float32[Array, ""], *, dtype: Any = jnp.float8_e4m3fn, margin: int = 0
    ) -> "DelayedScaling":
        """`update` with a known largest magnitude."""
        dtype = _check_dtype("DelayedScaling", dtype)
        history = jnp.concatenate([amax[None], self.amax_history[:-1]])
        largest = jnp.max(jnp.where(jnp.isfinite(history), history, 0))
        keep = ~jnp.isfinite(amax) | (largest == 0)
        scale = jnp.where(keep, self.scale, _scale_for(largest, dtype, margin))
        return DelayedScaling(amax_history=history, scale=scale)


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


@door("quantize")
def quantize(
    x: Float[Array, "..."],
    mode: ScalingMode | str,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    layout: BlockLayout = "row",
    state: DelayedScaling | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Quantized:
    """Scales x to the range of an 8-bit type, and rounds it to nearest, ties to even.

    Values saturate: those beyond the largest value, including infinities, become the largest value
    with their sign, also in e5m2. NaN stays NaN. The modes differ in the scale:

    - CURRENT_TENSOR_SCALING: the largest magnitude of x becomes the largest value. 1 if that
      magnitude is 0 or not finite.
    - DELAYED_TENSOR_SCALING: the scale of `state`; `state.update(x)` computes that of the next
      step.
    - MXFP8_1D_SCALING: for each block of 32, the smallest power of two that brings its largest
      magnitude to the largest value or below; at least 2**-127 (byte 0), also for a block of zeros.
      A block with a NaN or an infinity gets byte 255 (NaN) and becomes NaN, because no other scale
      represents it.

    If x is wider than float32, it is rounded to float32 first. Magnitudes below 2**-126 count as
    zero on every platform, because XLA's CPU backend flushes them. Tensor scales stay within
    2**-126 and 2**126.

    Call anywhere; inside `shard_map` on this rank's part. Its derivative is zero, as for any
    rounding; a product of quantized operands must define its own.

    Args:
      x: any shape for tensor scaling; for MXFP8 `[M, K]` in layout "row", `[K, N]` in "column",
        K a multiple of 32.
      mode: any mode except NO_SCALING, or its name.
      dtype: `jnp.float8_e4m3fn` (largest value 448) or `jnp.float8_e5m2` (57344).
      layout: the dimension along which MXFP8's blocks lie: the last ("row") or the first
        ("column").
      state: the scale of DELAYED_TENSOR_SCALING.
      axis_name: mesh axes whose ranks share the scale of CURRENT_TENSOR_SCALING, as an all-gather
        of their parts requires; unused in other modes.
    Returns:
      The data and the inverse of its scale.
    Raises:
      TypeError, ValueError: an argument has the wrong type, or does not match the mode.
    References:
      OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats Specification 1.0, for
      its block of 32, E8M0 and the NaN scale. The specification rounds the scale's exponent down.
      Here it is rounded up, so the largest magnitude of a block does not saturate.
    """
    mode = ScalingMode.read("quantize", "mode", mode)
    dtype = _check_dtype("quantize", dtype)
    check_scale_layout("quantize", layout)
    if axis_name is not None:
        check_axis_name("quantize", axis_name)
    is_delayed = mode == ScalingMode.DELAYED_TENSOR_SCALING
    if mode == ScalingMode.NO_SCALING:
        raise ValueError(
            f"quantize: mode is {mode}, which has no scales; it needs to be another mode. "
            "Use x.astype, or pass x to the GEMM unchanged."
        )
    if is_delayed != (state is not None):
        raise ValueError(
            f"quantize: got {'no state' if is_delayed else 'a state'} with {mode}; only "
            "DELAYED_TENSOR_SCALING uses the scales of earlier steps. "
            + ("Begin with state=DelayedScaling.init()." if is_delayed else "Omit it.")
        )
    if state is not None:
        remedy = "Begin with DelayedScaling.init()."
        check_type("quantize", "state", state, DelayedScaling, remedy)
    is_blocks = mode == ScalingMode.MXFP8_1D_SCALING
    if is_blocks:
        check_blocks("quantize", "x", x.shape, layout)
    elif state is None and axis_name is not None:
        num_ranks_here("quantize", axis_name, instead="axis_name=None")
    wide = _float32(x)
    if is_blocks:
        blocks, axis = _blocks(wide, layout)
        scale_inv = _block_scales(blocks, axis, dtype)
        # A finite block has a byte of at most 247, for which 2**(127 - byte) is a normal float32.
        inverse = _power_of_two(jnp.where(scale_inv == 255, 255, 254 - scale_inv))
        scaled = (blocks * jnp.expand_dims(inverse, axis)).reshape(x.shape)
    else:
        if state is None:
            amax = largest_magnitude(x, axis_name=axis_name)
            is_usable = jnp.isfinite(amax) & (amax > 0)
            scale = jnp.where(is_usable, _scale_for(amax, dtype, margin=0), 1)
        else:
            scale = state.scale
        scale = lax.stop_gradient(scale)
        scale_inv, scaled = 1 / scale, wide * scale[0]
    # XLA rounds float32 once, ties to even; without the clamp, values that are too large become NaN
    # in e4m3fn and infinity in e5m2.
    largest = float(jnp.finfo(dtype).max)
    data = jnp.clip(scaled, -largest, largest).astype(dtype)
    return Quantized(data=data, scale_inv=scale_inv, mode=mode, layout=layout)


def dequantize(q: Quantized, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """Returns the value of `q`: data times scale, in float32, exact for MXFP8.

    Values below 2**-126 become zero if the platform flushes subnormals, as XLA's CPU backend does.
    Rounding may turn a value near float32's largest into 2**128, which becomes infinity.

    Call anywhere. Linear in the data and in a tensor's scale; `quantize` itself has derivative
    zero.

    Args:
      q: a result of `quantize`.
      dtype: dtype of the result, which is rounded to it once.
    Returns:
      An array in the shape of `q.data`.
    Raises:
      TypeError, ValueError: `q` is not a `Quantized`, its parts do not match, or `dtype` is
        not a float.
    """
    check_type("dequantize", "q", q, Quantized, "Pass the result of quantize.")
    if not dtype_name(dtype).startswith(("float", "bfloat")):
        raise ValueError(
            f"dequantize: dtype is {dtype!r}; it needs to be a floating-point type. Pass "
            "jnp.float32 or jnp.bfloat16."
        )
    mode = ScalingMode.read("dequantize", "q.mode", q.mode)
    _check_dtype("dequantize", q.data.dtype, "q.data")
    is_blocks = mode == ScalingMode.MXFP8_1D_SCALING
    if mode == ScalingMode.NO_SCALING:
        raise ValueError(
            f"dequantize: q.mode is {mode}, which has no scales, but q has scale_inv. Create q "
            "with quantize, or use q.data.astype."
        )
    if is_blocks:
        check_scale_layout("dequantize", q.layout)
        check_blocks("dequantize", "q.data", q.data.shape, q.layout)
    shape = scales_shape(q.data.shape, q.layout) if is_blocks else (1,)
    kind = jnp.dtype(jnp.uint8 if is_blocks else jnp.float32)
    if (q.scale_inv.shape, q.scale_inv.dtype) != (shape, kind):
        raise ValueError(
            f"dequantize: q.scale_inv is {q.scale_inv.dtype}{list(q.scale_inv.shape)}; {mode} "
            f"with data of shape {q.data.shape} needs {kind}{list(shape)}. Pass it as quantize "
            "returned it, unpadded; under vmap, map both."
        )
    value = q.data.astype(jnp.float32)
    if not is_blocks:
        return (value * q.scale_inv[0]).astype(dtype)
    blocks, axis = _blocks(value, q.layout)
    # 2**-127 is a subnormal float32 and would be flushed to zero, so byte 0 halves the data.
    blocks = jnp.where(jnp.expand_dims(q.scale_inv == 0, axis), blocks * 0.5, blocks)
    factor = _power_of_two(jnp.maximum(q.scale_inv, 1))
    return (blocks * jnp.expand_dims(factor, axis)).reshape(value.shape).astype(dtype)


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype, or how anything else is written."""
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def _check_dtype(op: str, dtype: Any, name: str = "dtype") -> Any:
    if dtype_name(dtype) not in BYTE_FLOATS:
        needs = " or ".join(BYTE_FLOATS)
        raise ValueError(f"{op}: {name} is {dtype_name(dtype)}; it needs to be {needs}.")
    return jnp.dtype(dtype)


def _float32(x: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Returns x without subnormals (zero on XLA's CPU, but not on GPUs), and without derivative.

    Works on bits, because the CPU's comparisons also treat subnormals as zero. Bits have derivative
    zero.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = jnp.where(bits & 0x7F800000 != 0, bits, bits & jnp.uint32(0x80000000))
    return lax.bitcast_convert_type(bits, jnp.float32)


def largest_magnitude(x: Float[Array, "..."], *, axis_name: Any = None) -> Float32[Array, ""]:
    """Returns the amax of x over all ranks of `axis_name`, without derivative; NaN if x has one.

    By integers, because a maximum of floats may drop a NaN.
    """
    amax = jnp.max(_magnitude_bits(_float32(x)), initial=0)
    if axis_name is not None:
        amax = lax.pmax(amax, axis_name)
    return lax.bitcast_convert_type(amax, jnp.float32)


def _magnitude_bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns integers in the order of |x|: infinity above finite values, NaN above all."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def _scale_for(amax: Float32[Array, ""], dtype: Any, margin: int) -> Float32[Array, "1"]:
    scale = float(jnp.finfo(dtype).max) * 2.0**-margin / amax[None]
    return jnp.clip(scale, 1 / _LARGEST_SCALE, _LARGEST_SCALE)


# ---- MXFP8: blocks of 32 elements that share a power of two, and the byte order of tensor cores.


def _blocks(x: Array, layout: BlockLayout) -> tuple[Array, int]:
    """Returns x with a dimension of the elements of a block, and which one that is."""
    rows, columns = x.shape
    if layout == "row":
        return x.reshape(rows, columns // BLOCK, BLOCK), 2
    return x.reshape(rows // BLOCK, BLOCK, columns), 1


def _block_scales(blocks: Float32[Array, "..."], axis: int, dtype: Any) -> UInt8[Array, "r c"]:
    """Returns each block's e8m0 byte: its largest magnitude over that of `dtype`, rounded up.

    Exact, because it works on the bits of float32: the difference of two numbers counts steps of
    2**-23 of a power of two, and carries from the mantissa into the exponent.
    """
    amax = jnp.max(_magnitude_bits(blocks), axis=axis, initial=0)
    one = 1 << 23
    largest = int(np.float32(jnp.finfo(dtype).max).view(np.int32))
    biased = jnp.maximum(((amax - largest + one - 1) >> 23) + 127, 0)
    return jnp.where(amax >= _FLOAT32_INF, 255, biased).astype(jnp.uint8)


def _power_of_two(byte: Array) -> Float32[Array, "r c"]:
    """Returns 2**(byte - 127) for bytes 1 to 254, NaN for 255."""
    bits = (byte.astype(jnp.int32) << 23) | jnp.where(byte == 255, _FLOAT32_QUIET_BIT, 0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def scales_shape(shape: tuple[int, ...], layout: BlockLayout) -> tuple[int, int]:
    """Shape of the scales of 2-D data, before padding."""
    rows, columns = shape
    return (rows, columns // BLOCK) if layout == "row" else (rows // BLOCK, columns)


def padded_shape(shape: tuple[int, int], layout: BlockLayout) -> tuple[int, ...]:
    """Shape of the scales of 2-D data, as `pad_scales` returns them."""
    sizes = zip(scales_shape(shape, layout), _tile(layout), strict=True)
    return tuple(-(-n // unit) * unit for n, unit in sizes)


def tiles_shape(lines: int, contracted: int) -> tuple[int, int, int]:
    """Returns the shape of swizzled scales for `lines` rows of lhs, or columns of rhs."""
    return -(-lines // 128), -(-contracted // (4 * BLOCK)), 512


def check_blocks(op: str, name: str, shape: tuple[int, ...], layout: BlockLayout) -> None:
    """Requires two dimensions, and whole blocks along the contracted one."""
    if len(shape) != 2:
        raise ValueError(
            f"{op}: {name} has shape {shape}; MXFP8_1D_SCALING needs two dimensions. Collapse the "
            "others first, or vmap over them."
        )
    axis = 1 if layout == "row" else 0
    if shape[axis] % BLOCK:
        raise ValueError(
            f"{op}: {name} has shape {shape}; layout {layout!r} needs dimension {axis} to be a "
            f"multiple of {BLOCK}, the elements that share a scale. Pad it with zeros to "
            f"{-(-shape[axis] // BLOCK) * BLOCK}."
        )


def check_scale_layout(op: str, layout: Any) -> None:
    if layout not in ("row", "column"):
        raise ValueError(
            f"{op}: layout is {layout!r}; it needs to be 'row', blocks along the last dimension "
            "(lhs), or 'column', blocks along the first (rhs)."
        )


@door("pad_scales")
def pad_scales(
    scales: UInt8[Array, "r c"], *, layout: BlockLayout = "row"
) -> UInt8[Array, "r2 c2"]:
    """Pads scales to whole tiles of the tensor cores: (128, 4), or (4, 128) for columns.

    Call anywhere. No derivative: the scales are bytes.

    Args:
      scales: `[M, K / 32]` for layout "row", `[K / 32, N]` for "column".
      layout: along which dimension the blocks lie.
    Returns:
      Scales with bytes 0 appended to both dimensions.
    Raises:
      TypeError, ValueError: an argument has the wrong type or shape, or `layout` is unknown.
    """
    check_scale_layout("pad_scales", layout)
    fill = [(0, -n % unit) for n, unit in zip(scales.shape, _tile(layout), strict=True)]
    return jnp.pad(scales, fill)


@door("unpad_scales")
def unpad_scales(scales: UInt8[Array, "r2 c2"], *, shape: tuple[int, int]) -> UInt8[Array, "r c"]:
    """Removes the padding of `pad_scales`.

    Call anywhere. No derivative: the scales are bytes.

    Args:
      scales: padded scales.
      shape: shape of the scales before padding.
    Returns:
      The scales before padding.
    Raises:
      TypeError, ValueError: an argument has the wrong type or shape; `shape` is negative or larger
        than that of `scales`.
    """
    if not isinstance(shape, tuple) or len(shape) != 2:
        raise TypeError(f"unpad_scales: shape is {shape!r}; it needs to be a tuple of two sizes.")
    for size in shape:
        check_integer("unpad_scales", "an entry of shape", size)
    if not all(0 <= size <= most for size, most in zip(shape, scales.shape, strict=True)):
        raise ValueError(
            f"unpad_scales: shape is {shape}; it needs sizes from 0 to those of the scales, "
            f"{scales.shape}. Pass the shape that they had before pad_scales."
        )
    return scales[: shape[0], : shape[1]]


@door("swizzle_scales")
def swizzle_scales(
    scales: UInt8[Array, "r c"], *, layout: BlockLayout = "row"
) -> UInt8[Array, "tiles_r tiles_c 512"]:
    """Orders padded scales as the tensor cores read them: tile by tile of 128 rows and 4 scales.

    In a tile, the scale of a row and a block lies at (row % 32) * 16 + (row // 32) * 4 + block.
    For layout "column", a row is a column of the scales, `[K / 32, N]`: they are transposed first,
    so the kernel reads both operands alike.

    Call anywhere. No derivative: the scales are bytes.

    Args:
      scales: as `pad_scales` returns them: `[R, C]` for "row", `[C, R]` for "column".
      layout: along which dimension the blocks lie.
    Returns:
      `[R / 128, C / 4, 512]`; the last dimension is the offset in the tile.
    Raises:
      TypeError, ValueError: the scales are not an array of whole tiles, or `layout` is unknown.
    References:
      NVIDIA, cuBLAS documentation, "1D block scaling factors layout".
    """
    check_scale_layout("swizzle_scales", layout)
    if any(n % unit for n, unit in zip(scales.shape, _tile(layout), strict=True)):
        raise ValueError(
            f"swizzle_scales: scales have shape {scales.shape}; layout {layout!r} needs multiples "
            f"of {_tile(layout)}. Call pad_scales first."
        )
    scales = scales if layout == "row" else scales.T
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(rows // 128, columns // 4, 512)


@door("unswizzle_scales")
def unswizzle_scales(
    tiles: UInt8[Array, "tiles_r tiles_c 512"], *, layout: BlockLayout = "row"
) -> UInt8[Array, "r c"]:
    """The inverse of `swizzle_scales`.

    Call anywhere. No derivative: the scales are bytes.

    Args:
      tiles: `[R / 128, C / 4, 512]`.
      layout: along which dimension the blocks lie.
    Returns:
      Padded scales: `[R, C]` for "row", `[C, R]` for "column".
    Raises:
      TypeError, ValueError: `tiles` is not an array of tiles, or `layout` is unknown.
    """
    check_scale_layout("unswizzle_scales", layout)
    num_rows, num_columns, _ = tiles.shape
    scales = tiles.reshape(num_rows, num_columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    scales = scales.reshape(num_rows * 128, num_columns * 4)
    return scales if layout == "row" else scales.T


def _tile(layout: BlockLayout) -> tuple[int, int]:
    """Returns the tile that a tensor core reads at once: 128 rows, 4 blocks each."""
    return (128, 4) if layout == "row" else (4, 128)
