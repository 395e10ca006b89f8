"""Placements: tokens and their arrays, groups of rows, layers with several masks, parts of ranks.

Every token has one place and every query its keys, and a rank its part of it: test_plans.py. How
good they are: test_balance.py.
"""

import pickle
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from mask_oracle import visible
from packed_batches import pack
from planner_oracle import check_placement
from properties import examples

from jax_cp_dispatch import PlanConfig, masks, place_tokens, plan_attention, stack_plans
from jax_cp_dispatch.masks import BlockCausal, Causal, Chunked, PrefixLM, SlidingWindow


def test_lengths_and_segment_ids_give_the_same_placement():
    rng = np.random.default_rng(3)
    lengths = [[5, 30, 1, 12], [60, 1, 1]]
    segment_ids = np.zeros((2, 64), int)
    for b, row in enumerate(lengths):
        numbers = rng.permutation(np.arange(1, 10))[: len(row)]
        segment_ids[b, : sum(row)] = np.repeat(numbers, row)
    by_lengths = place_tokens(lengths, world_size=4, columns=64)
    by_ids = place_tokens(segment_ids=segment_ids, world_size=4)
    assert np.array_equal(by_lengths.permutation, by_ids.permutation)
    for row, of_row in zip(segment_ids, lengths, strict=True):  # lengths are numbered from 1
        row[: sum(of_row)] = np.repeat(1 + np.arange(len(of_row)), of_row)
    by_lengths.plan.validate(by_lengths.apply(segment_ids))


def test_positions_that_do_not_increase_start_a_new_document():
    segment_ids = np.ones((1, 64), int)
    positions = np.concatenate([np.arange(40), np.arange(24)])[None]
    placement = place_tokens(segment_ids=segment_ids, positions=positions, world_size=4)
    check_placement(placement, segment_ids, positions)


def test_apply_and_restore():
    """Arrays of any shape in any pytree; the columns of rank r are in its order."""
    lengths, world_size, columns = [[50, 3, 30], [90]], 4, 96
    placement = place_tokens(lengths, world_size=world_size, columns=columns)
    rng = np.random.default_rng(0)
    arrays = {
        "tokens": rng.integers(0, 9, (2, columns)),
        "features": (rng.normal(size=(2, columns, 3, 2)),),
        "mask": PrefixLM(rng.random((2, columns)) < 0.5),
    }
    placed = placement.apply(arrays)
    by_rank = placed["tokens"].reshape(2, world_size, -1).swapaxes(0, 1).reshape(-1)
    assert np.array_equal(by_rank, arrays["tokens"].reshape(-1)[placement.permutation])
    prefix_end = placement.apply(arrays["mask"].prefix_end)
    np.testing.assert_array_equal(placed["mask"].prefix_end, prefix_end)
    jax.tree.map(np.testing.assert_array_equal, placement.restore(placed), arrays)
    on_device = jax.jit(lambda x: placement.restore(placement.apply(x)))(arrays["tokens"])
    np.testing.assert_array_equal(on_device, arrays["tokens"])
    no_features = np.zeros((2, columns, 0))
    assert placement.restore(placement.apply(no_features)).shape == no_features.shape


def test_groups_of_rows_are_placed_on_ranks_of_their_own():
    """As placements of the groups apart, with arrays and masks of the whole batch."""
    rng = np.random.default_rng()
    ids, positions = pack(rng, 6, 24, max_length=20)
    ids[:2] = 0  # a group of padding
    mask = masks.Blocks(rng.integers(0, 3, size=ids.shape))
    options: dict[str, Any] = {"world_size": 2, "masks": ("causal", mask)}
    placement = place_tokens(segment_ids=ids, positions=positions, num_groups=3, **options)
    apart = []
    for rows in np.split(np.arange(6), 3):
        options["masks"] = "causal", jax.tree.map(lambda x, rows=rows: x[rows], mask)
        apart.append(place_tokens(segment_ids=ids[rows], positions=positions[rows], **options))
    for got, plans in zip(
        placement.plans, zip(*(x.plans for x in apart), strict=True), strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, got, stack_plans(plans))
    x = rng.normal(size=(6, 24, 3))
    each = zip(apart, np.split(x, 3), strict=True)
    placed = placement.apply(x)
    np.testing.assert_array_equal(placed, np.concatenate([p.apply(part) for p, part in each]))
    np.testing.assert_array_equal(placement.restore(placed), x)
    np.testing.assert_array_equal(placement.pairs_before, [p.pairs_before for p in apart])
    assert placement.imbalance == max(p.imbalance for p in apart)
    assert placement.needs.kv_capacity == max(p.needs.kv_capacity or 0 for p in apart)
    window = placement.plan_for(masks.SlidingWindow(4))
    want = stack_plans([p.plan_for(masks.SlidingWindow(4)) for p in apart])
    jax.tree.map(np.testing.assert_array_equal, window, want)
    of_layers = lambda p: sum(n * x.pairs for n, x in zip(p.layers, p.plans, strict=True))
    pairs = np.stack([of_layers(p) for p in apart]).astype(float)
    text = placement.describe()
    assert f"max/mean {placement.imbalance:.3f} inside a group, " in text
    assert f"{pairs.max() / pairs.mean():.3f} of all ranks" in text and "Group 2 of 3" in text
    part = placement.groups[1].slice_of(1).apply(x[2:4])
    np.testing.assert_array_equal(part, apart[1].slice_of(1).apply(x[2:4]))


