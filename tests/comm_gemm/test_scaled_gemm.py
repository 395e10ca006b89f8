"""`gemm` of 8-bit operands, on one device and between ranks: chunks move with their scales."""

import itertools
import math
from functools import partial

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaling_oracle
from comm_gemm_cases import equal
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from jaxprs import with_results_of
from on_mesh import AXIS, mesh_of, on_ranks
from scaled_gemm_cases import (
    E4M3,
    E5M2,
    GATHERING,
    MODES,
    MXFP8,
    TRANSPOSED,
    drawn,
    drawn_by_ranks,
    gathering_ways,
    in_layout,
    laid,
    near,
    padded,
    scaled,
    tiles_of,
)

from jax_cp_dispatch.buffers import create_comm_overlap_buffer

TYPES = [(E4M3, E5M2), (E5M2, E4M3)]
T, K, N = 3, 64, 6
WIDE = {"preferred_element_type": jnp.float32}


def tiles(call, *operands):
    """Computes the scales as tensor cores read them, which no call returns: of lhs, of rhs."""
    results = with_results_of(call, "gemm", *operands)
    return [x for x in results if x.dtype == jnp.uint8 and x.ndim == 3]


def read(operands):
    """Returns operands whose scales are padded with zeros, as tiles are."""
    return [np.where(x == 255, np.uint8(0), x) if x.dtype == np.uint8 else x for x in operands]


# ---- On one device.


@pytest.mark.parametrize("mode", MODES[1:])
def test_every_transposition_and_type(mode):
    """Two contracted dimensions, blocks of 32 across their border, two free ones on each side."""
    rows, contracted, columns = (5, 7), (2, 48), (3, 13)
    m, k, n = map(math.prod, (rows, contracted, columns))
    calls, operands, wants = {}, {}, {}
    for (left, right), types in zip(TRANSPOSED, itertools.cycle(TYPES), strict=False):
        draw = lambda seed, *how, types=types: drawn(seed, mode, types[seed], *how)
        lhs, rhs, _ = in_layout(left, right, m, k, n, draw)
        key = f"{left}, {right}, {types}"
        of_lhs, of_rhs = lhs.values.T if left else lhs.values, rhs.values.T if right else rhs.values
        wants[key] = (of_lhs @ of_rhs).reshape(*rows, *columns)
        call, (a, a_scale, b, b_scale) = scaled(lhs, rhs, mode)
        a = a.reshape((*contracted, *rows) if left else (*rows, *contracted))
        b = b.reshape((*columns, *contracted) if right else (*contracted, *columns))
        operands[key] = a, a_scale, b, b_scale
        dims = ((0, 1) if left else (2, 3), (2, 3) if right else (0, 1))
        calls[key] = partial(call, contracting_dims=dims)

    def local(operands):
        return {
            key: (
                call(*operands[key], **WIDE),
                call(*operands[key], use_split_accumulator=False),
                call(*operands[key], implementation="xla", **WIDE),
            )
            for key, call in calls.items()
        }

    for key, (wide, natural, by_xla) in jax.jit(local)(operands).items():
        assert (wide.dtype, natural.dtype) == (jnp.float32, jnp.bfloat16)
        near(wide, wants[key], key)
        near(by_xla, wants[key], key)
        equal(natural, np.asarray(wide.astype(jnp.bfloat16), np.float64), key)


@pytest.mark.parametrize("mode, turned", [(MODES[1], False), (MXFP8, True)])
def test_several_widened_blocks(mode, turned):
    """Several blocks of rows, columns and the contraction; only float32 is written in place."""
    draw = lambda seed, *shape: drawn(seed, mode, (E4M3, E5M2)[seed], *shape)
    lhs, rhs, dims = in_layout(turned, turned, 530, 544, 1040, draw)
    want = lhs.values.T @ rhs.values.T if turned else lhs.values @ rhs.values
    call, operands = scaled(lhs, rhs, mode)
    for out in ("float32", "bfloat16"):
        near(call(*operands, contracting_dims=dims, preferred_element_type=out), want)


