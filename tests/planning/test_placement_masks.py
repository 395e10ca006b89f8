"""Placement for masks that are not causal: balance, few keys, and what it has in common."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from placement_oracle import check_placement, fewest_keys
from random_lengths import UNIT, cut

from jax_cp_dispatch import PlanConfig, place_tokens, stack_plans
from jax_cp_dispatch.masks import Chunked, SlidingWindow

TOKENS = 65536
BATCHES = [
    pytest.param(batch["lengths"], batch["ranks"], id=f"{path.stem}-{batch['ranks']}")
    for path in sorted((Path(__file__).parents[1] / "data" / "packed").glob("*.json"))
    for batch in json.loads(path.read_text())
]
OF_32_RANKS: list[Any] = [batch.values for batch in BATCHES if batch.values[1] == 32]


def keys_of_free_fillers(lengths, world_size):
    """A lower bound: each document alone, on as few ranks as tokens and work allow."""
    lengths = np.array(lengths, np.int64)
    most = np.minimum(TOKENS, 1.01 * (lengths**2).sum() / world_size / lengths)
    return int(((np.ceil(lengths / most) - 1) * lengths).sum())


@pytest.mark.parametrize("lengths, world_size", [x for x in BATCHES if x.values[1] in (8, 128)])
def test_full_attention_is_balanced(lengths, world_size):
    plan = place_tokens(lengths, world_size=world_size, mask="full").plan
    plan.kv_metadata.validate()
    assert plan.imbalance <= 1.0101
    assert (plan.num_rows == TOKENS).all()
    lengths = np.array(lengths, np.int64)
    assert plan.pairs.sum() == pytest.approx((lengths**2).sum(), rel=1e-6)
    needed = keys_of_free_fillers(lengths, world_size)
    assert needed <= plan.num_kv_tokens_moved <= 1.4 * needed + 0.05 * lengths.sum()


@pytest.mark.parametrize("window", [(4097, 4096), (None, 512), (1025, None)])
def test_two_sided_windows_are_balanced(window):
    lengths, world_size = OF_32_RANKS[window[1] is None]
    plan = place_tokens(lengths, mask=SlidingWindow(*window), world_size=world_size).plan
    assert plan.imbalance <= 1.0101
    assert (plan.num_rows == TOKENS).all()
    if None not in window:  # each cut costs at most the window
        cuts = (plan.run_row < TOKENS).sum() - len(lengths)
        assert plan.num_kv_tokens_moved <= (sum(window) - 1) * cuts


@pytest.mark.parametrize("size", [512, 8192])
def test_chunks_are_balanced(size):
    """As documents of a chunk would be; a cut moves the keys before it in its chunk."""
    lengths, world_size = OF_32_RANKS[size == 512]
    plan = place_tokens(lengths, mask=Chunked(size), world_size=world_size).plan
    plan.kv_metadata.validate()
    assert plan.imbalance <= 1.0101
    assert (plan.num_rows == TOKENS).all()
    chunks, rest = np.divmod(np.array(lengths, np.int64), size)
    pairs = chunks * (size * (size + 1) // 2) + rest * (rest + 1) // 2
    assert plan.pairs.sum() == pytest.approx(pairs.sum(), rel=1e-6)
    cuts = (plan.run_row < TOKENS).sum() - len(lengths)
    assert plan.num_kv_tokens_moved <= (size - 1) * cuts


@pytest.mark.parametrize("seed", range(4))
def test_near_the_optimum_of_small_cases(seed):
    """Of full attention: within the limit if any placement is, with few more keys than needed."""
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(2, 4))
    total = world_size * int(rng.integers(3, 6 if world_size == 2 else 5))
    lengths = UNIT * cut(rng, total, rng.integers(0, 5))
    mean = (lengths**2).sum() / world_size
    for tolerance in (0.05, 0.25, 1.0):
        config = PlanConfig(balance_tolerance=tolerance)
        placement = place_tokens([lengths], world_size=world_size, mask="full", config=config)
        pairs, moved = check_placement(placement, [lengths], "full")
        limit = (1 + tolerance) * mean
        needed = fewest_keys(lengths // UNIT, world_size, limit, unit=UNIT, causal=False)
        if needed is not None:
            assert pairs.max() <= limit
            assert moved <= 1.25 * needed + 2


def test_mirrored_masks_have_mirrored_placements():
    lengths = np.random.default_rng(3).integers(1, 400, 20)
    place = lambda mask: place_tokens(lengths, world_size=8, columns=8 * 600, mask=mask).plan
    causal, mirrored = place(SlidingWindow(50)), place(SlidingWindow(1, 49))
    assert mirrored.num_kv_tokens_moved == causal.num_kv_tokens_moved
    np.testing.assert_array_equal(mirrored.pairs, causal.pairs)


def test_plans_of_different_masks_differ():
    masks = [None, SlidingWindow(5), Chunked(5), "full", SlidingWindow(5, 1)]
    plans = [place_tokens([[30, 2]], world_size=4, mask=mask).plan for mask in masks]
    assert len({plan.fingerprint[0, 0].item() for plan in plans}) == len(masks)
    with pytest.raises(ValueError, match=r"mask is \[Causal\(\), Full\(\)\]; it needs"):
        stack_plans([plans[0], plans[3]])


def test_a_part_of_a_document_needs_all_its_keys():
    with pytest.raises(ValueError, match=r"a query of document 0 .* attends to 600 keys.*>=600"):
        config = PlanConfig(kv_capacity=599)
        place_tokens([[600, 424]], world_size=4, mask="full", config=config)
    config = PlanConfig(kv_capacity=700, balance_tolerance=0.5)
    options: dict[str, Any] = {"world_size": 4, "columns": 2048, "mask": "full", "config": config}
    placement = place_tokens([[600, 424]], **options)
    check_placement(placement, [[600, 424]], "full")
    assert placement.plan.num_kv_tokens_moved == 600  # on two ranks; the other is whole
