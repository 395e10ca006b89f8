"""Profiles of ring, zigzag and Hamilton attention: the same output, its times, and their trace."""

import json
from collections import Counter

import numpy as np
import pytest
from on_mesh import AXIS, mesh_of
from sequences import Case, dense, draw

from jax_cp_dispatch.attention.rotating.profile import (
    hamilton_attention_profile,
    ring_attention_profile,
    zigzag_ring_attention_profile,
)
from jax_cp_dispatch.timeline import Span, write_chrome_trace

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
            {"layout": "zigzag", "window": 5, "cycles": "direct"},
            False,
        ),
    ],
)
def test_output_times_and_trace(algorithm, options, rearranged, tmp_path):
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
    assert got.communication == pytest.approx(sum(step.communication for step in got.steps))
    assert got.computation == pytest.approx(sum(step.computation for step in got.steps))
    lines = str(got).splitlines()
    shown = [line.split("  ")[0] for line in lines[2:]]
    assert shown == [*(step.name for step in got.steps), "all"]

    events = json.loads(got.write_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(events, got)


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
        ("ring", {"window": 3, "causal": False}, "window is 3 with causal=False"),
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
