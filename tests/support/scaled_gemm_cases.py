"""8-bit operands from NumPy: bytes, scales in the engine's layout, and their values."""

from typing import Any, NamedTuple

import comm_gemm_oracle as oracle
import jax.numpy as jnp
import numpy as np
import scaling_oracle

from jax_cp_dispatch import gemm

E4M3, E5M2 = scaling_oracle.FORMATS
MODES = ["DELAYED_TENSOR_SCALING", "CURRENT_TENSOR_SCALING", "MXFP8_1D_SCALING"]
MXFP8 = MODES[2]

# Options of each schedule's buffer.
GATHERING: dict[str, Any] = {
    "ring": {},
    "ring, no copies": {"use_ce": False},
    "ring, pairs": {"aggregate_ag": True},
    "ring, atomic": {"atomic_gemm": True},
    "ring, atomic, no copies": {"atomic_gemm": True, "use_ce": False},
}
REDUCING: dict[str, Any] = {
    "ring": {},
    "ring, no copies": {"use_ce": False},
    "ring, atomic": {"atomic_gemm": True},
    "ring, atomic, no copies": {"atomic_gemm": True, "use_ce": False},
    "pipeline": {"method": "PIPELINE"},
    "pipeline, atomic": {"method": "PIPELINE", "atomic_gemm": True},
    "pipeline, first gemm": {"method": "PIPELINE", "rs_overlap_first_gemm": True},
}


class Scaled(NamedTuple):
    """An operand of one rank or, with a leading axis, of all ranks."""

    data: Any
    scale_inv: Any
    values: Any  # float64


def is_blocks(mode):
    return mode == MXFP8


def laid(x, layout):
    """Transposes blocks of the last dimension to the first one for "column"; its own inverse."""
    return x if layout == "row" else np.swapaxes(x, -1, -2)


def padded(scales, layout):
    """Pads scales to whole tiles with NaN, which nothing may read."""
    lines, blocks = laid(scales, layout).shape
    fill = [(0, -lines % 128), (0, -blocks % 4)]
    return laid(np.pad(laid(scales, layout), fill, constant_values=255), layout)


def drawn(seed, mode, name, shape, layout="row", power=0) -> Scaled:
    """Draws any finite bytes, with scales about 2**power; `shape` has two dimensions."""
    rng = np.random.default_rng(seed)
    finite = np.flatnonzero(np.isfinite(scaling_oracle.table(name)))
    data = rng.choice(finite, size=shape)
    if not is_blocks(mode):
        scale = np.array([rng.uniform(0.5, 2) * 2.0 ** (power + rng.integers(-4, 5))], np.float32)
        values = scaling_oracle.table(name)[data] * scale.astype(np.float64)
        return Scaled(data.astype(np.uint8).view(name), scale, values)
    data = laid(data, layout)
    scales = rng.integers(119, 136, (data.shape[0], data.shape[1] // 32)) + power
    scales = scales.astype(np.uint8)
    values = laid(scaling_oracle.mxfp8_value(data, scales, name), layout)
    scales = padded(laid(scales, layout), layout)
    return Scaled(laid(data, layout).astype(np.uint8).view(name), scales, values)


def drawn_by_ranks(seed, num_ranks, *arguments) -> Scaled:
    """Draws an operand per rank, each with its own scales."""
    each = [drawn((seed, rank), *arguments) for rank in range(num_ranks)]
    return Scaled(*map(np.stack, zip(*each, strict=True)))


def near(got, want, name: Any = ""):
    """Checks results that are rounded once from float32 sums."""
    got = np.asarray(got)
    rtol = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}[got.dtype.name]
    atol = 1e-5 * np.abs(want).max(initial=0)
    got = got.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=str(name))


def gelu(x):
    """GELU, approximated with tanh."""
    (x,) = oracle.wide(x)
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_derivative(x):
    (x,) = oracle.wide(x)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * inner


def scaled(lhs, rhs, mode):
    """Returns the call and its operands: data and scales."""

    def call(*operands, **options):
        a, a_scale, b, b_scale = map(jnp.asarray, operands)
        scales = {"lhs_scale_inv": a_scale, "rhs_scale_inv": b_scale}
        return gemm(a, b, scaling_mode=mode, **scales, **options)

    return call, (*lhs[:2], *rhs[:2])


def tiles_of(scales):
    """Line by line of lhs, or column by column of rhs; padded with zeros."""
    lines, blocks = scales.shape
    tiles = np.zeros((-(-lines // 128), -(-blocks // 4), 512), np.uint8)
    line, block = np.indices(scales.shape)
    tiles[line // 128, block // 4, scaling_oracle.tile_offset(line % 128, block % 4)] = scales
    return tiles
