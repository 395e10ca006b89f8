"""Capacities that conflict with balance: as much balance as they leave, or an error."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from placement_bounds import least_imbalance_of_capacity
from properties import examples
from random_lengths import TOKENS, real_lengths

from jax_cp_dispatch import Placement, PlanConfig, place_tokens


def place(lengths: np.ndarray, ranks: int, **limits: Any) -> Placement:
    return place_tokens([lengths], world_size=ranks, config=PlanConfig(**limits))


@pytest.mark.parametrize("name, ranks", [("wlbllm", 8), ("prolong", 32)])
def test_less_capacity_costs_balance_by_degrees(name, ranks):
    """From the need of the best placement to the longest document, or to whole ones alone."""
    lengths = np.array(real_lengths(name, ranks))
    most = int(np.max(place(lengths, ranks).plan.kv_metadata.num_total_recv_tokens))
    needed = max(int(lengths.max()), TOKENS + 2048)
    before, bound = 1.01, 1.0
    for capacity in np.linspace(most, needed, 9).astype(int):
        placement = place(lengths, ranks, kv_capacity=int(capacity))
        received = placement.plan.kv_metadata.num_total_recv_tokens
        assert np.max(received) <= capacity
        bound = least_imbalance_of_capacity(lengths, ranks, TOKENS, int(capacity))
        assert bound * 0.9999 <= placement.imbalance <= 1.5 * before
        before = placement.imbalance
    assert before <= 1.7 * bound


def test_ranks_without_long_documents_keep_their_share():
    """Where a single document does not fit the capacity beside a rank's other tokens."""
    lengths, ranks = np.array(real_lengths("prolong", 128)), 128
    longest = int(lengths.argmax())
    for capacity in (240_000, 260_000):
        placement = place(lengths, ranks, kv_capacity=capacity)
        assert np.sum(lengths + TOKENS > capacity) == 1
        rank = placement.inverse // TOKENS
        first = lengths[:longest].sum()
        has_longest = np.unique(rank[first : first + lengths[longest]])
        assert len(has_longest) < ranks // 4
        others = np.delete(placement.plan.pairs, has_longest)
        assert others.max() <= 1.0101 * placement.plan.pairs.mean()
        assert placement.imbalance > 2


def small_batch(data: st.DataObject) -> tuple[np.ndarray, int]:
    """Documents of several lengths that leave no padding."""
    ranks = data.draw(st.sampled_from([2, 4, 8]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    total = ranks * int(rng.integers(64, 512))
    lengths = []
    while total > 0:
        most = total if rng.random() < 0.1 else min(total, 60)
        lengths.append(int(rng.integers(1, most + 1)))
        total -= lengths[-1]
    return np.array(lengths), ranks


@given(data=st.data())
@examples(12)
def test_the_advice_of_errors_leads_to_a_placement(data):
    """In one step, for all capacities at once."""
    lengths, ranks = small_batch(data)
    tokens = int(lengths.sum()) // ranks
    capacities = {
        "kv_capacity": max(int(tokens * data.draw(st.floats(0.05, 2))), 1),
        "max_pieces": data.draw(st.none() | st.integers(1, 20)),
    }
    try:
        placement = place(lengths, ranks, **capacities)
    except ValueError as error:
        advice = str(error).split("The placement with the best balance needs ")[1]
        enough = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", advice)}
        assert set(capacities) <= set(enough)
        placement = place(lengths, ranks, **enough)
    assert (placement.plan.num_rows == tokens).all()


@given(data=st.data())
@examples(8)
def test_a_capacity_that_the_best_placement_keeps_costs_nothing(data):
    lengths, ranks = small_batch(data)
    free = place(lengths, ranks)
    same = place(lengths, ranks, kv_capacity=free.needs.kv_capacity)
    assert same.imbalance <= max(free.imbalance, 1.0101)


def test_placements_with_a_capacity_are_deterministic():
    lengths = np.array(real_lengths("wlbllm", 32))
    first, second = (place(lengths, 32, kv_capacity=150_000) for _ in range(2))
    np.testing.assert_array_equal(first.permutation, second.permutation)
