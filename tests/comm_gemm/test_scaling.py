"""8-bit operands: values, rounding, block scales, their byte order, and delayed scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaling_oracle as oracle
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks
from properties import examples
from scaled_gemm_cases import laid

from jax_cp_dispatch.scaling import (
    DelayedScaling,
    Quantized,
    ScalingMode,
    dequantize,
    pad_scales,
    quantize,
    swizzle_scales,
    unpad_scales,
    unswizzle_scales,
)

pytestmark = pytest.mark.usefixtures("full_optimization")  # roundings

CURRENT, DELAYED = ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.DELAYED_TENSOR_SCALING
MXFP8 = ScalingMode.MXFP8_1D_SCALING
NAMES = list(oracle.FORMATS)
LAYOUTS = ["row", "column"]
SHAPE = 8, 64  # one program for each mode, type and layout
TINY = np.float32(2.0**-126)  # smallest normal

seeds = st.integers(0, 2**32 - 1)
bounded = examples(10)
statics = "mode", "dtype", "layout", "axis_name"
quantize_jit = jax.jit(quantize, static_argnames=statics)
dequantize_jit = jax.jit(dequantize, static_argnames="dtype")
update_jit = jax.jit(DelayedScaling.update, static_argnames=("dtype", "margin", "axis_name"))


def bytes_of(data):
    """Returns bytes like the oracle's `encode`: -1 for any NaN."""
    data = np.asarray(data)
    return np.where(np.isnan(data.astype(np.float32)), -1, data.view(np.uint8).astype(int))


