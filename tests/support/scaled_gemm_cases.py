"""Operands of GEMMs, of 8 bits too; their values and all epilogues of a call in NumPy."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import comm_gemm_oracle as oracle
import jax.numpy as jnp
import numpy as np
import scaling_oracle
from comm_gemm_cases import normal

from jax_cp_dispatch import gemm
from jax_cp_dispatch.buffers import create_comm_overlap_buffer

E4M3, E5M2 = scaling_oracle.FORMATS
MODES = ["DELAYED_TENSOR_SCALING", "CURRENT_TENSOR_SCALING", "MXFP8_1D_SCALING"]
MXFP8, WIDE = MODES[2], "NO_SCALING"

# Options of each schedule's buffer.
GATHERING: dict[str, Any] = {
    "ring": {},
    "ring, no copies": {"use_ce": False},
    "ring, pairs": {"aggregate_ag": True},
    "ring, atomic": {"atomic_gemm": True},
    "ring, atomic, no copies": {"atomic_gemm": True, "use_ce": False},
}


class Scaled(NamedTuple):
    """An operand of one rank or, with a leading axis, of all ranks."""

    data: Any
    scale_inv: Any
    values: Any  # float64


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
    if mode != MXFP8:
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


def scaled(lhs, rhs, mode, **options):
    """Returns the call and its operands: data and scales; without scaling, no scales."""

    def call(*operands, **more):
        a, a_scale, b, b_scale = map(jnp.asarray, operands)
        scales = {"lhs_scale_inv": a_scale, "rhs_scale_inv": b_scale} if mode != WIDE else {}
        return gemm(a, b, scaling_mode=mode, **scales, **options, **more)

    return call, (*lhs[:2], *rhs[:2])


TRANSPOSED = list(itertools.product((False, True), repeat=2))  # lhs, rhs


def in_layout(left, right, m, k, n, draw):
    """Draws lhs and rhs, transposed or not; returns them with the dimensions to contract."""
    lhs = draw(0, (k, m) if left else (m, k), "column" if left else "row")
    rhs = draw(1, (n, k) if right else (k, n), "row" if right else "column")
    return lhs, rhs, ((0,) if left else (1,), (1,) if right else (0,))


def tiles_of(scales):
    """Line by line of lhs, or column by column of rhs; padded with zeros."""
    lines, blocks = scales.shape
    tiles = np.zeros((-(-lines // 128), -(-blocks // 4), 512), np.uint8)
    line, block = np.indices(scales.shape)
    tiles[line // 128, block // 4, scaling_oracle.tile_offset(line % 128, block % 4)] = scales
    return tiles


def gathering_ways(call, shape, dtype, num_ranks, columns):
    """The call with a buffer of this shape and type for each schedule; by XLA, too."""
    create = partial(create_comm_overlap_buffer, method="RING_EXCHANGE", tp_size=num_ranks)
    sums: Any = {"buffer_shape": (shape[0], columns), "buffer_dtype": "float32"}
    back, ways = create("RS", **sums, atomic_gemm=True), {}
    for name, options in GATHERING.items():
        if num_ranks % 2 == 0 or name != "ring, pairs":
            buffer = create("AG", buffer_shape=shape, buffer_dtype=dtype, **options)
            pair = back if "atomic" in name else None
            ways[name] = partial(call, comm_overlap=buffer, paired_comm_overlap=pair)
    of_xla = {f"{name}, xla": partial(ways[name], implementation="xla")
              for name in ("ring", "ring, atomic")}  # fmt: skip
    return {**ways, **of_xla}


# ---- Epilogues.


def draw(seed, num_ranks, mode, shape, layout="row") -> Scaled:
    """Operands whose products cover the range in which GELU bends, and beyond it."""
    if mode == WIDE:
        x = normal(seed, num_ranks, *shape) / np.float32(4)
        return Scaled(x, np.zeros((num_ranks, 1)), x.astype(np.float64))
    return drawn_by_ranks(seed, num_ranks, mode, E4M3, shape, layout, -9)


def all_epilogues(call, bias, gelu_input, **options):
    """Returns the epilogues by name, computed from the complete sum."""
    return {
        "bias": call(bias=bias, **options),
        "gelu": call(fuse_gelu=True, **options),
        "bias, gelu": call(bias=bias, fuse_gelu=True, **options),
        "dgelu": call(fuse_gelu=True, grad=True, gelu_input=gelu_input, **options),
        "dgelu, dbias": call(
            fuse_gelu=True, fuse_bias=True, grad=True, gelu_input=gelu_input, **options
        ),
        "dbias": call(fuse_bias=True, grad=True, **options),
    }


def check_all(results, product, bias, gelu_input, rhs_sum, name):
    """The product in float64, [..., m, n], and `rhs_sum`, the sum of rhs over the contraction."""
    near(results["bias"], product + bias, name)
    out, pre = results["gelu"]
    near(pre, product, name)
    near(out, gelu(product), name)
    out, pre = results["bias, gelu"]
    near(pre, product + bias, name)
    near(out, gelu(product + bias), name)
    want = product * gelu_derivative(gelu_input)
    near(results["dgelu"], want, name)
    out, dbias = results["dgelu, dbias"]
    near(out, want, name)
    near(dbias, np.asarray(out).astype(np.float64).sum(-2), name)
    out, dbias = results["dbias"]
    near(out, product, name)
    near(dbias, rhs_sum, name)
