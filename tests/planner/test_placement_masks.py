"""Placement for masks that are not causal: balance, few keys, and what it has in common."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from placement_oracle import check_placement, fewest_keys

from jax_cp_dispatch import PlacementConfig, place_tokens, stack_plans

TOKENS = 65536
BATCHES = [
    pytest.param(batch["lengths"], batch["ranks"], id=f"{path.stem}-{batch['ranks']}")
    for path in sorted((Path(__file__).parents[1] / "data" / "packed").glob("*.json"))
    for batch in json.loads(path.read_text())
]


def keys_of_free_fillers(lengths, world_size):
    """A lower bound: each document alone, on as few ranks as tokens and work allow."""
    lengths = np.array(lengths, np.int64)
    most = np.minimum(TOKENS, 1.01 * (lengths**2).sum() / world_size / lengths)
    return int(((np.ceil(lengths / most) - 1) * lengths).sum())


@pytest.mark.parametrize("lengths, world_size", BATCHES)
def test_full_attention_is_balanced(lengths, world_size):
    plan = place_tokens(lengths, world_size=world_size, causal=False).plan
    plan.kv_metadata.validate()
    assert plan.imbalance <= 1.0101
    assert (plan.num_rows == TOKENS).all()
    lengths = np.array(lengths, np.int64)
    assert plan.pairs.sum() == pytest.approx((lengths**2).sum(), rel=1e-6)
    least = keys_of_free_fillers(lengths, world_size)
    assert least <= plan.num_kv_tokens_moved <= 1.4 * least + 0.05 * lengths.sum()


@pytest.mark.parametrize("window", [(4096, 4096), (None, 512), (1024, None)])
@pytest.mark.parametrize("lengths, world_size", [x for x in BATCHES if x.values[1] == 32])
def test_two_sided_windows_are_balanced(lengths, world_size, window):
    options: dict[str, Any] = {"world_size": world_size, "causal": False}
    plan = place_tokens(lengths, window=window, **options).plan
    assert plan.imbalance <= 1.0101
    assert (plan.num_rows == TOKENS).all()
    if None not in window:  # each cut costs at most the window
        cuts = (plan.run_row < TOKENS).sum() - len(lengths)
        assert plan.num_kv_tokens_moved <= sum(window) * cuts


UNIT = 64


@pytest.mark.parametrize("seed", range(8))
def test_near_the_optimum_of_small_cases(seed):
    """Of full attention: within the limit if any placement is, with few more keys than needed."""
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(2, 4))
    total = world_size * int(rng.integers(3, 6 if world_size == 2 else 5))
    cuts = np.sort(rng.choice(np.arange(1, total), int(rng.integers(0, 5)), replace=False))
    lengths = UNIT * np.diff([0, *cuts, total])
    mean = (lengths**2).sum() / world_size
    for tolerance in (0.05, 0.25, 1.0):
        config = PlacementConfig(balance_tolerance=tolerance)
        placement = place_tokens([lengths], world_size=world_size, causal=False, config=config)
        pairs, moved = check_placement(placement, [lengths], causal=False)
        limit = (1 + tolerance) * mean
        least = fewest_keys(lengths // UNIT, world_size, limit, unit=UNIT, causal=False)
        if least is not None:
            assert pairs.max() <= limit
            assert moved <= 1.25 * least + 2


def test_equal_masks_have_equal_placements():
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 400, 20)
    options: dict[str, Any] = {"world_size": 8, "columns": 8 * 600}
    causal = place_tokens(lengths, window=50, **options)
    pair = place_tokens(lengths, causal=False, window=(49, 0), **options)
    assert np.array_equal(causal.permutation, pair.permutation)
    for plan in (pair.plan, place_tokens(lengths, causal=False, window=(0, 49), **options).plan):
        assert plan.num_kv_tokens_moved == causal.plan.num_kv_tokens_moved
        np.testing.assert_array_equal(plan.pairs, causal.plan.pairs)


def test_plans_of_different_masks_differ():
    masks: list[dict[str, Any]] = [
        {},
        {"window": 5},
        {"causal": False},
        {"causal": False, "window": (4, 1)},
    ]
    plans = [place_tokens([[30, 2]], world_size=4, **mask).plan for mask in masks]
    assert len({plan.stamp[0, 0].item() for plan in plans}) == len(masks)
    with pytest.raises(ValueError, match=r"causal is \[True, False\]; it needs to be the same"):
        stack_plans([plans[0], plans[2]])


def test_a_part_of_a_document_needs_all_its_keys():
    with pytest.raises(ValueError, match=r"a query of document 0 .* attends to 600 keys.*>=600"):
        config = PlacementConfig(kv_capacity=599)
        place_tokens([[600, 424]], world_size=4, causal=False, config=config)
    config = PlacementConfig(kv_capacity=700, balance_tolerance=0.5)
    options: dict[str, Any] = {"world_size": 4, "columns": 2048, "causal": False, "config": config}
    placement = place_tokens([[600, 424]], **options)
    check_placement(placement, [[600, 424]], causal=False)
    assert placement.plan.num_kv_tokens_moved == 600  # on two ranks; the other is whole
    assert "queries attend to 600 keys" in placement.describe()
