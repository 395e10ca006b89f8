"""Constraints of plans that move queries: kept, or refused with what would be enough."""

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest
from any_mask import causal_mask
from hypothesis import given, strategies as st
from planner_oracle import check_plan, fewest_bytes
from properties import examples
from random_lengths import EXTREMES, UNIT, causal_pairs, real_lengths, small_case

from jax_cp_dispatch import PlanConfig, plan_attention

COLUMNS = 96


def ids_of(lengths, columns):
    rows = [np.repeat(np.arange(1, 1 + len(row)), row) for row in lengths]
    return np.stack([np.pad(row, (0, columns - len(row))) for row in rows]).astype(np.int32)


def shares(plan, lengths, columns):
    """Runs of queries with one home that one rank computes: (document, home, rank, queries)."""
    width, batch = columns // plan.world_size, len(lengths)
    computed = np.full((plan.world_size, batch * width), -1)
    metadata = plan.q_metadata
    for home, slot in itertools.product(*map(range, metadata.dst_rank.shape)):
        first = int(metadata.src_offset[home, slot])
        computed[home, first : first + int(metadata.seq_len[home, slot])] = metadata.dst_rank[
            home, slot
        ]
    found, number = [], 0
    for b, row in enumerate(lengths):
        at = 0
        for length in row:
            column = np.arange(at, at + length)
            home = column // width
            rank = computed[home, b * width + column % width]
            new = np.flatnonzero((np.diff(home) != 0) | (np.diff(rank) != 0)) + 1
            for part in np.split(np.arange(length), new) if length else []:
                found.append((number, home[part[0]], rank[part[0]], len(part)))
            at, number = at + length, number + 1
    return np.array(found, int).reshape(-1, 4)


@given(data=st.data())
@examples(20)
def test_constraints_are_kept_or_refused(data):
    lengths = data.draw(
        st.sampled_from([*EXTREMES.values()])
        | st.lists(st.lists(st.integers(0, 24), max_size=4), min_size=1, max_size=2)
    )
    world_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    config = PlanConfig(
        block=data.draw(st.sampled_from([None, 4])),
        q_capacity=data.draw(st.none() | st.integers(1, 150)),
        kv_capacity=data.draw(st.none() | st.integers(1, 150)),
        ranks_per_node=data.draw(st.none() | st.sampled_from([1, 2])) if world_size > 1 else None,
        rank_speeds=data.draw(st.none() | st.just(tuple(1.0 + r % 3 for r in range(world_size)))),
        num_kv_heads=data.draw(st.sampled_from([8, 32])),
        backward=data.draw(st.booleans()),
    )
    mask = data.draw(causal_mask(40))
    options = {"world_size": world_size, "columns": COLUMNS, "mask": mask}
    try:
        plan = plan_attention(lengths=lengths, config=config, **options)
    except ValueError as error:
        assert any(x in str(error) for x in ("q_capacity", "kv_capacity")), error
        assert "Pass " in str(error)
        assert config.q_capacity is not None or config.kv_capacity is not None
        return
    check_plan(plan, ids_of(lengths, COLUMNS), None, mask)
    assert config.q_capacity in (None, plan.q_capacity)
    assert config.kv_capacity in (None, plan.kv_capacity)


@pytest.mark.parametrize("name, ranks", [("wlbllm", 8), ("prolong", 32)])
def test_a_capacity_is_kept_by_another_plan(name, ranks):
    """At nearly the same balance, for some more bytes, where the best plan would need more rows."""
    lengths = real_lengths(name, ranks)
    free = plan_attention(lengths=lengths, world_size=ranks)
    capacity = int(0.92 * (free.needs.kv_capacity or 0))
    plan = plan_attention(
        lengths=lengths, world_size=ranks, config=PlanConfig(kv_capacity=capacity)
    )
    assert (plan.needs.kv_capacity or 0) <= plan.kv_capacity == capacity
    assert plan.imbalance <= 1.1
    free, kept = (4 * x.num_q_tokens_moved + x.num_kv_tokens_moved for x in (free, plan))
    assert free <= kept <= 1.6 * free


def test_cuts_are_at_blocks():
    rng = np.random.default_rng(0)
    lengths = 16 * rng.integers(1, 40, 30)
    lengths = lengths[lengths.cumsum() <= 4096]
    plan = plan_attention(lengths=lengths, columns=4096, world_size=4, config=PlanConfig(block=16))
    assert (shares(plan, [lengths], 4096)[:, 3] % 16 == 0).all()
    assert plan.imbalance <= 1.0101 and plan.num_q_tokens_moved > 0


