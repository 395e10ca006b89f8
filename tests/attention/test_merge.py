"""Merging two partial softmaxes: the definition, an lse of -inf, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.test_util import check_grads
from properties import examples

from jax_cp_dispatch import merge_partials

SHAPE = B, T, N, HV = 2, 3, 4, 5


def partial_result(rng, empty_share=0.0):
    """Returns an output and its lse; rows without keys are (0, -inf), as in `local_attention`."""
    out, lse = rng.normal(size=SHAPE), rng.normal(size=(B, N, T)) * 5
    lse = np.where(rng.random(lse.shape) < empty_share, -np.inf, lse)
    out = np.where(np.swapaxes(lse, 1, 2)[..., None] > -np.inf, out, 0)
    return out, lse


def merged_by_definition(out, lse, block_out, block_lse):
    weights = [np.swapaxes(np.exp(x), 1, 2)[..., None] for x in (lse, block_lse)]
    total = weights[0] + weights[1]
    merged = (weights[0] * out + weights[1] * block_out) / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return merged, np.log(np.exp(lse) + np.exp(block_lse))


def merge_pair(a, b):
    return merge_partials(a[0], a[1], b[0], b[1])


def float32(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


@given(seed=st.integers(0, 2**32 - 1), empty_share=st.sampled_from([0.0, 0.5, 1.0]))
@examples(15)
def test_merge_partials_equals_the_definition(seed, empty_share):
    rng = np.random.default_rng(seed)
    parts = *partial_result(rng, empty_share), *partial_result(rng, empty_share)
    out, lse = merge_partials(*float32(*parts))
    expected_out, expected_lse = merged_by_definition(*parts)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_order_and_grouping_do_not_matter():
    rng = np.random.default_rng(1)
    a, b, c = (float32(*partial_result(rng, 0.3)) for _ in range(3))
    left = merge_pair(merge_pair(a, b), c)
    right = merge_pair(a, merge_pair(c, b))
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_an_empty_side_returns_the_other_exactly():
    full = float32(*partial_result(np.random.default_rng(2)))
    empty = jnp.zeros(SHAPE), jnp.full((B, N, T), -jnp.inf)
    for merged in (merge_pair(full, empty), merge_pair(empty, full)):
        for x, y in zip(merged, full, strict=True):
            np.testing.assert_array_equal(x, y)


def test_two_empty_sides_have_finite_zero_gradients():
    empty = jnp.zeros(SHAPE), jnp.full((B, N, T), -jnp.inf)
    (out, lse), vjp = jax.vjp(merge_partials, *empty, *empty)
    assert not np.any(out) and np.all(np.isneginf(lse))
    for gradient in vjp((jnp.ones_like(out), jnp.ones_like(lse))):
        np.testing.assert_array_equal(gradient, 0)


def test_gradients_with_one_empty_side_are_finite():
    rng = np.random.default_rng(3)
    parts = float32(*partial_result(rng, 0.5), *partial_result(rng, 0.5))
    (out, lse), vjp = jax.vjp(merge_partials, *parts)
    for gradient in vjp((jnp.ones_like(out), jnp.ones_like(lse))):
        assert np.all(np.isfinite(gradient))


def test_gradients_match_numerical_ones():
    rng = np.random.default_rng(4)
    with jax.enable_x64(True):
        parts = tuple(jnp.asarray(x) for x in (*partial_result(rng), *partial_result(rng)))
        check_grads(jax.jit(merge_partials), parts, order=2, modes=["fwd", "rev"], rtol=1e-5)


def test_extreme_logarithms_do_not_overflow():
    out, block_out = jnp.ones(SHAPE), jnp.full(SHAPE, 3.0)
    lse, block_lse = jnp.full((B, N, T), 3e4), jnp.full((B, N, T), -3e4)
    merged, total = merge_partials(out, lse, block_out, block_lse)
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(total, lse)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_result_is_float32(dtype):
    parts = partial_result(np.random.default_rng(5))
    parts = tuple(jnp.asarray(x, dtype) for x in parts)
    assert all(x.dtype == jnp.float32 for x in merge_partials(*parts, *parts))
