"""Placements for masks with arrays: each query sees its keys, alone and beside other masks."""

import functools
import pickle
from typing import Any

import jax
import numpy as np
import pytest
from array_masks import KINDS, random_mask
from mask_oracle import batch_visible
from packed_batches import pack
from planner_oracle import deliver

from jax_cp_dispatch import PlanConfig, fit_plan_config, place_tokens, stack_plans
from jax_cp_dispatch.masks import Causal, PrefixLM, SharedPrefix, SlidingWindow, Tree


def same(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def check_plan(plan, placement, segment_ids, visible):
    """`visible[b, q, k]` are the pairs of each batch row."""
    columns = segment_ids.shape[1]
    placed = placement.permutation.reshape(placement.world_size, -1)  # the token at each place
    keys = deliver(plan.kv_metadata, placed, plan.kv_capacity)
    pairs = np.zeros(len(placed))
    for rank, tokens in enumerate(placed):
        kv_start, kv_end, *of_keys = (np.asarray(x) for x in plan.local_ranges(rank))
        for i, query in enumerate(tokens):
            seen = np.arange(kv_start[i], kv_end[i])
            if of_keys:
                seen = seen[(of_keys[0][seen] <= i) & (i < of_keys[1][seen])]
            row, column = divmod(int(query), columns)
            is_token = segment_ids[row, column] > 0
            wanted = row * columns + np.flatnonzero(visible[row, column] & is_token)
            assert np.array_equal(keys[rank, seen], wanted), (rank, i)
            pairs[rank] += len(seen)
    np.testing.assert_allclose(plan.pairs, pairs, rtol=1e-6)
    plan.validate(placement.apply(segment_ids))


@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_exact_for_any_mask(kind):
    """Of one mask, and beside a window; also a rank's slice, made alone."""
    rng = np.random.default_rng()
    for _ in range(5):
        world_size = int(rng.integers(1, 5))
        segment_ids, _ = pack(rng, 2, world_size * int(rng.integers(4, 20)), max_length=60)
        constructor, arrays, pairs = random_mask(kind, rng, segment_ids)
        mask, visible = constructor(*arrays), batch_visible(segment_ids, pairs)
        options = {"segment_ids": segment_ids, "world_size": world_size}
        alone = place_tokens(mask=mask, **options)
        check_plan(alone.plan, alone, segment_ids, visible)
        alone.plan.validate(alone.apply(segment_ids), mask=alone.apply(mask))
        assert same(alone.plan, pickle.loads(pickle.dumps(alone.plan)))
        part = place_tokens(mask=mask, rank=world_size - 1, **options)
        assert same(part.plan, alone.plan.slice_of(world_size - 1))

        column = np.arange(segment_ids.shape[1])
        distance = column[:, None] - column
        window = batch_visible(segment_ids, (distance >= 0) & (distance < 5))
        two = place_tokens(masks=(SlidingWindow(5), mask), layers=(3, 1), **options)
        check_plan(two.plans[0], two, segment_ids, window)
        check_plan(two.plans[1], two, segment_ids, visible)
        work = 3 * window.sum() + visible.sum()
        assert two.pairs_before.sum() == work
        assert same(two.plan_for(mask), two.plans[1])


def test_a_shared_prompt_moves_once_to_each_rank():
    """However many completions a rank has; not at all from its own rows."""
    ids = np.repeat([np.arange(9)], [768] + 8 * [32], axis=1)
    ones = np.ones_like(ids)
    placement = place_tokens(segment_ids=ones, world_size=8, mask=SharedPrefix(ids))
    placed = placement.permutation.reshape(8, -1)
    keys = deliver(placement.plan.kv_metadata, placed + 1, placement.plan.kv_capacity)
    for rank, received in enumerate(keys):
        tokens, count = np.unique(received[received > 0], return_counts=True)
        assert (count == 1).all() and np.isin(placed[rank] + 1, tokens).all()
    last = placed[(ids[0, placed] > 0).any(1)]  # the ranks of completions have the whole prompt
    moved = sum(768 - (ids[0, tokens] == 0).sum() for tokens in last)
    assert moved <= placement.plan.num_kv_tokens_moved <= 7 * 768 + 8 * 32


def test_balance_of_shared_prompts_and_trees():
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 900, 60)
    segment_ids = np.repeat(np.arange(1, 61), lengths)[None]
    segment_ids = np.pad(segment_ids, ((0, 0), (0, -segment_ids.shape[1] % 8)))
    position = np.concatenate([*map(np.arange, lengths), np.zeros(8, int)])[: segment_ids.shape[1]]
    turns = np.where(position < 200, 0, 1 + position // 100)[None]
    branches = np.array([-1, 0, 1, 1, 0, 4, 0, 0, 0])  # spans of 100 tokens
    first = 9 * np.arange(61)[:, None]
    parents = np.where(branches < 0, -1, first + branches).reshape(1, -1)
    spans = 9 * segment_ids + position // 100
    for mask in (SharedPrefix(turns), Tree(spans, parents)):
        placement = place_tokens(segment_ids=segment_ids, world_size=8, mask=mask)
        assert placement.imbalance <= 1.0101 < placement.imbalance_before
        assert f"max/mean {placement.imbalance:.3f}" in placement.describe()


def test_what_is_refused():
    segment_ids = np.repeat([[1, 2]], [21, 11], axis=1)
    mask = PrefixLM(np.arange(32)[None] < 9)
    with pytest.raises(ValueError, match=r"PrefixLM.* but the batch has shape \[1, 32\]"):
        place_tokens([21, 11], world_size=4, mask=PrefixLM(np.ones((1, 8), bool)))
    placement = place_tokens(segment_ids=segment_ids, world_size=4, mask=mask)
    with pytest.raises(ValueError, match=r"the arrays of the mask of rank .* are not those"):
        placement.plan.validate(placement.apply(segment_ids), mask=placement.apply(
            PrefixLM(np.arange(32)[None] < 10)))  # fmt: skip
    with pytest.raises(ValueError, match="which does not know the order of all"):
        placement.slice_of(1).plan_for(mask)
    other = place_tokens(segment_ids=segment_ids, world_size=4)
    with pytest.raises(ValueError, match="same in all plans"):
        stack_plans([placement.plan, other.plan])
    few = dict.fromkeys(
        ("max_kv_transfers", "max_cut_pieces", "max_linked_pieces", "max_pieces"), 1
    )
    config = PlanConfig(kv_capacity=8, **few)
    fallback = place_tokens(
        segment_ids=segment_ids, world_size=4, masks=(Causal(), mask), config=config,
        fallback="ring",
    )  # fmt: skip
    assert [bool(x.fits) for x in fallback.plans] == [False, False]


def test_capacities_from_the_masks_of_each_batch():
    rng = np.random.default_rng()
    batches = [np.repeat([1, 2], [size, 24 - size])[None] for size in (5, 20, 12)]
    of_batches = [PrefixLM(np.arange(24)[None] < rng.integers(1, 24)) for _ in batches]
    options: dict[str, Any] = {"world_size": 2}
    fit = functools.partial(fit_plan_config, placed=True, **options)
    config = fit(batches, mask=of_batches)
    for ids, mask in zip(batches, of_batches, strict=True):
        assert place_tokens(segment_ids=ids, mask=mask, config=config, **options).plan.fits
    both = [("causal", mask) for mask in of_batches]
    assert fit(batches, masks=both).kv_capacity
    for number, name, masks in ((2, "mask", of_batches), (4, "masks", [*both, both[0]])):
        with pytest.raises(
            ValueError, match=f"{name} is a list for {number} batches.* Pass one el"
        ):
            fit(batches, **{name: masks[:number]})
