"""The work of ranks in a plan is balanced, for few bytes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from planner_oracle import check_plan, fewest_bytes
from properties import examples
from random_lengths import UNIT, causal_pairs, cut, large_case

from jax_cp_dispatch import PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.masks import BlockCausal, Chunked, Full, SlidingWindow
from jax_cp_dispatch.planning.balance import balance_blocks


def keys_of_queries(mask, length):
    position = np.arange(length)
    if mask is None:
        return position + 1
    if isinstance(mask, Full):
        return np.full(length, length)
    if isinstance(mask, Chunked):
        return position % mask.size + 1
    if isinstance(mask, BlockCausal):
        return np.minimum(length, (position // mask.size + 1) * mask.size)
    last = np.minimum(length, position + mask.right + 1)
    return last - np.maximum(0, position - mask.left + 1)


@pytest.mark.parametrize("seed", range(5))
def test_no_rank_is_above_the_tolerance(seed):
    """With some hundred tokens per rank, also if most of them are padding."""
    rng = np.random.default_rng(seed)
    world_size, tokens, lengths = large_case(rng)
    size = int(rng.integers(1, 2 * tokens))
    mask = [
        *(None, None, SlidingWindow(size), Chunked(size)),
        *(Full(), BlockCausal(size), SlidingWindow(size, size // 2)),
    ][rng.integers(7)]
    tolerance = float(rng.choice([0.01, 0.1]))
    plan = plan_attention(
        lengths=lengths,
        columns=world_size * tokens,
        world_size=world_size,
        mask=mask,
        config=PlanConfig(balance_tolerance=tolerance),
    )
    assert plan.imbalance <= 1 + tolerance + 1e-5
    pairs = sum(keys_of_queries(mask, x).sum(dtype=float) for x in lengths)
    assert plan.pairs.sum(dtype=float) == pytest.approx(pairs, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_near_the_optimum_of_small_cases(seed):
    """Never above the limit if some plan is below it, and few more bytes than the least."""
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(2, 4))
    total = world_size * int(rng.integers(3, 6 if world_size == 2 else 4))
    lengths = cut(rng, total, rng.integers(0, 4))
    mean = causal_pairs(UNIT * lengths) / world_size
    for num_kv_heads, tolerance in itertools.product((8, 32), (0.05, 0.25)):
        config = PlanConfig(1, balance_tolerance=tolerance, num_kv_heads=num_kv_heads)
        plan = plan_attention(lengths=UNIT * lengths, world_size=world_size, config=config)
        q = 32 // num_kv_heads
        needed = fewest_bytes(lengths, world_size, (1 + tolerance) * mean, unit=UNIT, q=q)
        if needed is not None:
            assert plan.pairs.max() <= (1 + tolerance) * mean * (1 + 1e-6)
            cost = q * plan.num_q_tokens_moved + plan.num_kv_tokens_moved
            assert cost <= 1.25 * needed + 2


def test_more_tolerance_moves_fewer_bytes():
    lengths = [40_000, 20_000, 10_000] + [500] * 60
    moved = []
    for tolerance in (0.01, 0.1, 0.5):
        config = PlanConfig(balance_tolerance=tolerance)
        plan = plan_attention(lengths=lengths, columns=100_000, world_size=4, config=config)
        moved.append(4 * plan.num_q_tokens_moved + plan.num_kv_tokens_moved)
    assert moved[0] > moved[1] > moved[2]


def test_equal_local_documents_do_not_move():
    segment_ids = np.repeat(np.arange(1, 5, dtype=np.int32), 24)[None]
    plan = plan_attention(segment_ids, None, world_size=4, config=PlanConfig(block=8))
    assert plan.num_q_tokens_moved == plan.num_kv_tokens_moved == 0
    np.testing.assert_array_equal(plan.pairs_before, plan.pairs)


def test_a_document_over_all_ranks_is_balanced():
    segment_ids = np.ones((1, 1024), np.int32)
    plan = plan_attention(segment_ids, None, world_size=8, config=PlanConfig(block=8))
    assert plan.imbalance_before > 1.8
    assert plan.imbalance <= 1.01001
    check_plan(plan, segment_ids)


@examples(15)
@given(st.data())
def test_balancer_bounds_rows_for_any_costs(data):
    shape = (2, 4, 5)
    length = np.broadcast_to(np.array([8, 8, 8, 8, 3], np.int32), shape)
    seed = data.draw(st.integers(0, 2**32 - 1))
    weight = data.draw(st.sampled_from([1, 2, 4, 6]))
    rng = np.random.default_rng(seed)
    cost = (10.0 ** rng.uniform(0, weight, shape)).astype(np.int32)
    cost[rng.random(shape) < data.draw(st.sampled_from([0, 0.5, 0.95]))] = 0
    rows = np.where(cost > 0, length, 0)
    limit, most = 2 * 35, 2 * 2 * 35 + 8  # the last step moves nothing to a rank that has `limit`
    before, assigned = (
        np.asarray(_balance(jnp.asarray(cost), jnp.asarray(rows), row_limit=x, tolerance=0.01))
        for x in (0, limit)
    )
    assert assigned.min() >= 0 and assigned.max() < 4
    held = [np.bincount(x.ravel(), weights=rows.ravel(), minlength=4) for x in (before, assigned)]
    assert held[0].max() <= most and (held[1] <= np.maximum(held[0], limit)).all()
    load = np.bincount(assigned.ravel(), weights=cost.ravel(), minlength=4)
    assert load.max() <= max(cost.sum((0, 2)).max(), load.mean() + cost.max())


def test_the_last_step_respects_the_row_limit():
    """Without room it moves nothing, as if the balance were good enough before it."""
    rng, rows, moved = np.random.default_rng(0), jnp.full((1, 4, 6), 8, jnp.int32), 0
    for _ in range(20):
        cost = jnp.asarray(rng.integers(1, 100, rows.shape), jnp.int32)
        before = _balance(cost, rows, row_limit=10**6, tolerance=9.0)
        np.testing.assert_array_equal(_balance(cost, rows, row_limit=0, tolerance=0.01), before)
        moved += (_balance(cost, rows, row_limit=10**6, tolerance=0.01) != before).sum()
    assert moved > 0


_balance = jax.jit(balance_blocks, static_argnames=("row_limit", "tolerance"))


@pytest.mark.parametrize("world_size, lengths", [(2, [4, 8]), (8, [64, 2, 2, 60]), (8, [100, 28])])
def test_tiny_batches_keep_the_tolerance(world_size, lengths):
    """Where the work of one token counts, and a rank has fewer than the wanted piece."""
    placed = place_tokens(lengths, world_size=world_size)
    planned = plan_attention(lengths=lengths, world_size=world_size)
    assert placed.imbalance <= 1.01 and planned.imbalance <= 1.01
    sizes = placed.plan.kv_capacity, planned.q_capacity, planned.kv_capacity
    assert max(sizes) <= planned.num_tokens * world_size


@pytest.mark.parametrize("seed", range(4))
def test_placements_of_tiny_batches_are_the_best(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, rng.integers(1, 5)).tolist()
    placement = place_tokens(lengths, world_size=2)
    work = np.concatenate([np.arange(1, n + 1) for n in lengths])
    work = np.pad(work, (0, len(work) % 2))
    halves = itertools.combinations(range(len(work)), len(work) // 2)
    best = min(max(x, work.sum() - x) for x in (work[list(half)].sum() for half in halves))
    assert placement.imbalance <= max(best / work.sum() * 2, 1.01) + 1e-5
