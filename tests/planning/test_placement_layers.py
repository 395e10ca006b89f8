"""One placement for layers with several masks: the sum is balanced, and every mask has a plan."""

import pickle

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jax_cp_dispatch import PlanConfig, place_tokens
from jax_cp_dispatch.masks import BlockCausal, Causal, Chunked, PrefixLM, SlidingWindow

BOTH = {"masks": ("causal", SlidingWindow(64)), "layers": (8, 40)}


def same(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def pairs_of(mask, lengths):
    """Pairs of whole documents, by their booleans."""
    visible = {
        Causal(): lambda q, k: k <= q,
        SlidingWindow(64): lambda q, k: (k <= q) & (k > q - 64),
        Chunked(48): lambda q, k: (k <= q) & (k // 48 == q // 48),
        BlockCausal(16): lambda q, k: k // 16 <= q // 16,
    }[mask]
    return sum(int(visible(*np.ogrid[:n, :n]).sum()) for n in lengths)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(1, 900), min_size=8, max_size=24),
    st.sampled_from([SlidingWindow(64), Chunked(48), BlockCausal(16)]),
    st.tuples(st.integers(1, 9), st.integers(1, 50)),
)
def test_the_weighted_sum_is_balanced(lengths, local, layers):
    placement = place_tokens(lengths, world_size=4, masks=(Causal(), local), layers=layers)
    plans, work = placement.plans, np.zeros(4)
    for plan, mask, count in zip(plans, (Causal(), local), layers, strict=True):
        assert plan.mask == mask
        plan.kv_metadata.validate()
        assert np.asarray(plan.pairs, np.float64).sum() == pairs_of(mask, lengths)
        work = work + count * np.asarray(plan.pairs, np.float64)
        np.testing.assert_array_equal(plan.num_rows, plans[0].num_rows)
        np.testing.assert_array_equal(plan.fingerprint[:, 2:], plans[0].fingerprint[:, 2:])
    assert placement.imbalance == pytest.approx(work.max() / work.mean(), rel=1e-6)


def test_balance_and_keys_of_layers():
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(20, 400, 90).tolist(), 5000, 3000]
    placement = place_tokens(lengths, world_size=8, **BOTH)
    assert placement.imbalance <= 1.0101
    cuts = int((placement.plan.run_row < placement.plan.num_tokens).sum()) - len(lengths)
    assert placement.plans[1].num_kv_tokens_moved <= 63 * cuts


def test_one_mask_and_equal_masks_give_the_same_placement():
    lengths = [900, 30, 500, 77, 300]
    one = place_tokens(lengths, world_size=4, mask="causal")
    for masks in (("causal",), ("causal", "causal")):
        several = place_tokens(lengths, world_size=4, masks=masks)
        np.testing.assert_array_equal(several.permutation, one.permutation)
        assert all(same(plan, one.plan) for plan in several.plans)


def test_a_plan_for_another_mask_and_of_one_rank():
    lengths = [900, 30, 500, 77, 300]
    placement = pickle.loads(pickle.dumps(place_tokens(lengths, world_size=4, **BOTH)))
    for plan in placement.plans:
        assert same(placement.plan_for(plan.mask), plan)
    part = place_tokens(lengths, world_size=4, rank=2, **BOTH)
    for a, b, c in zip(part.plans, placement.slice_of(2).plans, placement.plans, strict=True):
        assert same(a, b) and same(a, c.slice_of(2)) and same(part.plan_for(c.mask), a)


def test_apply_permutes_the_arrays_of_a_mask():
    placement = place_tokens([[700, 200], [90]], world_size=4, columns=1024)
    mask = PrefixLM(np.random.default_rng(0).random((2, 1024)) < 0.5)
    placed = placement.apply(mask)
    (before,), (after,) = jax.tree.leaves(mask), jax.tree.leaves(placed)
    assert isinstance(placed, PrefixLM)
    np.testing.assert_array_equal(after, placement.apply(before))
    assert same(placement.restore(placed), mask)


def test_a_fallback_has_a_plan_for_each_mask():
    few = dict.fromkeys(
        ("max_kv_transfers", "max_cut_pieces", "max_linked_pieces", "max_pieces"), 1
    )
    config = PlanConfig(kv_capacity=512, **few)
    placement = place_tokens([900, 30, 70], world_size=4, config=config, fallback="ring", **BOTH)
    assert [bool(plan.fits) for plan in placement.plans] == [False, False]
    with pytest.raises(ValueError, match="no tokens were placed"):
        placement.plan_for("causal")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layers": (1,)}, "Pass masks"),
        ({"masks": ("causal",), "mask": "causal"}, "both mask and masks"),
        ({"masks": ()}, "at least one mask"),
        ({"masks": ("causal", "full"), "layers": (1,)}, "one number for each mask"),
        ({"masks": ("causal", "full"), "layers": (0, 1)}, "numbers from 1"),
    ],
)
def test_masks_and_layers_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        place_tokens([8], world_size=2, **arguments)
