"""`gemm` of 8-bit operands on one device: every transposition, type and scaling mode."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaling_oracle
from comm_gemm_cases import equal
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from scaled_gemm_cases import (
    E4M3,
    E5M2,
    MODES,
    MXFP8,
    drawn,
    drawn_by_ranks,
    laid,
    near,
    padded,
    scaled,
    tiles_of,
)

from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch.comm_gemm.engine.gemm_call import GemmCall
from jax_cp_dispatch.comm_gemm.engine.primitive import bind_gemm
from jax_cp_dispatch.scaling import ScalingMode

TYPES = [(E4M3, E5M2), (E5M2, E4M3)]
SCALED = "lhs", "lhs_scale_inv", "rhs", "rhs_scale_inv"
LAYOUTS = list(itertools.product((False, True), (False, True)))  # lhs, rhs transposed


@pytest.mark.parametrize("mode", MODES[1:])
def test_every_transposition_and_type(mode):
    """Two contracted dimensions, blocks of 32 across their border, two free ones on each side."""
    rows, contracted, columns = (5, 7), (2, 48), (3, 13)
    calls, operands, wants = {}, {}, {}
    for (left, right), (lhs_type, rhs_type) in itertools.product(LAYOUTS, TYPES):
        lhs_shape = (*contracted, *rows) if left else (*rows, *contracted)
        rhs_shape = (*columns, *contracted) if right else (*contracted, *columns)
        flat = lambda shape: (np.prod(shape[:2]), np.prod(shape[2:]))
        lhs = drawn(1, mode, lhs_type, flat(lhs_shape), "column" if left else "row")
        rhs = drawn(2, mode, rhs_type, flat(rhs_shape), "row" if right else "column")
        key = f"{left}, {right}, {lhs_type}, {rhs_type}"
        a, b = (values.T if turned else values
                for values, turned in ((lhs.values, left), (rhs.values, right)))  # fmt: skip
        wants[key] = (a @ b).reshape(*rows, *columns)
        call, (a, a_scale, b, b_scale) = scaled(lhs, rhs, mode)
        operands[key] = a.reshape(lhs_shape), a_scale, b.reshape(rhs_shape), b_scale
        dims = ((0, 1) if left else (2, 3), (2, 3) if right else (0, 1))
        calls[key] = partial(call, contracting_dims=dims)

    def local(operands):
        of_xla = partial(dict, implementation="xla", preferred_element_type=jnp.float32)
        return {
            key: (
                call(*operands[key], preferred_element_type=jnp.float32),
                call(*operands[key]),
                call(*operands[key], use_split_accumulator=False),
                call(*operands[key], **of_xla()),
            )
            for key, call in calls.items()
        }

    for key, (wide, natural, fast, by_xla) in jax.jit(local)(operands).items():
        assert (wide.dtype, natural.dtype) == (jnp.float32, jnp.bfloat16)
        near(wide, wants[key], key)
        near(by_xla, wants[key], key)
        near(natural, wants[key], key)
        equal(natural, np.asarray(wide.astype(jnp.bfloat16), np.float64), key)
        equal(fast, np.asarray(natural, np.float64), key)


@pytest.mark.parametrize("mode, turned", [(MODES[1], False), (MXFP8, True)])
def test_several_widened_blocks(mode, turned):
    """Several blocks of rows, columns and the contraction; only float32 is written in place."""
    m, k, n = 530, 544, 1040
    lhs = drawn(0, mode, E4M3, (k, m) if turned else (m, k), "column" if turned else "row")
    rhs = drawn(1, mode, E5M2, (n, k) if turned else (k, n), "row" if turned else "column")
    want = lhs.values.T @ rhs.values.T if turned else lhs.values @ rhs.values
    call, operands = scaled(lhs, rhs, mode)
    dims = ((0,), (1,)) if turned else ((1,), (0,))
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
    ones = np.ones((64, 3), E4M3)
    one = padded(np.full((2, 3), 127, np.uint8), "column")
    call, _ = scaled((), (), MXFP8)
    operands = data.view(E4M3), padded(scales, "row"), ones, one
    exact = scaling_oracle.mxfp8_value(data, scales, E4M3).sum(1)
    want = np.repeat(exact[:, None], 3, axis=1)
    assert np.isnan(want[2:4]).all() and np.isfinite(want[[0, 1, 4]]).all()
    for implementation in (None, "xla"):
        got = call(*operands, preferred_element_type=jnp.float32, implementation=implementation)
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-6)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_scales_as_tensor_cores_read_them(implementation):
    """Scales of both operands in tiles, from either layout, several tiles; padded with zeros."""
    m, k, n = 130, 160, 70
    calls, operands, wants = {}, {}, {}
    for left, right in LAYOUTS:
        lhs = drawn(0, MXFP8, E4M3, (k, m) if left else (m, k), "column" if left else "row")
        rhs = drawn(1, MXFP8, E4M3, (n, k) if right else (k, n), "row" if right else "column")
        name = f"{left}, {right}"
        calls[name] = GemmCall(
            op="gemm",
            comm=Communicator(implementation=implementation),
            lhs_boundary=1,
            rhs_boundary=1,
            out_shape=(m, n),
            out_dtype="float32",
            lhs_transposed=left,
            rhs_transposed=right,
            scaling_mode=ScalingMode.MXFP8_1D_SCALING,
        )
        scales = [lhs.scale_inv, rhs.scale_inv]
        if implementation == "xla":  # keeps the padding unchanged
            scales = [np.where(scale == 255, np.uint8(0), scale) for scale in scales]
        operands[name] = dict(zip(SCALED, (lhs.data, scales[0], rhs.data, scales[1]), strict=True))
        of_lhs = laid(lhs.scale_inv, "column" if left else "row")
        of_rhs = laid(rhs.scale_inv, "row" if right else "column")
        wants[name] = [tiles_of(x[:lines, : k // 32]) for x, lines in ((of_lhs, m), (of_rhs, n))]

    # The public API does not return them.
    bind = lambda operands: {name: bind_gemm(calls[name], **x) for name, x in operands.items()}
    for name, results in jax.jit(bind)(operands).items():
        equal(results.lhs_swizzled, wants[name][0], name)
        equal(results.rhs_swizzled, wants[name][1], name)


@pytest.mark.parametrize("mode", MODES[1:])
def test_examples_under_vmap(mode):
    """Each example has its own scales, or all share one operand."""
    lhs = drawn_by_ranks(0, 3, mode, E4M3, (4, 64))
    rhs = drawn_by_ranks(1, 3, mode, E4M3, (64, 6), "column")
    call, operands = scaled(lhs, rhs, mode)
    call = partial(call, preferred_element_type=jnp.float32)
    shared = [x[0] for x in operands[2:]]
    run = lambda *all: (jax.vmap(call)(*all), jax.vmap(call, (0, 0, None, None))(*all[:2], *shared))
    each, one = jax.jit(run)(*operands)
    near(each, lhs.values @ rhs.values)
    near(one, lhs.values @ rhs.values[0])


def test_empty_operands():
    one = np.ones(1, np.float32)
    for m, k, n in ((0, 64, 6), (4, 0, 6), (4, 64, 0)):
        call, _ = scaled((), (), MODES[1])
        got = call(jnp.zeros((m, k), E4M3), one, jnp.zeros((k, n), E4M3), one)
        assert got.dtype == jnp.bfloat16
        equal(got, np.zeros((m, n)))
