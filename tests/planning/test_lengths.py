"""Document lengths in every form that a data loader has, and those that cannot be planned."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_cp_dispatch import PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.planning.request import static_size


def plan(lengths: Any, **options: Any):
    return plan_attention(lengths=lengths, **options)


def place(lengths: Any, **options: Any):
    return place_tokens(lengths, **options).plan


both = pytest.mark.parametrize("make", [plan, place])


def forms():
    """Returns the same lengths in different forms; iterators anew each time."""
    return [
        (5, 3, 4),
        np.array([5, 3, 4], np.uint8),
        jnp.array([5, 3, 4]),
        [np.int64(5), np.array(3), jnp.int32(4)],
        iter([5, 3, 4]),
        [iter([5, 3, 4])],
        [np.array([5, 3, 4])],
        [jnp.array([5, 3, 4])],
    ]


@both
def test_all_forms_are_the_same_lengths(make, unchecked_types):
    expected = make([[5, 3, 4]], world_size=2)
    for lengths in forms():
        found = make(lengths, world_size=2)
        for name in ("run_row", "run_position", "run_origin", "fingerprint"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert found.num_tokens == expected.num_tokens == 6


@both
def test_numpy_sizes_do_not_overflow(make, unchecked_types):
    """Products of sizes in 32 bits would."""
    found = make([2**20] * 4096, world_size=np.int32(4096), rank=np.int32(1))
    assert found.num_tokens == 2**20 and type(found.world_size) is int


@both
@pytest.mark.parametrize(
    "lengths, message",
    [
        (5, r"lengths is 5; it needs a list of lengths, such as \[700, 200\]"),
        ([3, [4]], "batch row 0 are numbers and lists; they need to be a list"),
        ([[4], 3], r"batch row 1 are int64 of shape \(\); they need to be a list of integers"),
        ([[True]], r"batch row 0 are bool of shape \(1,\)"),
    ],
)
def test_other_types_are_rejected(make, lengths, message, unchecked_types):
    with pytest.raises(TypeError, match=message):
        make(lengths, world_size=2)


@both
@pytest.mark.parametrize(
    "lengths, message",
    [
        ([7, 2**31], "document 1 of batch row 0 has 2147483648 tokens, but positions have 32 bits"),
        (np.array([2**63 + 5], np.uint64), "has 9223372036854775813 tokens, but positions have 32"),
        ([2**30] * 16, "a rank would hold 8589934592 tokens, but row numbers have 32 bits"),
    ],
)
def test_sizes_beyond_32_bits_are_rejected(make, lengths, message):
    with pytest.raises(ValueError, match=message):
        make(lengths, world_size=2)


@both
def test_counts_beyond_64_bits_are_rejected(make):
    long = 2**31 - 1
    make([long], world_size=2)
    with pytest.raises(ValueError, match="query-key pairs of 8589934588 tokens exceed 62 bits"):
        make([long] * 4, world_size=4)


def test_received_rows_beyond_32_bits_are_rejected():
    sizes = "plan", PlanConfig(), "kv_capacity", "would receive {} rows of keys"
    needs = np.array([5, 2**31])
    with pytest.raises(ValueError, match="rank 1 would receive 2147483648 rows of keys, but row"):
        static_size(*sizes, needs, 8)
