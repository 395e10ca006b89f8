"""Inputs and key ranges of local attention, and the comparison of its results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Blocks are smaller than the arrays and do not divide them: every test crosses block borders.
BLOCKS: dict[str, Any] = {"block_q": 8, "block_kv": 16}


def inputs(seed, B=2, T=37, S=45, N=4, K=2, H=8, Hv=8, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv), (B, N, T))
    return tuple(
        jnp.asarray(rng.normal(size=s), d)
        for s, d in zip(shapes, (dtype,) * 3 + (jnp.float32,) * 2, strict=True)
    )


def rows(B, T, start, end) -> tuple[jax.Array, jax.Array]:
    position = np.arange(T)
    return (
        jnp.asarray(np.broadcast_to(start(position), (B, T)), jnp.int32),
        jnp.asarray(np.broadcast_to(end(position), (B, T)), jnp.int32),
    )


def random_ranges(seed, B, T, S) -> tuple[jax.Array, jax.Array]:
    """Any two integers, including ranges beyond both ends, empty and reversed ranges."""
    rng = np.random.default_rng(seed)
    start, end = rng.integers(-5, S + 6, (2, B, T))
    return jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)


RANGES = {
    "causal": lambda B, T, S: rows(B, T, lambda i: 0 * i, lambda i: i + 1),
    "full": lambda B, T, S: rows(B, T, lambda i: 0 * i, lambda i: 0 * i + S),
    "packed": lambda B, T, S: rows(B, T, lambda i: i // 11 * 11, lambda i: i + 1),
    "window": lambda B, T, S: rows(B, T, lambda i: np.maximum(i - 6, 0), lambda i: i + 1),
    "one_key": lambda B, T, S: rows(B, T, lambda i: S - 1 - i, lambda i: S - i),
    # Blocks of keys end with the range of their queries, one key later, and one earlier.
    "edges": lambda B, T, S: rows(B, T, lambda i: 13 + i // 8, lambda i: 28 + i // 8),
    "empty": lambda B, T, S: rows(B, T, lambda i: 0 * i + 3, lambda i: 0 * i + 3),
    "random": lambda B, T, S: random_ranges(3, B, T, S),
}


def assert_close(actual, expected, tolerance):
    """Compares relative to the largest expected magnitude; -inf must match exactly."""
    expected = np.asarray(expected)
    finite = np.isfinite(expected)
    actual = np.asarray(actual, np.float64)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    largest = np.max(np.abs(expected[finite]), initial=0)
    np.testing.assert_allclose(
        actual[finite], expected[finite], rtol=0, atol=tolerance * max(largest, 1e-3)
    )
