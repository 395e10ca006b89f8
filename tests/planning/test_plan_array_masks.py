"""Plans for masks of arrays: each query once, with the keys that it sees; work is balanced."""

import pickle
from typing import Any

import jax
import numpy as np
import pytest
from array_masks import KINDS, random_mask
from mask_oracle import batch_visible
from packed_batches import pack
from planner_oracle import check_plan_of_pairs, deliver

from jax_cp_dispatch import PlanConfig, fit_plan_config, plan_attention, stack_plans
from jax_cp_dispatch.masks import PrefixLM, SharedPrefix
from jax_cp_dispatch.planning import needs_inside_jit


@pytest.mark.parametrize("kind", KINDS)
def test_plan_is_exact_for_any_mask(kind):
    """Also a rank's slice, made alone."""
    rng = np.random.default_rng()
    for _ in range(8):
        world_size, tokens = int(rng.integers(1, 5)), int(rng.integers(4, 20))
        segment_ids, _ = pack(rng, 2, world_size * tokens, max_length=int(rng.choice([6, 60])))
        constructor, arrays, pairs = random_mask(kind, rng, segment_ids)
        block, tolerance = (None, 0.01) if rng.random() < 0.5 else (4, 0.3)
        config = PlanConfig(block=block, balance_tolerance=tolerance)
        options = {"world_size": world_size, "mask": constructor(*arrays), "config": config}
        plan = plan_attention(segment_ids, **options)
        check_plan_of_pairs(plan, segment_ids, batch_visible(segment_ids, pairs))
        part = plan_attention(segment_ids, rank=world_size - 1, **options)
        jax.tree.map(np.testing.assert_array_equal, part, plan.slice_of(world_size - 1))
        jax.tree.map(np.testing.assert_array_equal, plan, pickle.loads(pickle.dumps(plan)))


@jax.jit
def plan_inside(segment_ids, mask):
    return plan_attention(segment_ids, world_size=4, mask=mask, config=PlanConfig(block=3))


@pytest.mark.parametrize("kind", ["blocks", "ranges_of_keys"])
def test_plan_made_inside_jit_is_exact(kind):
    """Blocks do not divide the columns of a rank. Of the other kinds: test_values.py."""
    rng = np.random.default_rng()
    for _ in range(8):
        segment_ids, _ = pack(rng, 2, 4 * 10, max_length=int(rng.choice([6, 40])))
        constructor, arrays, pairs = random_mask(kind, rng, segment_ids)
        mask = constructor(*arrays)
        plan = jax.device_get(plan_inside(segment_ids, mask))
        check_plan_of_pairs(plan, segment_ids, batch_visible(segment_ids, pairs))
        plan.validate(segment_ids, None, mask)
        assert plan.mask == plan_attention(segment_ids, world_size=4, mask=mask).mask


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_is_above_the_tolerance(kind):
    rng = np.random.default_rng(7)
    segment_ids, _ = pack(rng, 2, 4 * 600, max_length=2400)
    constructor, arrays, pairs = random_mask(kind, rng, segment_ids)
    plan = plan_attention(segment_ids, world_size=4, mask=constructor(*arrays))
    of_queries = batch_visible(segment_ids, pairs).sum(2)
    limit = 1.01 * of_queries.sum() / 4
    assert plan.pairs.max() <= limit + (of_queries.max() if kind == "tree" else 0)  # few


def test_a_shared_prompt_moves_once_to_a_rank_and_no_completion_does_that_is_not_seen():
    """A prompt with as many completions as ranks, one on each."""
    ids = np.concatenate([np.zeros(300), np.repeat(np.arange(1, 8), 50), np.zeros(150)])
    segment_ids = (np.arange(800) < 650).astype(np.int32)[None]
    mask = SharedPrefix(ids.astype(np.int32)[None])
    plan = plan_attention(segment_ids, world_size=4, mask=mask)
    assert plan.imbalance <= 1.01001
    rows = np.arange(800).reshape(4, 200)
    queries, keys = (
        deliver(x, rows, n)
        for x, n in ((plan.q_metadata, plan.q_capacity), (plan.kv_metadata, plan.kv_capacity))
    )
    for rank in range(4):
        held = keys[rank][keys[rank] >= 0]
        assert len(np.unique(held)) == len(held)
        seen = np.unique(ids[queries[rank][queries[rank] >= 0]])
        assert np.isin(ids[held], [0, *seen]).all()


def test_descriptions_name_the_work_of_ranks():
    """Pairs are those of the mask: 20 prefix tokens see each other, the others are causal."""
    mask = PrefixLM(np.arange(60)[None] < 20)
    plan = plan_attention(lengths=[60], world_size=3, mask=mask)
    text = plan.describe()
    assert f"{20 * 20 + sum(range(21, 61)):.3e} query-key pairs; max/mean" in text
    before = [20 * 20, *(sum(range(first, first + 20)) for first in (21, 41))]
    np.testing.assert_array_equal(plan.pairs_before, before)
    assert len(repr(plan)) < 1500


def test_plans_of_one_kind_stack_and_a_fallback_has_their_shapes():
    rng = np.random.default_rng()
    config = PlanConfig(None, 40, 60, 8, 8, 8)
    plans = []
    for size in (20, 3, 40):
        segment_ids = np.repeat(np.arange(1, 6, dtype=np.int32), [size, 5, 5, 5, 45 - size])[None]
        mask = PrefixLM(np.arange(60)[None] < rng.integers(1, 60))
        options = {"world_size": 3, "mask": mask, "fallback": "ring"}
        plans.append(plan_attention(segment_ids, config=config, **options))
    tight = PlanConfig(None, 40, 21, 8, 8, 8)
    fallback: Any = plan_attention(segment_ids, config=tight, **options)
    assert not fallback.fits and all(plan.fits for plan in plans)
    assert fallback.ranges.k_end.shape == (3, 40)
    assert fallback.fingerprint.shape == plans[0].fingerprint.shape == (3, 5)
    stacked: Any = stack_plans(plans)
    np.testing.assert_array_equal(stacked.ranges.k_end[1], plans[1].ranges.k_end)
    with pytest.raises(ValueError, match=r"mask is .*PrefixLM, Causal.* same in all plans"):
        stack_plans([plans[0], plan_attention(segment_ids, world_size=3)])


def test_arrays_of_another_shape_are_refused():
    given: dict[str, Any]
    for given in ({"lengths": [6]}, {"segment_ids": np.ones((1, 6), np.int32)}):
        with pytest.raises(ValueError, match=r"PrefixLM.* but the batch has shape \[1, 6\]"):
            plan_attention(**given, world_size=2, mask=PrefixLM(np.ones((1, 8), bool)))


def test_capacities_from_a_sample_of_batches_and_of_one_inside_jit():
    rng = np.random.default_rng()
    batches = [np.repeat([1, 2], [size, 24 - size])[None] for size in (5, 20, 12)]
    masks = [PrefixLM(np.arange(24)[None] < rng.integers(1, 24)) for _ in batches]
    config = fit_plan_config(batches, world_size=2, mask=masks)
    options = {"world_size": 2, "mask": masks[0]}
    assert plan_attention(batches[0], **options, config=config).fits
    with pytest.raises(ValueError, match=r"a list for 2 batches, but there are more\. Pass one"):
        fit_plan_config(batches, world_size=2, mask=masks[:2])
    block = PlanConfig(block=3)
    needed = needs_inside_jit(batches[0], **options, config=block)
    inside = jax.jit(lambda ids, mask: plan_attention(ids, world_size=2, mask=mask, config=needed))
    assert inside(batches[0], masks[0]).fits
