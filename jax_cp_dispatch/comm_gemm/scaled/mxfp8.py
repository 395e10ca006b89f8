"""MXFP8: blocks of 32 elements that share a power of two, and the byte order of tensor cores."""

from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from jax_cp_dispatch._arguments import check_array, check_integer

BlockLayout: TypeAlias = Literal["row", "column"]

BLOCK = 32
"""Elements that share a scale."""

_FLOAT32_INF = 0x7F800000
_FLOAT32_QUIET_BIT = 0x00400000


def block_scales(
    x: Float32[Array, "rows columns"], dtype: Any, *, layout: BlockLayout
) -> UInt8[Array, "r c"]:
    """Returns each block's e8m0 byte: its largest magnitude over that of `dtype`, rounded up.

    Exact, because it works on the bits of float32: the difference of two numbers counts steps of
    2**-23 of a power of two, and carries from the mantissa into the exponent.
    """
    amax = jnp.max(_blocks(magnitude_bits(x), layout), axis=_block_axis(layout), initial=0)
    one = 1 << 23
    exponent = (amax - _largest_bits(dtype) + one - 1) >> 23
    biased = jnp.maximum(exponent + 127, 0)
    return jnp.where(amax >= _FLOAT32_INF, 255, biased).astype(jnp.uint8)


def magnitude_bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns integers in the order of |x|: infinity above finite values, NaN above all."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def divide_by_scales(
    x: Float32[Array, "rows columns"], scales: UInt8[Array, "r c"], *, layout: BlockLayout
) -> Float32[Array, "rows columns"]:
    """Divides x by its blocks' scales (of `block_scales`); NaN where the scale is NaN."""
    # A finite block has a byte of at most 247, for which 2**(127 - byte) is a normal float32.
    inverse = _power_of_two(jnp.where(scales == 255, 255, 254 - scales))
    return (_blocks(x, layout) * _per_block(inverse, layout)).reshape(x.shape)


def multiply_by_scales(
    data: Float[Array, "rows columns"], scales: UInt8[Array, "r c"], *, layout: BlockLayout
) -> Float32[Array, "rows columns"]:
    """Multiplies data with its blocks' scales; exact, since powers of two only change exponents."""
    # 2**-127 is a subnormal float32 and would be flushed to zero, so byte 0 halves the data
    # instead.
    blocks = _blocks(data.astype(jnp.float32), layout)
    blocks = jnp.where(_per_block(scales == 0, layout), blocks * 0.5, blocks)
    factor = _power_of_two(jnp.maximum(scales, 1))
    return (blocks * _per_block(factor, layout)).reshape(data.shape)


def scales_shape(shape: tuple[int, ...], layout: BlockLayout) -> tuple[int, int]:
    """Shape of the scales of 2-D data, before padding."""
    rows, columns = shape
    return (rows, columns // BLOCK) if layout == "row" else (rows // BLOCK, columns)


def padded_shape(shape: tuple[int, int], layout: BlockLayout) -> tuple[int, int]:
    """Shape of the scales of 2-D data, as `pad_scales` returns them."""
    rows, columns = (
        -(-n // unit) * unit
        for n, unit in zip(scales_shape(shape, layout), _tile(layout), strict=True)
    )
    return rows, columns


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


def check_layout(op: str, layout: Any) -> None:
    if layout not in ("row", "column"):
        raise ValueError(
            f"{op}: layout is {layout!r}; it needs to be 'row', blocks along the last dimension "
            "(lhs), or 'column', blocks along the first (rhs)."
        )


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
    check_layout("pad_scales", layout)
    _check_dims("pad_scales", "scales", scales, "[r, c]")
    fill = [(0, -n % unit) for n, unit in zip(scales.shape, _tile(layout), strict=True)]
    return jnp.pad(scales, fill)


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
    _check_dims("unpad_scales", "scales", scales, "[r, c]")
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
    check_layout("swizzle_scales", layout)
    _check_dims("swizzle_scales", "scales", scales, "[r, c]")
    if any(n % unit for n, unit in zip(scales.shape, _tile(layout), strict=True)):
        raise ValueError(
            f"swizzle_scales: scales have shape {scales.shape}; layout {layout!r} needs multiples "
            f"of {_tile(layout)}. Call pad_scales first."
        )
    rows, columns = (scales if layout == "row" else scales.T).shape
    tiles = (scales if layout == "row" else scales.T).reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(rows // 128, columns // 4, 512)


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
    check_layout("unswizzle_scales", layout)
    _check_dims("unswizzle_scales", "tiles", tiles, "[r, c, 512]")
    num_rows, num_columns, _ = tiles.shape
    scales = tiles.reshape(num_rows, num_columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    scales = scales.reshape(num_rows * 128, num_columns * 4)
    return scales if layout == "row" else scales.T


def _check_dims(op: str, name: str, array: Any, needs: str) -> None:
    """Requires an array of scales, or of tiles of 512 scales."""
    check_array(op, name, array)
    of_tiles = needs == "[r, c, 512]"
    if array.ndim != 2 + of_tiles or (of_tiles and array.shape[-1] != 512):
        raise ValueError(f"{op}: {name} has shape {array.shape}; it needs to be {needs}.")


def _tile(layout: BlockLayout) -> tuple[int, int]:
    """Returns the tile that a tensor core reads at once: 128 rows, 4 blocks each."""
    return (128, 4) if layout == "row" else (4, 128)


def _block_axis(layout: BlockLayout) -> int:
    """Returns the dimension of `_blocks` that counts the elements of a block."""
    return 2 if layout == "row" else 1


def _blocks(x: Array, layout: BlockLayout) -> Array:
    rows, columns = x.shape
    if layout == "row":
        return x.reshape(rows, columns // BLOCK, BLOCK)
    return x.reshape(rows // BLOCK, BLOCK, columns)


def _per_block(scales: Array, layout: BlockLayout) -> Array:
    return jnp.expand_dims(scales, _block_axis(layout))


def _power_of_two(byte: Array) -> Float32[Array, "r c"]:
    """Returns 2**(byte - 127) for bytes 1 to 254, NaN for 255."""
    bits = (byte.astype(jnp.int32) << 23) | jnp.where(byte == 255, _FLOAT32_QUIET_BIT, 0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _largest_bits(dtype: Any) -> int:
    return int(np.float32(jnp.finfo(dtype).max).view(np.int32))
