"""combine sums in a wide type, in a fixed order, and rounds once."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from movement_oracle import combined, random_plan
from moving import bits, capacity_of, run_combine

from jax_cp_dispatch import compute_metadata

pytestmark = pytest.mark.usefixtures("full_optimization")  # roundings

W, S, T = 8, 6, 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "uint8"])
def test_combine_accumulates_in_a_wide_type_and_rounds_once(dtype):
    rng = np.random.default_rng(12)
    plan = random_plan(rng, W, S, T, 4)
    dtype = jnp.dtype(dtype)
    y = (100 * rng.normal(size=(W, capacity_of(plan), 5))).astype(dtype)
    wide = np.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype
    expected = combined(plan, y, T, wide)
    np.testing.assert_array_equal(bits(run_combine(plan, y, T)), bits(expected.astype(dtype)))
    if wide == np.float32:
        got = run_combine(plan, y, T, preferred_element_type=jnp.float32)
        np.testing.assert_array_equal(bits(got), bits(expected))
        got = run_combine(plan, y, T, preferred_element_type=jnp.bfloat16)
        np.testing.assert_array_equal(bits(got), bits(expected.astype(ml_dtypes.bfloat16)))


def test_half_precision_rounds_as_numpy_does_over_the_whole_range():
    """One replica of every float16, and one float32 sum of two, against NumPy's conversion."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = values[~np.isnan(values)]
    other = np.random.default_rng(0).permutation(values)
    num_tokens = len(values)
    plan = dict(
        dst_rank=np.array([[[0, 0]]], np.int32),
        dst_offset=np.array([[[0, num_tokens]]], np.uint32),
        seq_len=np.array([[num_tokens]], np.uint32),
        num_recv_tokens=np.array([[2 * num_tokens] * 2], np.uint32),
        num_seqs=np.array([1], np.int32),
        num_total_recv_tokens=np.array([2 * num_tokens], np.uint32),
        world_size=1,
    )
    y = np.concatenate([values, other])[None, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (values.astype(np.float32) + other.astype(np.float32)).astype(np.float16)
    got = run_combine(plan, y, num_tokens)[0, :, 0]
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(got[finite]), bits(expected[finite]))
    assert np.isnan(got[~finite]).all()


def test_combine_sums_in_the_preferred_type_if_it_is_wider():
    forward, _ = compute_metadata(np.full((2, 1), 1), np.array([[[0, 1]], [[0, 1]]]))
    y = np.full((2, 2, 3), 100, np.int8)
    metadata = {f.name: getattr(forward, f.name) for f in dataclasses.fields(forward)}
    got = run_combine(metadata, y, 1, preferred_element_type=np.int32)
    np.testing.assert_array_equal(got, np.full((2, 1, 3), 200, np.int32))
    got = run_combine(metadata, y, 1, preferred_element_type=np.float32)
    np.testing.assert_array_equal(got, np.full((2, 1, 3), 200, np.float32))
    assert run_combine(metadata, y, 1)[0, 0, 0] == np.int8(-56)  # in its own type it wraps
