"""Oracle of 8-bit scaling: NumPy and Python floats, tables and searches, without package code."""

import functools
import math

import numpy as np

FORMATS = {"float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}  # bits of exponent and mantissa
BLOCK = 32
HISTORY = 1024


def decode_byte(byte, name):
    """The value of one byte, by the tables of the OCP 8-bit specification."""
    exponent_bits, mantissa_bits = FORMATS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if byte & 128 else 1.0
    exponent, mantissa = divmod(byte & 127, 2**mantissa_bits)
    if name == "float8_e4m3fn" and byte & 127 == 127:
        return math.nan
    if name == "float8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)


@functools.cache
def table(name):
    """The value of every byte, float64 [256]."""
    return np.array([decode_byte(byte, name) for byte in range(256)])


@functools.cache
def magnitudes(name):
    """All finite magnitudes; the index of each is its byte."""
    values = table(name)[:128]
    return values[np.isfinite(values)]


def largest(name):
    return magnitudes(name)[-1]


def ties(name):
    """Midpoints between adjacent magnitudes, exact in float64 and in float32."""
    values = magnitudes(name)
    return (values[1:] + values[:-1]) / 2


def encode(x, name):
    """Bytes of the nearest values, ties to even, saturated; -1 stands for any NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = np.asarray(x).astype(np.float64)
    magnitude, middle = np.abs(np.where(np.isnan(x), 0, x)), ties(name)
    low, high = (np.searchsorted(middle, magnitude, side) for side in ("left", "right"))
    byte = np.where(low % 2 == 0, low, high) + 128 * np.signbit(x)
    return np.where(np.isnan(x), -1, byte)


def decode_scale(byte):
    """e8m0."""
    return math.nan if byte == 255 else math.ldexp(1.0, int(byte) - 127)


def flushed(x):
    """float32 as the package reads it: subnormals become zeros of the same sign."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.asarray(x).astype(np.float32)
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def scale_byte(block, name):
    """The smallest power of two s with amax <= s * largest, as e8m0."""
    if not np.all(np.isfinite(block)):
        return 255
    amax = float(np.max(np.abs(block)))
    if amax == 0:
        return 0
    exponent = math.ceil(math.log2(amax) - math.log2(largest(name)))
    while amax <= math.ldexp(largest(name), exponent - 1):
        exponent -= 1
    while amax > math.ldexp(largest(name), exponent):
        exponent += 1
    return max(exponent + 127, 0)


def mxfp8(x, name):
    """Bytes [M, K] as `encode` and scale bytes [M, K / 32] of blocks along the last dimension."""
    x = flushed(x).astype(np.float64)
    data, scales = np.zeros(x.shape, int), np.zeros((x.shape[0], x.shape[1] // BLOCK), int)
    for row, column in np.ndindex(scales.shape):
        part = row, slice(column * BLOCK, (column + 1) * BLOCK)
        scales[row, column] = scale_byte(x[part], name)
        data[part] = encode(x[part] / decode_scale(scales[row, column]), name)
    return data, scales


def mxfp8_value(data, scales, name):
    """float64 values of bytes and scales along the last dimension."""
    scale = np.vectorize(decode_scale)(scales)
    return table(name)[data] * np.repeat(scale, BLOCK, axis=1)


def tensor_scale(amax, name, margin=0, otherwise=1.0):
    """The float32 scale of a tensor with this largest magnitude."""
    if not np.isfinite(amax) or amax == 0:
        return np.float32(otherwise)
    scale = largest(name) / 2.0**margin / float(amax)
    return np.float32(min(max(scale, 2.0**-126), 2.0**126))


def tensor(x, scale, name):
    """Bytes as in `encode`: one rounded float32 multiplication, then rounding to 8 bits."""
    with np.errstate(over="ignore"):
        return encode(flushed(x) * scale, name)


def next_state(history, scale, x, name, margin=0):
    """(history, scale) of delayed scaling after a step with x, of all ranks."""
    amax = np.max(np.abs(flushed(x)), initial=0)
    history = np.concatenate([[amax], history[:-1]]).astype(np.float32)
    if np.isfinite(amax):
        amax = np.max(history, where=np.isfinite(history), initial=0)
    return history, tensor_scale(amax, name, margin, otherwise=float(scale))


def tile_offset(row, block):
    """The offset of one scale in a 128 x 4 tile."""
    return (row % 32) * 16 + (row // 32) * 4 + block
