"""Descriptions and pictures of plans: the numbers agree with the plan; many ranks stay readable."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from jax_cp_dispatch import PlanConfig, compute_metadata, place_tokens, plan_attention
from jax_cp_dispatch.cost import rows_by_link
from jax_cp_dispatch.masks import PrefixLM

LENGTHS = [[50, 6, 4, 3, 1], [9, 9, 9, 9, 9, 9]]  # 118 of 128 tokens
BATCH: dict[str, Any] = {"lengths": LENGTHS, "columns": 64, "world_size": 4}
PLACEMENT, PLAN = place_tokens(**BATCH), plan_attention(**BATCH, config=PlanConfig(block=4))


def number(text, pattern):
    (found,) = re.findall(pattern, text)
    return float(found.replace(",", ""))


def test_a_plan_is_printed_by_its_shapes():
    """Traced and stacked plans too; the values are pages of numbers."""
    assert "run_row=int32[4,8]" in repr(PLACEMENT) and "columns=64" in repr(PLACEMENT)
    assert re.search(r"kv_metadata=Metadata\(dst_rank=int32\[4,\d+\], ", repr(PLAN))
    assert jax.jit(lambda plan: len(repr(plan)))(PLAN) < 1000


def work_of_columns():
    """Counts the keys of every query; rank r holds the r-th quarter of the columns."""
    keys = np.zeros((2, 64))
    for row, lengths in zip(keys, LENGTHS, strict=True):
        row[: sum(lengths)] = np.concatenate([np.arange(1, n + 1) for n in lengths])
    return keys.reshape(2, 4, 16).sum((0, 2))


@pytest.mark.parametrize("made", [PLAN, PLACEMENT, PLACEMENT.plan], ids=["moved", "whole", "plan"])
def test_numbers_of_a_plan(made):
    plan, text = getattr(made, "plan", made), made.describe()
    moved = {"keys": plan.num_kv_tokens_moved}
    if made is PLAN:
        moved["queries"] = plan.num_q_tokens_moved
    assert text.startswith(f"{type(made).__name__}: 4 ranks of 32 tokens")
    assert "118 queries, 10 padding" in text
    assert number(text, r"max/mean ([\d.]+)") == pytest.approx(float(plan.imbalance), abs=5e-4)
    for what, rows in moved.items():
        assert number(text, rf"  {what} +([\d,]+) move") == rows
    np.testing.assert_array_equal(made.pairs_before, work_of_columns())
    slowest = made.pairs_before.argmax()
    assert f"before planning {made.imbalance_before:.3f}, on rank {slowest})" in text


def test_descriptions_of_many_ranks_are_short():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 300, 2000).tolist() + [20_000] * 5
    placement = place_tokens(lengths, world_size=256)
    for text in (placement.describe(), placement.plan.kv_metadata.describe()):
        assert len(text.splitlines()) < 60
        assert max(map(len, text.splitlines())) <= 100
        assert "pairs of ranks; the largest" in text


def test_metadata():
    """Rank 0 sends 3 rows to rank 1 and keeps 2; rank 1 sends 4 rows to both."""
    target = np.array([[[1, -1], [0, -1]], [[0, 1], [-1, -1]]], np.int32)
    metadata, _ = compute_metadata(np.array([[3, 2], [4, 0]]), target)
    text = metadata.describe()
    assert "13 received; 7 of them from another rank" in text
    assert re.search(r"^ +0 +2 +3$", text, re.M) and re.search(r"^ +1 +4 +4$", text, re.M)
    assert re.search(r"rows received from others +3 +4 +4 +0$", text, re.M)
    view = metadata.get_slice(1).describe()
    assert "sends     8 rows" in view and re.search(r"^  rows to a rank +4 +4 +4 +0$", view, re.M)
    assert "receives  7 rows" in view and re.search(r"^  rows from a rank +3 +4 +4 +1$", view, re.M)
    np.testing.assert_array_equal(metadata.rows_between_ranks(), [[2, 3], [4, 4]])
    assert rows_by_link(metadata.rows_between_ranks()).total == 7 / 2
    with pytest.raises(ValueError, match=r"Metadata\.rows_between_ranks: .* the plan of all 2"):
        metadata.get_slice(0).rows_between_ranks()


def test_choices_of_a_plan():
    """Work relative to the speeds of ranks; keys between nodes; none that move."""
    speeds = PlanConfig(rank_speeds=(1.0, 2.0, 1.0, 1.0), balance_tolerance=0.1)
    placement = place_tokens([[32] * 64], world_size=4, config=speeds)
    text = placement.describe()
    assert number(text, r"max/mean ([\d.]+)") == pytest.approx(placement.imbalance, abs=5e-4)
    assert "work / share" in text
    nodes = PlanConfig(ranks_per_node=2)
    placement = place_tokens([[200, 30, 26]], world_size=4, config=nodes)
    moved = placement.num_kv_tokens_moved_between_nodes
    assert moved > 0 and f"{moved:,} keys move between nodes of 2 ranks" in placement.describe()
    assert "nodes" not in placement.plan.describe()
    alone = place_tokens([[8], [8]], world_size=1).plan.describe()
    assert "No keys move between ranks." in alone


def test_descriptions_name_the_work_of_ranks():
    """Pairs are those of the mask: 20 prefix tokens see each other, the others are causal."""
    mask = PrefixLM(np.arange(60)[None] < 20)
    plan = plan_attention(lengths=[60], world_size=3, mask=mask)
    text = plan.describe()
    assert f"{20 * 20 + sum(range(21, 61)):.3e} query-key pairs; max/mean" in text
    before = [20 * 20, *(sum(range(first, first + 20)) for first in (21, 41))]
    np.testing.assert_array_equal(plan.pairs_before, before)
    assert len(repr(plan)) < 1500
    placement = place_tokens([60], world_size=3, mask=mask)
    assert f"max/mean {placement.imbalance:.3f}" in placement.describe()


def test_a_batch_that_does_not_fit():
    few = dict.fromkeys(("max_kv_transfers", "max_pieces", "max_cut_pieces"), 4)
    config = PlanConfig(kv_capacity=20, max_linked_pieces=99, **few)
    options: Any = {"world_size": 4, "config": config, "fallback": "ring"}
    placement, part = place_tokens([64], **options), place_tokens([64], **options, rank=2).plan
    assert "the batch does not fit kv_capacity 20: it needs 64" in placement.plan.describe()
    assert part.describe() == placement.plan.describe()  # all that a rank has
    assert part.reason and part.reason.startswith("Plan: the batch does not fit kv_capacity 20: it")
    assert jax.device_put(placement.plan).reason == part.reason and PLAN.reason is None
    assert "Pass kv_capacity>=64" in placement.describe()


def test_traced_plans_parts_and_stacks_are_rejected():
    with pytest.raises(TypeError, match=r"Metadata\.describe: the plan is traced.*outside jit"):
        jax.jit(lambda x: x.describe())(PLAN.q_metadata)
    for other in (lambda x: x[:1], lambda x: np.stack([x, x])):  # a rank's part, stacked plans
        with pytest.raises(ValueError, match=r"Plan\.describe: .* the plan of all 4"):
            jax.tree.map(other, PLAN).describe()
