"""Profiles of attention: the same output, its times by step and by rank, and their trace."""

import json
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import AXIS, mesh_of
from sequences import Case, dense, draw

from jax_cp_dispatch import local_attention, place_tokens, plan_attention, stack_plans
from jax_cp_dispatch.masks import SharedPrefix, SlidingWindow
from jax_cp_dispatch.profiling import (
    Span,
    balanced_attention_profile,
    hamilton_attention_profile,
    placed_attention_profile,
    ring_attention_profile,
    zigzag_ring_attention_profile,
)
from jax_cp_dispatch.timeline import write_chrome_trace

PROFILES = {
    "ring": ring_attention_profile,
    "zigzag": zigzag_ring_attention_profile,
    "hamilton": hamilton_attention_profile,
}
W = 3


def profile(algorithm, *operands, **options):
    options = {"mesh": mesh_of(W, [1, 2, 0]), "axis_name": AXIS, "repeats": 2, **options}
    q, k, v, _, segment_ids, positions = operands
    documents = {"segment_ids": segment_ids, "positions": positions}
    return PROFILES[algorithm](q, k, v, **documents, **options)


@pytest.mark.parametrize(
    "algorithm, options, rearranged",
    [
        ("ring", {}, False),
        ("zigzag", {}, True),
        (
            "hamilton",
            {"layout": "zigzag", "mask": SlidingWindow(5), "cycles": "direct"},
            False,
        ),
    ],
)
def test_ring_and_hamilton_attention_profile(algorithm, options, rearranged, tmp_path):
    case = Case(algorithm, W, 7, documents="both", **options)
    operands = draw(case)
    stored = [None if x is None else x[:, case.order] for x in operands]
    got = profile(algorithm, *stored, **options)
    assert got.algorithm == case.function.func.__name__
    want = dense(case, operands)[0][:, case.order]
    assert np.abs(got.out - want).max() < 1e-5 * np.abs(want).max()

    names = [f"step {step}" for step in range(W)]
    assert [step.name for step in got.steps] == (
        ["to zigzag", *names, "from zigzag"] if rearranged else names
    )
    for step in got.steps:
        assert (step.computation > 0) == step.name.startswith("step")
        assert (step.communication > 0) == (step.name != names[-1])
    assert got.total > 0
    check_times(got)
    events = json.loads(got.write_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(events, got)


def test_masks_of_arrays():
    """Against attention of one device; keys rotate with the queries that may see them."""
    T = W * 8
    rng = np.random.default_rng()
    q, k, v = (rng.normal(size=(1, T, 2, 4)).astype(np.float32) for _ in range(3))
    ids = np.repeat([[1, 2]], T // 2, axis=1)
    mask = SharedPrefix(np.arange(T)[None] % (T // 2) // 4)
    got = profile("zigzag", q, k, v, None, ids, None, mask=mask)
    want, _ = local_attention(*map(jnp.asarray, (q, k, v)), mask=mask, segment_ids=ids)
    assert np.abs(got.out - want).max() < 1e-6


def check_times(got):
    """Steps take as long as their slowest rank; the text has a row per step and per rank."""
    assert [x.rank for x in got.ranks] == list(range(W))
    for kind in ("communication", "computation"):
        total = getattr(got, kind)
        assert total == pytest.approx(sum(getattr(step, kind) for step in got.steps))
        of_ranks = [getattr(x, kind) for x in got.ranks]
        assert max(of_ranks) <= total * (1 + 1e-9)
        spans = [
            sum(s.duration for s in got.spans if (s.rank, s.kind) == (r, kind)) for r in range(W)
        ]
        assert of_ranks == pytest.approx(spans)
    names = [line.split("  ")[0] for line in str(got).splitlines()]
    steps, ranks = [step.name for step in got.steps], [f"rank {r}" for r in range(W)]
    assert names[2:] == [*steps, "all", "All steps, by rank, ms:", "", *ranks]


def planned(kind, case, operands):
    """Returns the profile by a plan, and its output in the order of the batch."""
    q, k, v, _, segment_ids, positions = operands
    options = {"mesh": mesh_of(W, [1, 2, 0]), "axis_name": AXIS, "repeats": 2}
    documents = {"segment_ids": segment_ids, "positions": positions}
    if kind == "balanced":
        plan = plan_attention(segment_ids, positions, world_size=W)
        got = balanced_attention_profile(q, k, v, plan, **documents, **options)
        return got, got.out
    placement = place_tokens(**documents, world_size=W)
    q, k, v = (placement.apply(x) for x in (q, k, v))
    documents = placement.apply(documents)
    got = placed_attention_profile(q, k, v, placement.plan, **documents, **options)
    return got, placement.restore(got.out)


@pytest.mark.parametrize(
    "kind, steps", [("balanced", ["send", "attend", "return"]), ("placed", ["send", "attend"])]
)
def test_balanced_and_placed_attention_profile(kind, steps):
    """Exchanges and attention alternate; the output is that of dense attention."""
    case = Case("ring", W, 7, documents="both")
    operands = draw(case)
    got, out = planned(kind, case, operands)
    want = dense(case, operands)[0]
    assert np.abs(np.asarray(out) - want).max() < 1e-5 * np.abs(want).max()
    assert got.algorithm == f"{kind}_attention" and got.total > 0
    assert [step.name for step in got.steps] == steps
    for step in got.steps:
        assert (step.computation > 0) == (step.name == "attend")
        assert (step.communication > 0) == (step.name != "attend")
    check_times(got)


@pytest.mark.usefixtures("unchecked_types")
def test_plans_that_do_not_suit_the_call():
    q, k, v, _, segment_ids, positions = draw(Case("ring", W, 4, documents="both"))
    plan = plan_attention(segment_ids, positions, world_size=W)
    call = lambda plan, **options: balanced_attention_profile(
        *(q, k, v, plan), **({"mesh": mesh_of(W), "axis_name": AXIS} | options)
    )
    with pytest.raises(ValueError, match="for world_size=3 but 'cp' has 2 devices"):
        call(plan, mesh=mesh_of(2))
    with pytest.raises(ValueError, match="got stacked plans"):
        call(stack_plans([plan]))
    with pytest.raises(TypeError, match="balanced_attention_profile: got layout; it takes the"):
        call(plan, layout="zigzag")
    with pytest.raises(TypeError, match="plan is of type ndarray; it needs to be an AttentionPlan"):
        call(segment_ids)


def check_trace(events, got):
    """A process for each rank, a thread for each kind; spans that start together form one step."""
    labels = Counter((e["name"], e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M")
    kinds = ("computation", "communication")
    assert labels == Counter(
        [("process_name", rank, f"rank {rank}") for rank in range(W)]
        + [("thread_name", rank, kind) for rank in range(W) for kind in kinds]
    )
    spans = [e for e in events if e["ph"] == "X"]
    assert (
        len(spans)
        == len(got.spans)
        == W * sum((step.computation > 0) + (step.communication > 0) for step in got.steps)
    )
    now = 0.0
    for step in got.steps:
        of_step = [e for e in spans if e["name"] == step.name]
        assert {e["pid"] for e in of_step} == set(range(W))
        for kind, thread in zip(kinds, range(2), strict=True):
            longest = max((e["dur"] for e in of_step if e["tid"] == thread), default=0)
            assert longest == pytest.approx(1e6 * getattr(step, kind))
            assert all(e["cat"] == kind for e in of_step if e["tid"] == thread)
        assert [e["ts"] for e in of_step] == pytest.approx([1e6 * now] * len(of_step))
        now += max(step.computation, step.communication)


def test_trace_of_any_spans(tmp_path):
    spans = [Span(1, "communication", "b", 2e-6, 1e-6), Span(0, "computation", "a", 0.0, 3e-6)]
    path = write_chrome_trace(spans, tmp_path / "trace.json")
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"]) for e in events] == [("a", 0, 0), ("b", 1, 1)]
    assert [e["ts"] for e in events] == pytest.approx([0, 2])
    assert [e["dur"] for e in events] == pytest.approx([3, 1])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "algorithm, options, message",
    [
        ("ring", {"axis_name": "nope"}, "ring_attention_profile: axis_name is 'nope' but the mesh"),
        ("zigzag", {"repeats": 0}, "zigzag_ring_attention_profile: repeats is 0"),
        ("zigzag", {"mesh": mesh_of(5)}, "T is 12 but 'cp' has 5 devices, which need to divide it"),
        ("ring", {"layout": "spiral"}, "ring_attention_profile: layout is 'spiral'"),
        ("ring", {"mask": "no"}, "ring_attention_profile: mask is 'no'; it needs to be"),
        ("hamilton", {"nodes": 2}, "nodes is 2 but there are 3 ranks"),
        ("hamilton", {"positions": np.zeros((1, 5), np.int32)}, r"positions has shape \(1, 5\)"),
    ],
)
def test_invalid_options_are_rejected(algorithm, options, message):
    operands = draw(Case("ring", W, 4))
    q, k, v, *_ = operands
    options = {"mesh": mesh_of(W), "axis_name": AXIS, **options}
    with pytest.raises(ValueError, match=message):
        PROFILES[algorithm](q, k, v, **options)


def test_unknown_keyword_is_rejected():
    q, k, v, *_ = draw(Case("ring", W, 4))
    with pytest.raises(TypeError, match="ring_attention_profile: got colour; it takes the keyw"):
        PROFILES["ring"](q, k, v, mesh=mesh_of(W), axis_name=AXIS, colour=1)
