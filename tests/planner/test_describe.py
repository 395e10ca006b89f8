"""Descriptions and pictures of plans: the numbers agree with the plan; many ranks stay readable."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jax_cp_dispatch import (
    PlacementConfig,
    PlanConfig,
    compute_metadata,
    place_tokens,
    plan_attention,
)
from jax_cp_dispatch.planner.describe import pieces_of_rank
from jax_cp_dispatch.plots import plot_plan

LENGTHS = [[50, 6, 4, 3, 1], [9, 9, 9, 9, 9, 9]]  # 118 of 128 tokens


def make_plan():
    segment_ids = np.zeros((2, 64), np.int32)
    for row, lengths in zip(segment_ids, LENGTHS, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return plan_attention(segment_ids, world_size=4, config=PlanConfig(block=4))


def number(text, pattern):
    (found,) = re.findall(pattern, text)
    return float(found.replace(",", ""))


@pytest.mark.parametrize("kind", ["moved", "placement", "placed"])
def test_numbers_of_a_plan(kind):
    if kind == "moved":
        made = plan = make_plan()
        pairs = np.asarray(plan.pairs_after)
        moved = {"queries": plan.num_q_tokens_moved, "keys": plan.num_kv_tokens_moved}
        assert number(made.describe(), r"before planning ([\d.]+)") == pytest.approx(
            float(plan.imbalance_before), abs=5e-4
        )
    else:
        placement = place_tokens(LENGTHS, world_size=4, columns=64)
        plan = placement.plan
        made = placement if kind == "placement" else plan
        pairs, moved = plan.pairs, {"keys": plan.num_kv_tokens_moved}
    text = made.describe()
    assert text.startswith(f"{type(made).__name__}: 4 ranks of 32 tokens")
    assert "118 queries, 10 padding" in text
    assert number(text, r"max/mean ([\d.]+)") == pytest.approx(float(plan.imbalance), abs=5e-4)
    for what, rows in moved.items():
        assert number(text, rf"  {what} +([\d,]+) move") == rows
    worst = [int(rank) for rank in re.findall(r"rank (\d+): [\d.]+ of the mean", text)]
    assert len(worst) == 3
    np.testing.assert_array_equal(pairs[worst], np.sort(pairs)[::-1][:3])


def test_a_plan_names_the_senders_of_queries():
    """Rank 0 has all work; the pieces of the other ranks with most work come from there."""
    plan = plan_attention(lengths=[64], world_size=4, columns=256, config=PlanConfig(block=4))
    text = plan.describe()
    (home,) = re.findall(r"rank 0: .*\n((?:      .*\n?)*)", text) or [""]
    assert "from rank" not in home
    others = re.findall(r"rank [123]: .*\n((?:      .*\n?)+)", text)
    assert others and all("from rank 0" in other for other in others)


def test_a_placement_says_where_its_work_comes_from():
    """The document of 50 tokens is cut; it makes most of the work of the ranks that hold it."""
    placement = place_tokens(LENGTHS, world_size=4, columns=64)
    text = placement.describe()
    lines = re.findall(
        r"(\d+) queries attend to (\d+) keys; batch row 0, columns (\d+) to (\d+)", text
    )
    cuts = [tuple(map(int, x)) for x in lines if int(x[3]) <= 50]
    assert cuts
    for queries, keys, first, last in cuts:
        assert last - first == queries
        assert keys == last  # the document starts at column 0, and is causal


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
    assert "rank 0: 4; 4 from rank 1" in text
    view = metadata.get_slice(1).describe()
    assert "sends     8 rows; 4 to rank 0, 4 to rank 1" in view
    assert "receives  7 rows; 4 from rank 1, 3 from rank 0" in view


@pytest.mark.parametrize("kind", ["moved", "placement", "placed", "metadata"])
def test_pictures(kind, tmp_path):
    """The labels are text in an SVG, where comments repeat them."""
    placement = place_tokens(LENGTHS, world_size=4, columns=64)
    plan = make_plan()
    drawn, labels = {
        "moved": (plan, ["attention work", "queries", "keys and values"]),
        "placement": (placement, ["attention work", "keys and values"]),
        "placed": (placement.plan, ["attention work", "keys and values"]),
        "metadata": (plan.q_metadata, ["rows that move", "rows", "received from others"]),
    }[kind]
    plot_plan(drawn, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in [*labels, "from rank"])


def test_work_is_relative_to_the_speeds_of_ranks():
    config = PlacementConfig(rank_speeds=(1.0, 2.0, 1.0, 1.0), balance_tolerance=0.1)
    placement = place_tokens([[32] * 64], world_size=4, config=config)
    text = placement.describe()
    assert number(text, r"max/mean ([\d.]+)") == pytest.approx(placement.imbalance, abs=5e-4)
    assert "of its share" in text and "work / share" in text


def test_keys_between_nodes():
    config = PlacementConfig(ranks_per_node=2)
    placement = place_tokens([[200, 30, 26]], world_size=4, config=config)
    text = placement.describe()
    moved = placement.num_kv_tokens_moved_between_nodes
    assert moved > 0 and f"{moved:,} keys move between nodes of 2 ranks" in text
    assert "nodes" not in placement.plan.describe()


def test_a_batch_that_does_not_fit():
    config = PlacementConfig(kv_capacity=20, max_transfers=4, max_pieces=4)
    placement = place_tokens([64], world_size=4, config=config, fallback="ring")
    assert "the batch does not fit its capacities" in placement.plan.describe()
    assert "Pass kv_capacity>=64" in placement.describe()


def test_a_plan_that_moves_nothing():
    plan = place_tokens([[8], [8]], world_size=1).plan
    text = plan.describe()
    assert "No keys move between ranks." in text


def test_traced_plans_parts_and_stacks_are_rejected():
    plan = make_plan()
    with pytest.raises(TypeError, match=r"Metadata\.describe: the plan is traced.*outside jit"):
        jax.jit(lambda x: x.describe())(plan.q_metadata)
    for other in (lambda x: x[:1], lambda x: np.stack([x, x])):  # a rank's part, stacked plans
        with pytest.raises(ValueError, match=r"AttentionPlan\.describe: .* the plan of all 4"):
            jax.tree.map(other, plan).describe()


@settings(max_examples=100, deadline=None)
@given(
    documents=st.lists(st.tuples(st.integers(2, 9), st.integers(0, 9)), max_size=8),
    window=st.one_of(st.none(), st.integers(2, 12)),
    gap=st.integers(0, 2),
)
def test_pieces_from_key_ranges(documents, window, gap):
    """Each document has `queries` rows after `earlier` keys; padding separates them if `gap`."""
    start, end, expected, key = [], [], [], 0
    for queries, earlier in documents:
        last = np.arange(earlier, earlier + queries)
        first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
        widths = last + 1 - first
        expected.append((len(start), queries, last[-1] + 1 - first[0], widths.sum()))
        start += [*(key + first), *[0] * gap]
        end += [*(key + last + 1), *[0] * gap]
        key += earlier + queries + 1  # keys of other documents are never adjacent
    found = pieces_of_rank(np.array(start, np.int32), np.array(end, np.int32))
    assert [tuple(x) for x in found] == expected
