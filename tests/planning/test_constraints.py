"""Constraints of plans and placements: kept, or refused with what would be enough."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from any_mask import any_mask, causal_mask
from hypothesis import given, strategies as st
from placement_oracle import check_placement, fewest_keys
from planner_oracle import check_plan, fewest_bytes
from properties import examples
from random_lengths import EXTREMES, TOKENS, UNIT, causal_pairs, real_lengths, small_case

from jax_cp_dispatch import Plan, PlanConfig, place_tokens, plan_attention

COLUMNS = 96
LENGTHS = st.sampled_from([*EXTREMES.values()]) | st.lists(
    st.lists(st.integers(0, 24), max_size=4), min_size=1, max_size=2
)
ROWS = st.none() | st.integers(1, 150)


def moved(lengths, world_size, columns=None, **choices: Any) -> Plan:
    config = PlanConfig(**choices)
    return plan_attention(lengths=lengths, world_size=world_size, columns=columns, config=config)


def placed(lengths, world_size, columns=None, **choices: Any) -> Plan:
    config = PlanConfig(**choices)
    return place_tokens(lengths, world_size=world_size, columns=columns, config=config).plan


KINDS = pytest.mark.parametrize("make", [moved, placed])


def cost(plan, ranks_per_node=1):
    """Keys that move between nodes; a query counts as four of them, for the default heads."""
    q, kv = plan.num_tokens_moved_between_nodes(ranks_per_node)
    return 4 * q + kv


def rows_of(plan):
    """Rows of keys that a rank receives, at most."""
    return int(np.max(plan.kv_metadata.num_total_recv_tokens))


def cuts_of(plan):
    """Positions in their documents at which pieces begin, but for the first."""
    start = plan.run_position[plan.run_row < plan.num_rows[:, None]]
    return start[start > 0]


def ids_of(lengths):
    rows = [np.repeat(np.arange(1, 1 + len(row)), row) for row in lengths]
    return np.stack([np.pad(row, (0, COLUMNS - len(row))) for row in rows]).astype(np.int32)


def draw_config(data, world_size, **others):
    return PlanConfig(
        block=data.draw(st.sampled_from([None, 4])),
        kv_capacity=data.draw(ROWS),
        ranks_per_node=data.draw(st.none() | st.sampled_from([1, 2])) if world_size > 1 else None,
        rank_speeds=data.draw(st.none() | st.just(tuple(1.0 + r % 3 for r in range(world_size)))),
        balance_tolerance=data.draw(st.sampled_from([0.01, 0.5])),
        **others,
    )


@given(data=st.data())
@examples(20)
def test_constraints_of_plans_are_kept_or_refused(data):
    lengths, world_size = data.draw(LENGTHS), data.draw(st.sampled_from([1, 2, 4, 8]))
    heads = {"num_kv_heads": data.draw(st.sampled_from([8, 32]))}
    others = {"q_capacity": data.draw(ROWS), "backward": data.draw(st.booleans())}
    config = draw_config(data, world_size, **heads, **others)
    mask = data.draw(causal_mask(40))
    options = {"world_size": world_size, "columns": COLUMNS, "mask": mask}
    try:
        plan = plan_attention(lengths=lengths, config=config, **options)
    except ValueError as error:
        assert any(x in str(error) for x in ("q_capacity", "kv_capacity")), error
        assert "Pass " in str(error)
        assert config.q_capacity is not None or config.kv_capacity is not None
        return
    check_plan(plan, ids_of(lengths), None, mask)
    assert config.q_capacity in (None, plan.q_capacity)
    assert config.kv_capacity in (None, plan.kv_capacity)


@given(data=st.data())
@examples(20)
def test_constraints_of_placements_are_kept_or_refused(data):
    lengths, world_size = data.draw(LENGTHS), data.draw(st.sampled_from([1, 2, 4, 8]))
    config, mask = draw_config(data, world_size), data.draw(any_mask(40))
    options = {"world_size": world_size, "columns": COLUMNS, "mask": mask}
    try:
        placement = place_tokens(lengths, config=config, **options)
    except ValueError as error:
        assert "kv_capacity" in str(error) and "Pass " in str(error)
        assert config.kv_capacity is not None
        return
    pairs, _ = check_placement(placement, lengths, mask)
    if config.kv_capacity is not None:
        assert rows_of(placement.plan) <= placement.plan.kv_capacity == config.kv_capacity
    speeds = np.array(config.rank_speeds or [1.0] * world_size)
    if pairs.sum():
        share = pairs.sum() * speeds / speeds.sum()
        assert placement.imbalance == pytest.approx((pairs / share).max(), rel=1e-6)


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


@KINDS
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


@KINDS
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


@KINDS
@pytest.mark.parametrize("seed", range(2))
def test_near_the_optimum_with_speeds_and_nodes(make, seed):
    """Of small cases, against all plans that cut at units."""
    nodes = seed % 2 == 0
    units, speeds = small_case(np.random.default_rng(seed), nodes=nodes)
    world_size, size = len(speeds), 2 if nodes else 1
    work = causal_pairs(UNIT * units) * speeds / speeds.sum()
    for tolerance in (0.25, 1.0):
        choices = {"rank_speeds": tuple(speeds), "ranks_per_node": size if nodes else None}
        plan = make(UNIT * units, world_size, balance_tolerance=tolerance, **choices)
        limits = (1 + tolerance) * work
        if make is moved:
            needed = fewest_bytes(units, world_size, limits, unit=UNIT, q=4, ranks_per_node=size)
        else:
            nodes_of = np.arange(world_size) // 2 if nodes else None
            needed = fewest_keys(units, world_size, limits, unit=UNIT, nodes=nodes_of)
        if needed is None:
            continue
        assert (plan.pairs <= limits * (1 + 1e-6)).all()
        assert cost(plan, size) <= 1.25 * needed + 2


def test_the_backward_pass_weighs_keys_more():
    """Their gradients move in float32."""
    config, step = PlanConfig(), PlanConfig(backward=True)
    assert (config.query_cost, config.key_cost) == (64, 16)
    assert (step.query_cost, step.key_cost) == (128, 48)
    forward, both = (moved(real_lengths("wlbllm", 8), 8, backward=x) for x in (False, True))
    cost_of_step = lambda x: 128 * x.num_q_tokens_moved + 48 * x.num_kv_tokens_moved
    assert cost_of_step(both) < cost_of_step(forward)
    assert both.num_kv_tokens_moved < forward.num_kv_tokens_moved


@pytest.mark.parametrize(
    "lengths, world_size",
    [
        ([4, 193, 44, 2, 13, 6, 128], 3),
        ([6, 5, 16, 66, 42, 4, 4, 59, 126, 3, 189], 4),
    ],
)
def test_no_rank_is_overfull_with_the_least_capacity(lengths, world_size):
    """Beside the rest of a cut document, the next one to add may be longer than the room."""
    config = PlanConfig(kv_capacity=max(lengths))
    placement = place_tokens(lengths, world_size=world_size, config=config)
    assert np.array_equal(np.sort(placement.permutation), np.arange(sum(lengths)))


def said_in(error) -> dict[str, Any]:
    """The capacities that an error says are enough together."""
    text = str(error.value).split("with the best balance needs ")[1]
    return {name: int(need) for name, need in re.findall(r"(\w+)=(\d+)", text)}


@pytest.mark.parametrize("seed", range(6))
def test_a_placement_fits_what_it_needs(seed):
    """Also if a batch exceeds one capacity, the error says which are enough together."""
    rng = np.random.default_rng(seed)
    lengths = (rng.lognormal(3.5, 1.5, 40).astype(int) + 1).tolist()
    options: Any = {"world_size": int(rng.integers(2, 17))}
    placement = place_tokens(lengths, **options)
    again = place_tokens(lengths, config=placement.needs, **options)
    assert np.array_equal(again.permutation, placement.permutation)
    with pytest.raises(ValueError, match="The placement with the best balance needs ") as error:
        place_tokens(lengths, config=PlanConfig(kv_capacity=1), **options)
    assert PlanConfig(**said_in(error)) == placement.needs


def test_an_error_has_the_needs_of_the_plan_with_the_best_balance():
    """Capacities that are raised one error at a time would end in a plan without balance."""
    lengths = [[6228, 62, 342, 66, 149, 652, 629, 64]]
    free = moved(lengths, 8)
    tight = {"q_capacity": 500, "kv_capacity": 3000, "max_q_transfers": 2, "max_pieces": 2}
    with pytest.raises(ValueError, match="needs q_capacity=") as error:
        moved(lengths, 8, **tight)
    enough = said_in(error)
    assert PlanConfig(**enough) == free.needs
    assert moved(lengths, 8, **enough).imbalance == free.imbalance < 1.02
    half: Any = {name: max(need // 2, 1) for name, need in enough.items()}
    half = dataclasses.replace(PlanConfig(), **half)
    fallback = plan_attention(lengths=lengths, world_size=8, config=half, fallback="ring")
    assert fallback.needs == free.needs


def test_capacities_of_the_config_are_used():
    """Those of the other kind of plan are ignored."""
    sizes = {"kv_capacity": 2000, "max_kv_transfers": 32, "max_pieces": 16, "q_capacity": 900}
    sizes |= {"max_q_transfers": 7, "max_cut_pieces": 17, "max_linked_pieces": 99}
    plan = placed([[600, 300, 100, 24]], 4, **sizes)
    assert (plan.q_capacity, plan.kv_capacity) == (256, 2000)
    assert plan.kv_metadata.dst_rank.shape == (4, 32)
    assert plan.run_row.shape == (4, 16) and plan.cut_pieces.shape == (4, 17 + 99, 9)
    plan = moved([[600, 300, 100, 24]], 4, **sizes)
    assert (plan.q_capacity, plan.kv_capacity, plan.max_cut_pieces) == (900, 2000, 0)
    assert plan.q_metadata.dst_rank.shape == (4, 7) and plan.cut_pieces is None
