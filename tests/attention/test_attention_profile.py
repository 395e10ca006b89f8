"""Profiles of attention: the same output, its times by step and by rank, and their trace."""

import json
from collections import Counter

import numpy as np
import pytest
from attention_oracle import masked_attention
from mask_oracle import batch_visible, shared_prefix_pairs
from on_mesh import AXIS, mesh_of
from sequences import Case, dense, draw

from jax_cp_dispatch import Documents
from jax_cp_dispatch.masks import SharedPrefix, SlidingWindow
from jax_cp_dispatch.profiling import Span, hamilton_attention_profile
from jax_cp_dispatch.timeline import write_chrome_trace

W = 3


def profile(*operands, **options):
    options = {"mesh": mesh_of(W, [1, 2, 0]), "axis_name": AXIS, "repeats": 2, **options}
    return hamilton_attention_profile(*operands, **options)


@pytest.mark.parametrize(
    "zigzag, options, rearranged",
    [
        (False, {}, True),
        (True, {"mask": SlidingWindow(5), "cycles": "direct"}, False),
    ],
)
def test_hamilton_attention_profile(zigzag, options, rearranged, tmp_path):
    case = Case("hamilton", W, 7, documents="both", zigzag=zigzag, **options)
    operands = draw(case)
    *arrays, _, segment_ids, positions = operands
    stored = (x[:, case.order] for x in arrays)
    got = profile(*stored, **case.given(segment_ids, positions), **options)
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
    """Keys rotate with the queries that may see them. In zigzag order nothing is rearranged."""
    T = W * 8
    rng = np.random.default_rng()
    q, k, v = (rng.normal(size=(1, T, 2, 4)).astype(np.float32) for _ in range(3))
    ids = np.repeat([[1, 2]], T // 2, axis=1)
    completions = np.arange(T)[None] % (T // 2) // 4
    mask = SharedPrefix(completions)
    documents = Documents(ids).zigzag(W)
    *stored, of_order = documents.apply((q, k, v, mask))
    got = profile(*stored, documents=documents, mask=of_order)
    want, _ = masked_attention(q, k, v, batch_visible(ids, shared_prefix_pairs(completions)))
    assert np.abs(documents.restore(np.asarray(got.out)) - want).max() < 1e-6


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
