"""What constraints of plans and placements cost, and what a refusal says would be enough.

Every plan keeps them, or is refused: test_plans.py.
"""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from placement_bounds import least_imbalance_of_capacity
from properties import examples
from random_lengths import TOKENS, cost, moved, of_both_kinds, placed, real_lengths

from jax_cp_dispatch import PlanConfig, place_tokens, plan_attention


def place(lengths, ranks, **limits: Any):
    return place_tokens([lengths], world_size=ranks, config=PlanConfig(**limits))


def rows_of(plan):
    """Rows of keys that a rank receives, at most."""
    return int(np.max(plan.kv_metadata.num_total_recv_tokens))


def cuts_of(plan):
    """Positions in their documents at which pieces begin, but for the first."""
    start = plan.run_position[plan.run_row < plan.num_rows[:, None]]
    return start[start > 0]


@pytest.mark.parametrize(
    "make, name, ranks, tokens, balance, more",
    [
        (moved, "wlbllm", 8, None, 1.1, 1.6),
        (moved, "prolong", 32, None, 1.1, 1.6),
        (placed, "wlbllm", 32, 2.5, 1.0101, 1.05),
        (placed, "wlbllm", 8, 2.23, 1.0101, 1.05),
    ],
)
def test_a_capacity_is_kept_by_another_plan(make, name, ranks, tokens, balance, more):
    """At nearly the same balance, for some more bytes, where the best plan would need more rows."""
    free = make(real_lengths(name, ranks), ranks)
    capacity = int(0.92 * rows_of(free)) if tokens is None else int(tokens * TOKENS)
    plan = make(real_lengths(name, ranks), ranks, kv_capacity=capacity)
    assert rows_of(plan) <= plan.kv_capacity == capacity
    assert plan.imbalance <= balance
    assert cost(free) <= cost(plan) <= more * cost(free)
    if make is moved or ranks == 32:
        assert rows_of(free) > capacity


@of_both_kinds
def test_all_cuts_are_at_blocks_where_lengths_are_multiples(make):
    """And the columns of a rank, where tokens that do not move are cut."""
    lengths = 16 * np.random.default_rng(0).integers(1, 40, 30)
    lengths = lengths[lengths.cumsum() <= 4096]
    plan = make(lengths, 4, 4096, block=16)
    assert len(cuts_of(plan)) and (cuts_of(plan) % 16 == 0).all()
    assert plan.imbalance <= 1.0101 and cost(plan) > 0


@pytest.mark.parametrize("name, ranks", [("wlbllm", 32), ("prolong", 128)])
def test_odd_cuts_can_be_avoided(name, ranks):
    lengths = real_lengths(name, ranks)
    free, plan = placed(lengths, ranks), placed(lengths, ranks, block=64)
    assert (cuts_of(plan) % 64 == 0).mean() >= 0.3  # of cuts anywhere, 0.03 (lengths are even)
    assert plan.imbalance <= 1.0101
    assert cost(plan) <= 1.2 * cost(free) + 0.02 * sum(lengths)


def test_more_tolerance_gives_more_cuts_at_blocks():
    """64 tokens at the end of the longest document are 1.2 % of a rank's work."""
    aligned = []
    for tolerance in (0.01, 0.05):
        plan = placed(real_lengths("wlbllm", 128), 128, block=64, balance_tolerance=tolerance)
        assert plan.imbalance <= 1 + tolerance + 1e-4
        aligned.append((cuts_of(plan) % 64 == 0).mean())
    assert aligned[1] >= 0.9 > aligned[0]


@of_both_kinds
@pytest.mark.parametrize("name", ["wlbllm", "prolong"])
def test_work_is_proportional_to_speed(make, name):
    speeds = tuple(1.0 if r % 4 else 0.5 for r in range(32))
    plan = make(real_lengths(name, 32), 32, rank_speeds=speeds)
    share = plan.pairs.sum(dtype=float) * np.array(speeds) / sum(speeds)
    assert (plan.pairs <= 1.0101 * share).all()
    assert make is moved or (plan.num_rows == TOKENS).all()


@pytest.mark.parametrize(
    "make, name, ranks, part, more",
    [
        (moved, "wlbllm", 32, 0.7, 1.25),
        (moved, "prolong", 128, 0.95, 1.25),
        (placed, "wlbllm", 32, 0.95, 1.03),
        (placed, "prolong", 128, 0.95, 1.03),
    ],
)
def test_fewer_bytes_between_nodes(make, name, ranks, part, more):
    free = make(real_lengths(name, ranks), ranks)
    plan = make(real_lengths(name, ranks), ranks, ranks_per_node=8)
    assert plan.imbalance <= 1.0101
    assert cost(plan, 8) <= part * cost(free, 8)
    assert cost(free) == 4 * free.num_q_tokens_moved + free.num_kv_tokens_moved
    assert cost(plan) <= more * cost(free)
    node = np.arange(ranks) // 8
    counted = [
        x.num_recv_tokens[:, :-1].astype(int)[node[:, None] != node].sum()
        for x in (plan.q_metadata, plan.kv_metadata)
        if x is not None
    ]
    assert sum(plan.num_tokens_moved_between_nodes(8)) == sum(counted)