@pytest.mark.parametrize("name, ranks", [("wlbllm", 32), ("prolong", 32)])
def test_work_is_proportional_to_speed(name, ranks):
    speeds = tuple(1.0 if r % 4 else 0.5 for r in range(ranks))
    config = PlanConfig(rank_speeds=speeds)
    plan = plan_attention(lengths=real_lengths(name, ranks), world_size=ranks, config=config)
    share = plan.pairs.sum(dtype=float) * np.array(speeds) / sum(speeds)
    assert (plan.pairs <= 1.0101 * share).all()


@pytest.mark.parametrize(
    "name, ranks, part", [("wlbllm", 32, 0.7), ("wlbllm", 128, 0.7), ("prolong", 128, 0.95)]
)
def test_fewer_bytes_between_nodes(name, ranks, part):
    lengths = real_lengths(name, ranks)
    free = plan_attention(lengths=lengths, world_size=ranks)
    plan = plan_attention(lengths=lengths, world_size=ranks, config=PlanConfig(ranks_per_node=8))
    assert plan.imbalance <= 1.0101
    cost = lambda q, kv: 4 * q + kv
    before, after = (cost(*x.num_tokens_moved_between_nodes(8)) for x in (free, plan))
    assert after <= part * before
    before, after = (cost(*x.num_tokens_moved_between_nodes(1)) for x in (free, plan))
    assert before == cost(free.num_q_tokens_moved, free.num_kv_tokens_moved)
    assert after <= 1.25 * before
    node = np.arange(ranks) // 8
    counted = [
        int(metadata.num_recv_tokens[i, j])
        for metadata in (plan.q_metadata, plan.kv_metadata)
        for i, j in itertools.product(range(ranks), repeat=2)
        if node[i] != node[j]
    ]
    assert sum(plan.num_tokens_moved_between_nodes(8)) == sum(counted)


@pytest.mark.parametrize("seed", range(4))
def test_near_the_optimum_with_speeds_and_nodes(seed):
    """Of small cases, against all plans that cut at units."""
    rng = np.random.default_rng(seed)
    nodes = seed % 2 == 0
    lengths, speeds = small_case(rng, nodes=nodes)
    world_size = len(speeds)
    work = causal_pairs(UNIT * lengths) * speeds / speeds.sum()
    for tolerance in (0.25, 1.0):
        config = PlanConfig(
            balance_tolerance=tolerance,
            rank_speeds=tuple(speeds),
            ranks_per_node=2 if nodes else None,
        )
        plan = plan_attention(lengths=UNIT * lengths, world_size=world_size, config=config)
        limits = (1 + tolerance) * work
        size = 2 if nodes else 1
        needed = fewest_bytes(lengths, world_size, limits, unit=UNIT, q=4, ranks_per_node=size)
        if needed is None:
            continue
        assert (plan.pairs <= limits * (1 + 1e-6)).all()
        q, kv = plan.num_tokens_moved_between_nodes(size)
        assert 4 * q + kv <= 1.25 * needed + 2


def test_the_backward_pass_weighs_keys_more():
    """Their gradients move in float32."""
    config, step = PlanConfig(), PlanConfig(backward=True)
    assert (config.query_cost, config.key_cost) == (64, 16)
    assert (step.query_cost, step.key_cost) == (128, 48)
    options = {"lengths": real_lengths("wlbllm", 8), "world_size": 8}
    forward, both = (plan_attention(config=x, **options) for x in (config, step))
    cost = lambda x: 128 * x.num_q_tokens_moved + 48 * x.num_kv_tokens_moved
    assert cost(both) < cost(forward)
    assert both.num_kv_tokens_moved < forward.num_kv_tokens_moved


def test_an_error_has_the_needs_of_the_plan_with_the_best_balance():
    """Capacities that are raised one error at a time would end in a plan without balance."""
    lengths = [[6228, 62, 342, 66, 149, 652, 629, 64]]
    free = plan_attention(lengths=lengths, world_size=8)
    config = PlanConfig(q_capacity=500, kv_capacity=3000, max_q_transfers=2, max_pieces=2)
    with pytest.raises(ValueError, match="needs q_capacity=") as error:
        plan_attention(lengths=lengths, world_size=8, config=config)
    text = str(error.value).split("needs ")[-1]
    found: dict[str, Any] = {name: int(need) for name, need in re.findall(r"(\w+)=(\d+)", text)}
    assert PlanConfig(**found) == free.needs
    plan = plan_attention(lengths=lengths, world_size=8, config=PlanConfig(**found))
    assert plan.imbalance == free.imbalance < 1.02
    half = dataclasses.replace(
        PlanConfig(), **{name: max(need // 2, 1) for name, need in found.items()}
    )
    fallback = plan_attention(lengths=lengths, world_size=8, config=half, fallback="ring")
    assert fallback.needs == free.needs