def test_special_blocks():
    """Scales 2**-127, 2**127 and NaN, and NaN bytes; nothing reaches another row."""
    rng = np.random.default_rng(0)
    data = rng.integers(1, 8, (5, 64)).astype(np.uint8)  # the smallest magnitudes
    data[0] += 0x70  # of the largest magnitudes, so products are normal floats
    data[3, 2] = 0x7F
    scales = np.full((5, 2), 127, np.uint8)
    scales[0], scales[1], scales[2, 1] = 0, 254, 255
    one = padded(np.full((2, 3), 127, np.uint8), "column")
    call, _ = scaled((), (), MXFP8)
    operands = data.view(E4M3), padded(scales, "row"), np.ones((64, 3), E4M3), one
    exact = scaling_oracle.mxfp8_value(data, scales, E4M3).sum(1)
    want = np.repeat(exact[:, None], 3, axis=1)
    assert np.isnan(want[2:4]).all() and np.isfinite(want[[0, 1, 4]]).all()
    for implementation in (None, "xla"):
        got = call(*operands, implementation=implementation, **WIDE)
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-6)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_scales_as_tensor_cores_read_them(implementation):
    """Scales of both operands in tiles, from either layout, several tiles; padded with zeros."""
    for left, right in ((False, True), (True, False)):
        draw = lambda seed, *shape: drawn(seed, MXFP8, E4M3, *shape)
        lhs, rhs, dims = in_layout(left, right, 130, 160, 70, draw)
        call, operands = scaled(lhs, rhs, MXFP8)
        if implementation == "xla":  # keeps the padding unchanged
            operands = read(operands)
        call = partial(call, contracting_dims=dims, implementation=implementation)
        of_lhs, of_rhs = tiles(call, *operands)
        equal(of_lhs, tiles_of(laid(lhs.scale_inv, "column" if left else "row")[:130, :5]))
        equal(of_rhs, tiles_of(laid(rhs.scale_inv, "row" if right else "column")[:70, :5]))


# ---- Between ranks.


@pytest.mark.parametrize(
    "num_ranks, mode, order",
    [(4, MXFP8, (2, 0, 3, 1)), (1, MODES[1], None), (3, MODES[0], (1, 2, 0))],
)
def test_chunks_are_gathered_with_their_scales(num_ranks, mode, order):
    """Every rank's tensor has its own scale; the 8-bit values are gathered."""
    p = num_ranks
    lhs = drawn_by_ranks(0, p, mode, E5M2, (T, K))
    rhs = drawn_by_ranks(1, p, mode, E4M3, (K, N), "column")
    call, operands = scaled(lhs, rhs, mode, axis_name=AXIS, **WIDE)
    ways = gathering_ways(call, (p * T, K), E5M2, p, N)

    def local(*operands):
        return {name: (way(*operands), *way(*operands, return_aux=True))
                for name, way in ways.items()}  # fmt: skip

    results = on_ranks(local, mesh_of(p, order))(*operands)
    for name, (alone, out, aux) in results.items():
        is_atomic = "atomic" in name
        want, _ = oracle.engine_gather(lhs.values, rhs.values, atomic=is_atomic)
        near(alone, want, name)
        near(out, want, name)
        gathered = np.stack([np.concatenate(lhs.data)] * p)
        assert aux.dtype == E5M2
        equal(np.asarray(aux).view(np.uint8), (lhs.data if is_atomic else gathered).view(np.uint8))


def test_moved_scales_as_tensor_cores_read_them_are_in_rank_order():
    """Scales of gathered rows are in rank order; with bulk or sums, a rank has its own scales."""
    p, lines = 4, 40  # the gathered lines fill one tile and start another
    lhs = drawn_by_ranks(0, p, MXFP8, E4M3, (lines, K))
    rhs = drawn_by_ranks(1, p, MXFP8, E4M3, (K, N), "column")
    call, operands = scaled(lhs, rhs, MXFP8, axis_name=AXIS)
    create = partial(create_comm_overlap_buffer, tp_size=p)
    rings = [
        create("AG", "RING_EXCHANGE", (p * lines, K), E4M3, **options)
        for options in list(GATHERING.values())[:3]
    ]
    rings = [partial(call, return_aux=True, comm_overlap=ring) for ring in rings]
    rings.append(partial(rings[0], implementation="xla"))
    bulk = partial(call, comm_overlap=create("AG", "BULK", (p * lines, 7), "float32"))
    bulk = partial(bulk, aux_in=jnp.zeros((lines, 7)))
    summed = partial(call, comm_overlap=create("RS", "RING_EXCHANGE", (lines, N), "float32"))
    local = lambda *operands: [tiles(way, *operands) for way in (*rings, bulk, summed)]
    got = on_ranks(local, mesh_of(p, (2, 0, 3, 1)))(*read(operands))
    own = lhs.scale_inv[:, :lines, : K // 32]
    for i, (of_lhs, of_rhs) in enumerate(got):
        for rank in range(p):
            want = np.concatenate(own) if i < len(rings) else own[rank]
            equal(of_lhs[rank], tiles_of(want), i)
            equal(of_rhs[rank], tiles_of(rhs.scale_inv[rank][: K // 32, :N].T), i)