def wide_range(seed, low=-140, high=127):
    """Float32 values of all magnitudes, a different one per block, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    center = np.repeat(rng.integers(low, high, (SHAPE[0], SHAPE[1] // 32)), 32, axis=1)
    exponent = np.clip(center + rng.integers(-20, 2, SHAPE), -149, 126)
    x = np.ldexp(rng.uniform(1, 2, SHAPE) * rng.choice([-1.0, 1.0], SHAPE), exponent)
    return np.where(rng.random(SHAPE) < 0.1, np.copysign(0, x), x).astype(np.float32)


def assert_mxfp8(x, name, layout="row"):
    q = quantize_jit(laid(x, layout), MXFP8, dtype=jnp.dtype(name), layout=layout)
    data, scales = oracle.mxfp8(x, name)
    np.testing.assert_array_equal(laid(q.scale_inv, layout), scales)
    np.testing.assert_array_equal(laid(bytes_of(q.data), layout), data)
    assert q.data.dtype == name and q.scale_inv.dtype == jnp.uint8
    return q


# ---- bytes


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_has_the_value_of_its_table(name):
    data = np.arange(256, dtype=np.uint8).view(name).reshape(8, 32)
    one = np.ones(1, np.float32)
    value = dequantize_jit(Quantized(data=data, scale_inv=one, mode=CURRENT))
    np.testing.assert_array_equal(np.asarray(value).ravel(), oracle.table(name))
    is_number = ~np.isnan(oracle.table(name))
    signs, expected = (np.signbit(x).ravel()[is_number] for x in (value, oracle.table(name)))
    np.testing.assert_array_equal(signs, expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_scale_byte_is_a_power_of_two(name):
    finite = np.arange(oracle.magnitudes(name).size, dtype=np.uint8)
    data = np.tile(np.resize(finite, 128), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], 4)
    q = Quantized(data=data.view(name), scale_inv=scales, mode=MXFP8)
    exact = oracle.mxfp8_value(data, scales, name)
    expected = oracle.flushed(exact)
    value = np.asarray(dequantize_jit(q))
    is_normal = ~(np.abs(exact) < TINY)
    np.testing.assert_array_equal(value[is_normal], expected[is_normal])
    assert np.all(np.isin(value[~is_normal], [0.0]) | (value == exact)[~is_normal])
    assert np.isnan(value[255]).all() and np.any(value[0] != 0)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_to_nearest_and_to_even(name):
    """Every 16-bit float, ties and their neighbours, values that saturate, NaN, and zeros."""
    half, brain = (np.arange(2**16, dtype=np.uint16).view(x) for x in ("float16", "bfloat16"))
    tie = oracle.ties(name).astype(np.float32)
    assert np.all(tie == oracle.ties(name))
    beside = np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf))
    others = [oracle.largest(name) * 1.5, np.inf, 3e38, np.nan, 0.0, 1e-45]
    parts = half, brain, tie, *beside, others
    x = np.concatenate([np.asarray(part).astype(np.float32) for part in parts])
    x = np.concatenate([x, -x])
    q = quantize_jit(x, DELAYED, dtype=jnp.dtype(name), state=DelayedScaling.init())
    np.testing.assert_array_equal(bytes_of(q.data), oracle.encode(oracle.flushed(x), name))


# ---- tensor scaling


@pytest.mark.parametrize("name", NAMES)
@bounded
@given(seed=seeds)
def test_current_scaling_equals_the_oracle(name, seed):
    x = wide_range(seed)
    scale = oracle.tensor_scale(np.max(np.abs(oracle.flushed(x))), name)
    q = quantize_jit(x, CURRENT, dtype=jnp.dtype(name))
    np.testing.assert_array_equal(q.scale_inv, [1 / scale])
    np.testing.assert_array_equal(bytes_of(q.data), oracle.tensor(x, scale, name))
    value = oracle.table(name)[bytes_of(q.data)].astype(np.float32) * np.float32(1 / scale)
    np.testing.assert_array_equal(dequantize_jit(q), oracle.flushed(value))


def test_scale_is_1_without_a_usable_amax():
    for worst in (0.0, np.nan, np.inf, -np.inf, 1e-40):
        x = np.zeros(SHAPE, np.float32)
        x[0, :3] = 1.0, 1000.0, worst
        x[0, :2] *= not np.isfinite(worst)
        q = quantize_jit(x, CURRENT, dtype=jnp.dtype(NAMES[0]))
        assert np.asarray(q.scale_inv) == [1]
        np.testing.assert_array_equal(bytes_of(q.data), oracle.encode(oracle.flushed(x), NAMES[0]))


def test_scales_of_extreme_tensors_have_an_inverse():
    for amax in (2.0**-126, 3.4e38):
        x = np.full(SHAPE, amax, np.float32)
        q = quantize_jit(x, CURRENT, dtype=jnp.dtype(NAMES[0]))
        assert TINY <= np.asarray(q.scale_inv) < np.inf
        np.testing.assert_allclose(dequantize_jit(q), x, rtol=1e-6)


def test_ranks_share_the_current_scale():
    x = np.stack([wide_range(rank, low=rank, high=rank + 1) for rank in range(4)])
    of_ranks = on_ranks(lambda x: quantize(x, CURRENT, axis_name=AXIS), mesh_of(4, [2, 0, 3, 1]))
    for entry in (1.0, np.nan, np.inf):
        x[2, 0, 0] = entry
        q, scale = of_ranks(x), oracle.tensor_scale(np.max(np.abs(x)), NAMES[0])
        np.testing.assert_array_equal(q.scale_inv, np.full((4, 1), 1 / scale))
        np.testing.assert_array_equal(bytes_of(q.data), oracle.tensor(x, scale, NAMES[0]))


# ---- delayed scaling


@pytest.mark.parametrize(("name", "margin"), [(NAMES[0], 0), (NAMES[1], 2)])
def test_delayed_scaling_step_by_step(name, margin):
    state, rng = DelayedScaling.init(), np.random.default_rng(0)
    history, scale = np.zeros(oracle.HISTORY, np.float32), np.float32(1)
    for factor in [0.0, 1.0, 8.0, np.nan, 2.0, np.inf, 0.0, 1e-3, 1e30]:
        x = (rng.normal(size=SHAPE) * factor).astype(np.float32)
        q = quantize_jit(x, DELAYED, dtype=jnp.dtype(name), state=state)
        np.testing.assert_array_equal(q.scale_inv, [1 / scale])
        np.testing.assert_array_equal(bytes_of(q.data), oracle.tensor(x, scale, name))
        state = update_jit(state, x, dtype=jnp.dtype(name), margin=margin)
        history, scale = oracle.next_state(history, scale, x, name, margin)
        np.testing.assert_array_equal(state.scale, [scale])
        np.testing.assert_array_equal(state.amax_history, history)


def test_the_history_forgets_after_1024_steps():
    amaxes = np.full(oracle.HISTORY + 3, 7.0, np.float32)
    amaxes[:2] = np.nan, 100.0
    amaxes[-2] = np.inf  # when 100 leaves the history, the scale is kept for one more step

    @jax.jit
    def run(amaxes):
        step = lambda state, amax: (state := state.update(amax[None]), state.scale[0])
        return jax.lax.scan(step, DelayedScaling.init(), amaxes)

    state, scales = run(amaxes)
    expected = np.full(len(amaxes), oracle.tensor_scale(100, NAMES[0]))
    expected[0], expected[-1] = 1, oracle.tensor_scale(7, NAMES[0])
    np.testing.assert_array_equal(scales, expected)
    np.testing.assert_array_equal(state.amax_history, amaxes[:2:-1])


def test_ranks_share_the_delayed_scale():
    x = np.arange(1, 5, dtype=np.float32)[:, None]
    step = lambda x: DelayedScaling.init().update(x, axis_name=AXIS)
    state = jax.jit(jax.shard_map(step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P()))(x)
    np.testing.assert_array_equal(state.scale, [oracle.tensor_scale(4, NAMES[0])])


# ---- MXFP8


@pytest.mark.parametrize("name, layout", list(zip(NAMES, LAYOUTS, strict=True)))
@bounded
@given(seed=seeds)
def test_mxfp8_equals_the_oracle(name, layout, seed):
    x = wide_range(seed)
    q = assert_mxfp8(x, name, layout)
    data, scales = oracle.mxfp8(x, name)
    exact = oracle.mxfp8_value(data, scales, name)
    value = laid(dequantize_jit(q), layout)
    is_normal = (np.abs(exact) >= TINY) | (exact == 0)
    np.testing.assert_array_equal(value[is_normal], exact[is_normal])
    block_amax = np.abs(x).reshape(SHAPE[0], -1, 32).max(-1).repeat(32, 1)
    step = 2.0 ** -(oracle.FORMATS[name][1] + 1)
    assert np.all(np.abs(value - x) <= np.maximum(step * block_amax, TINY))


@pytest.mark.parametrize("name", NAMES)
def test_block_scales_change_just_above_the_largest_value(name):
    x = np.zeros(SHAPE, np.float32)
    top = np.float32(oracle.largest(name))
    x[0, 5], x[1, 5], x[2, 5] = top, np.nextafter(top, np.float32(np.inf)), top / 2
    q = assert_mxfp8(x, name)
    np.testing.assert_array_equal(np.asarray(q.scale_inv)[:4, 0], [127, 128, 126, 0])
    np.testing.assert_array_equal(np.asarray(q.scale_inv)[:, 1], 0)


def test_zero_tiny_and_special_blocks():
    x = np.tile(np.array([1.0, -2.0], np.float32), (SHAPE[0], 32))
    x[0, :32] = -0.0
    x[1, :32], x[1, 3] = 0, TINY  # the exponent would be below e8m0's
    x[2, :32], x[2, 3] = 0, 1e-40
    x[3, 4], x[4, 4], x[5, 4] = np.nan, np.inf, -np.inf
    x[6, 4], x[7, 4] = 1.75 * 2.0**127, np.finfo(np.float32).max  # that rounds to 2**128
    for name, layout in zip(NAMES, LAYOUTS, strict=True):
        q = assert_mxfp8(x, name, layout)
        scales, value = laid(q.scale_inv, layout), laid(dequantize_jit(q), layout)
        np.testing.assert_array_equal(scales[:6, 0], [0, 0, 0, 255, 255, 255])
        assert np.all(np.signbit(value[0, :32])) and value[1, 3] == TINY and value[2, 3] == 0
        assert np.all(np.isnan(value[3:6, :32]))
        assert value[6, 4] == x[6, 4] and value[7, 4] == np.inf
        np.testing.assert_array_equal(value[:6, 32:], x[:6, 32:])


def test_inputs_and_outputs_of_any_float_type():
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    for dtype in (jnp.float16, jnp.bfloat16):
        narrow = x.astype(dtype)
        q = assert_mxfp8(narrow, NAMES[0])
        value = dequantize_jit(q, dtype=dtype)
        np.testing.assert_array_equal(value, np.asarray(dequantize_jit(q)).astype(dtype))


# ---- block scales as tensor cores read them: whole tiles, in the order of bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_in_whole_tiles(layout):
    """Padded with zeros; in the order of the formula, and back."""
    scales = np.random.default_rng(0).integers(1, 255, (130, 9)).astype(np.uint8)
    padded = pad_scales(jnp.asarray(laid(scales, layout)), layout=layout)
    whole = np.zeros((256, 12), np.uint8)
    whole[:130, :9] = scales
    np.testing.assert_array_equal(laid(padded, layout), whole)
    np.testing.assert_array_equal(pad_scales(padded, layout=layout), padded)
    np.testing.assert_array_equal(unpad_scales(jnp.asarray(whole), shape=(130, 9)), scales)
    tiles = swizzle_scales(padded, layout=layout)
    row, block = np.indices(whole.shape)
    offset = oracle.tile_offset(row % 128, block % 4)
    np.testing.assert_array_equal(np.asarray(tiles)[row // 128, block // 4, offset], whole)
    np.testing.assert_array_equal(unswizzle_scales(tiles, layout=layout), padded)


# ---- transformations


@pytest.mark.parametrize("mode", [CURRENT, DELAYED, MXFP8])
def test_the_derivative_is_zero(mode):
    """Of rounding, and of the update of a state."""
    x = jnp.asarray(wide_range(0, low=-3, high=3))
    state = DelayedScaling.init() if mode == DELAYED else None
    update = lambda x, state: 0 if state is None else state.update(x).scale[0]
    rounded = lambda x, state: dequantize(quantize(x, mode, state=state))
    loss = lambda x, state: jnp.sum(x + rounded(x, state)) + update(x, state)
    gradient, of_state = jax.jit(jax.grad(loss, (0, 1)))(x, state)
    tangent = jax.jit(lambda x: jax.jvp(lambda x: loss(x, state), (x,), (jnp.ones_like(x),))[1])
    np.testing.assert_array_equal(gradient, 1)
    assert tangent(x) == x.size and not any(np.any(leaf) for leaf in jax.tree.leaves(of_state))


def test_tensors_without_elements():
    q = quantize_jit(jnp.zeros((0, 64)), CURRENT)
    assert np.asarray(q.scale_inv) == [1] and dequantize_jit(q).shape == (0, 64)
    blocks = quantize_jit(jnp.zeros((3, 0)), MXFP8)
    assert blocks.scale_inv.shape == (3, 0) and dequantize_jit(blocks).shape == (3, 0)