def test_the_backward_pass_weighs_keys_more():
    """Their gradients move in float32."""
    config, step = PlanConfig(), PlanConfig(backward=True)
    assert (config.query_cost, config.key_cost) == (64, 16)
    assert (step.query_cost, step.key_cost) == (128, 48)
    forward, both = (moved(real_lengths("wlbllm", 8), 8, backward=x) for x in (False, True))
    cost_of_step = lambda x: 128 * x.num_q_tokens_moved + 48 * x.num_kv_tokens_moved
    assert cost_of_step(both) < cost_of_step(forward)
    assert both.num_kv_tokens_moved < forward.num_kv_tokens_moved


def test_no_rank_is_overfull_with_the_least_capacity():
    """Beside the rest of a cut document, the next one to add may be longer than the room."""
    for lengths in ([4, 193, 44, 2, 13, 6, 128], [6, 5, 16, 66, 42, 4, 4, 59, 126, 3, 189]):
        placement = place(lengths, 3 if len(lengths) == 7 else 4, kv_capacity=max(lengths))
        assert np.array_equal(np.sort(placement.permutation), np.arange(sum(lengths)))


def said_in(error) -> dict[str, Any]:
    """The capacities that an error says are enough together."""
    text = str(error).split("with the best balance needs ")[1]
    return {name: int(need) for name, need in re.findall(r"(\w+)=(\d+)", text)}


def test_an_error_has_the_needs_of_the_plan_with_the_best_balance():
    """Capacities that are raised one error at a time would end in a plan without balance."""
    lengths = [[6228, 62, 342, 66, 149, 652, 629, 64]]
    free = moved(lengths, 8)
    tight = {"q_capacity": 500, "kv_capacity": 3000, "max_q_transfers": 2, "max_pieces": 2}
    with pytest.raises(ValueError, match="needs q_capacity=") as error:
        moved(lengths, 8, **tight)
    enough = said_in(error.value)
    assert PlanConfig(**enough) == free.needs
    assert moved(lengths, 8, **enough).imbalance == free.imbalance < 1.02
    half: Any = {name: max(need // 2, 1) for name, need in enough.items()}
    half = dataclasses.replace(PlanConfig(), **half)
    fallback = plan_attention(lengths=lengths, world_size=8, config=half, fallback="ring")
    assert fallback.needs == free.needs


# ---- Capacities that conflict with balance: as much balance as they leave, or an error.


def test_less_capacity_costs_balance_by_degrees():
    """From the need of the best placement to the longest document, or to whole ones alone."""
    lengths, ranks = np.array(real_lengths("wlbllm", 8)), 8
    most = rows_of(placed(lengths, ranks))
    needed = max(int(lengths.max()), TOKENS + 2048)
    before, bound = 1.01, 1.0
    for capacity in np.linspace(most, needed, 9).astype(int):
        placement = place(lengths, ranks, kv_capacity=int(capacity))
        assert rows_of(placement.plan) <= capacity
        bound = least_imbalance_of_capacity(lengths, ranks, TOKENS, int(capacity))
        assert bound * 0.9999 <= placement.imbalance <= 1.5 * before
        before = placement.imbalance
    assert before <= 1.7 * bound


def test_ranks_without_long_documents_keep_their_share():
    """Where a single document does not fit the capacity beside a rank's other tokens."""
    lengths, ranks = np.array(real_lengths("prolong", 128)), 128
    longest = int(lengths.argmax())
    placement = place(lengths, ranks, kv_capacity=260_000)
    assert np.sum(lengths + TOKENS > 260_000) == 1
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
@examples(10)
def test_an_error_says_which_capacities_are_enough_together(data):
    """In one step: those of the placement with the best balance, which costs nothing with them."""
    lengths, ranks = small_batch(data)
    free = place(lengths, ranks)
    again = place_tokens(lengths, world_size=ranks, config=free.needs)
    np.testing.assert_array_equal(again.permutation, free.permutation)
    same = place(lengths, ranks, kv_capacity=free.needs.kv_capacity)
    assert same.imbalance <= max(free.imbalance, 1.0101)
    tokens = int(lengths.sum()) // ranks
    capacities = {
        "kv_capacity": max(int(tokens * data.draw(st.floats(0.05, 2))), 1),
        "max_pieces": data.draw(st.none() | st.integers(1, 20)),
    }
    try:
        placement = place(lengths, ranks, **capacities)
    except ValueError as error:
        assert PlanConfig(**said_in(error)) == free.needs
    else:
        assert (placement.plan.num_rows == tokens).all()
        assert rows_of(placement.plan) <= capacities["kv_capacity"]