def test_the_order_is_read_only():
    """`apply` and `restore` use these arrays again; also of a part, and after pickling."""
    whole = place_tokens([30, 9, 25], world_size=4)
    for placement in (whole, whole.slice_of(1), pickle.loads(pickle.dumps(whole))):
        with pytest.raises(ValueError, match="read-only"):
            placement.permutation[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        whole.inverse[:2] = 0
    copy = whole.inverse.copy()
    copy[0] = 1  # a copy is the caller's


def test_a_loader_starts_no_backend_and_sends_the_placement():
    """In a separate process; the result is bitwise the same as here."""
    program = """
import pickle, sys
import jax_cp_dispatch, jax._src.xla_bridge as bridge
placement = jax_cp_dispatch.place_tokens([[700, 200, 90, 34]], world_size=8)
batch = placement.apply(__import__("numpy").arange(1024)[None])
jax_cp_dispatch.plan_attention(lengths=[[700, 200, 90, 34]], world_size=8)
assert not bridge.backends_are_initialized()
sys.stdout.buffer.write(pickle.dumps((placement, batch)))
"""
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
    sent, batch = pickle.loads(output)
    here = place_tokens([[700, 200, 90, 34]], world_size=8)
    assert np.array_equal(sent.permutation, here.permutation)
    assert np.array_equal(batch[0], here.permutation)
    jax.tree.map(np.testing.assert_array_equal, sent.plan, here.plan)


# ---- Layers with several masks: the sum is balanced, and every mask has a plan.

BOTH = {"masks": ("causal", SlidingWindow(64)), "layers": (8, 40)}


@examples(8)
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
        pairs = sum(visible(mask, n).sum() for n in lengths)
        assert np.asarray(plan.pairs, np.float64).sum() == pairs
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
    for both in (("causal",), ("causal", "causal")):
        several = place_tokens(lengths, world_size=4, masks=both)
        np.testing.assert_array_equal(several.permutation, one.permutation)
        for plan in several.plans:
            jax.tree.map(np.testing.assert_array_equal, plan, one.plan)


def test_a_fallback_has_a_plan_for_each_mask_and_leaves_tokens_in_their_columns():
    names = ("max_kv_transfers", "max_cut_pieces", "max_linked_pieces", "max_pieces")
    config = PlanConfig(kv_capacity=512, **dict.fromkeys(names, 1))
    lengths, tokens = [[900, 30, 70], [500, 400]], np.arange(2000).reshape(2, 1000)
    for of_layers in (BOTH["masks"], ("causal", PrefixLM(tokens % 1000 < 9))):
        options: Any = {"masks": of_layers, "world_size": 4, "columns": 1000}
        options |= {"config": config, "fallback": "ring"}
        placement = place_tokens(lengths, **options)
        assert [bool(plan.fits) for plan in placement.plans] == [False, False]
        for rank in range(4):
            part = place_tokens(lengths, **options, rank=rank)
            assert part.reason == placement.reason
            jax.tree.map(np.testing.assert_array_equal, part.plans, placement.slice_of(rank).plans)
            np.testing.assert_array_equal(part.apply(tokens), np.split(tokens, 4, axis=1)[rank])
    with pytest.raises(ValueError, match="no tokens were placed"):
        placement.plan_for("causal")


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
    of_numbers = [place_tokens([[30, 2]], world_size=4, mask=x).plan for x in ("causal", "full")]
    with pytest.raises(ValueError, match=r"mask is \[Causal\(\), Full\(\)\]; it needs"):
        stack_plans(of_numbers)


def test_arrays_of_masks_that_are_refused():
    segment_ids = np.repeat([[1, 2]], [21, 11], axis=1)
    mask, wrong = PrefixLM(np.arange(32)[None] < 9), PrefixLM(np.ones((1, 8), bool))
    batches: Any = (
        (place_tokens, {"lengths": [21, 11]}),
        (plan_attention, {"lengths": [21, 11]}),
        (plan_attention, {"segment_ids": segment_ids}),
    )
    for make, batch in batches:
        with pytest.raises(ValueError, match=r"PrefixLM.* but the batch has shape \[1, 32\]"):
            make(**batch, world_size=4, mask=wrong)
    placement = place_tokens(segment_ids=segment_ids, world_size=4, mask=mask)
    other = placement.apply(PrefixLM(np.arange(32)[None] < 10))
    with pytest.raises(ValueError, match=r"the arrays of the mask of rank .* are not those"):
        placement.plan.validate(placement.apply(segment_ids), mask=other)
    with pytest.raises(ValueError, match="which does not know the order of all"):
        placement.slice_of(1).plan_for(mask)


def test_a_part_does_not_answer_for_all_ranks():
    part = place_tokens([[50, 30, 16]], world_size=4, rank=2)
    of_all = {
        part: ("inverse", "imbalance", "num_kv_tokens_moved_between_nodes"),
        part.plan: ("imbalance", "num_kv_tokens_moved"),
    }
    for x, names in of_all.items():
        for name in names:
            with pytest.raises(ValueError, match=rf"{name}: this is the part of 1 of 4 ranks\."):
                getattr(x, name)
        with pytest.raises(ValueError, match="slice_of: got rank 0 with 1 of 4 ranks"):
            x.slice_of(0)
    with pytest.raises(ValueError, match="restore: this is the part of 1 of 4 ranks"):
        part.restore(np.zeros((1, 96)))
    with pytest.raises(ValueError, match=r"the plan of all 4 ranks has \[4, 5\]"):
        part.describe()
