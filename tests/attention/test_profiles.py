"""Profiles of attention: its steps by rank with their trace, and the balance of all ranks."""

import json
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from array_masks import random_mask
from calls import check_qkv, draw_qkv
from mask_oracle import batch_pairs, batch_visible
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Documents, place_tokens
from jax_cp_dispatch.masks import SlidingWindow
from jax_cp_dispatch.profiling import (
    BalanceProfile,
    Span,
    balance_profile,
    hamilton_attention_profile,
    write_chrome_trace,
)

W = 3


def profile(*operands, **options):
    options = {"mesh": mesh_of(W, [1, 2, 0]), "axis_name": AXIS, "repeats": 2, **options}
    return hamilton_attention_profile(*operands, **options)


@pytest.mark.parametrize("zigzag", [False, True])
def test_hamilton_attention_profile(zigzag, tmp_path):
    """Tokens in packed order are rearranged first and last; the mask rotates with the keys."""
    *arrays, ids = operands = draw_qkv(0, 1, 8 * W)
    documents, mask, pairs, options = Documents(ids), None, None, {}
    if zigzag:
        documents, options = documents.zigzag(W), {"cycles": ((0, 1, 2), (2, 1, 0))}
        constructor, of_mask, sees = random_mask("shared_prefix", np.random.default_rng(), ids)
        mask, pairs = documents.apply(constructor(*of_mask)), batch_visible(ids, sees)
    got = profile(*documents.apply(arrays[:3]), documents=documents, mask=mask, **options)
    check_qkv([documents.restore(np.asarray(got.out))], operands, pairs=pairs)

    names = [f"step {step}" for step in range(W)]
    assert [step.name for step in got.steps] == (
        names if zigzag else ["to zigzag", *names, "from zigzag"]
    )
    for step in got.steps:
        assert (step.computation > 0) == step.name.startswith("step")
        assert (step.communication > 0) == (step.name != names[-1])
    assert got.total > 0
    check_times(got)
    events = json.loads(got.write_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(events, got)


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


# ---- Balance: the program of each rank, alone on a device.

T = 8  # columns of each rank
LENGTHS = [[13, 2, 7], [21, 3]]
IDS = np.array([[1] * 13 + [2] * 2 + [3] * 7 + [0] * 2, [1] * 21 + [2] * 3])
SIZES: Any = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "columns": W * T, "repeats": 3}


@pytest.mark.parametrize("kind", ["numbers", "tree"])
def test_balance_profiles_count_the_pairs_of_each_rank(kind, monkeypatch):
    """By a fake clock: each rank of each program once in each round; the median counts.

    No program is compiled between its start and its end.
    """
    in_round, times, compiled = (2 if kind == "numbers" else 4) * W, [0.0], []

    def listen(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(len(times))

    jax.monitoring.register_event_duration_secs_listener(listen)

    def clock():
        """Of run i of a round, i + 1 times 5, 1 and 3 seconds."""
        number, is_end = divmod(len(times) - 1, 2)
        seconds = (5, 1, 3)[number // in_round] * (1 + number % in_round) if is_end else 0
        times.append(times[-1] + seconds)
        return times[-1]

    monkeypatch.setattr(time, "process_time", clock)
    if kind == "numbers":
        mask = SlidingWindow(9)
        seen = batch_pairs(mask, IDS)
    else:
        constructor, arrays, sees = random_mask(kind, np.random.default_rng(), IDS)
        mask, seen = constructor(*arrays), batch_visible(IDS, sees)
    plan = place_tokens(LENGTHS, world_size=W, columns=W * T, mask=mask).plan
    algorithms = ["ring", plan]
    options = {"mask": mask, "backward": kind == "numbers", **SIZES}
    if kind == "tree":
        algorithms += ["hamilton", "balanced"]
    got = balance_profile(iter(LENGTHS), world_size=W, algorithms=algorithms, **options)
    assert [x.name for x in got] == ["ring", "placed", "hamilton", "balanced"][: len(got)]
    pairs = seen.sum(2)
    assert list(got[0].work) == pairs.reshape(2, W, T).sum((0, 2)).tolist()
    if kind == "tree":
        blocks = pairs.reshape(2, 2 * W, T // 2).sum((0, 2))  # of rank r: r and 2 * W - 1 - r
        assert list(got[2].work) == [blocks[r] + blocks[-1 - r] for r in range(W)]
    assert all(sum(x.work) == pairs.sum() for x in got)
    assert set(compiled) <= {1}
    seconds = np.array([x.seconds for x in got])
    np.testing.assert_array_equal(seconds, 3 * np.arange(1, 1 + in_round).reshape(-1, W))


def test_a_balance_profile_of_blocks_that_do_not_divide():
    options: Any = {**SIZES, "columns": 28, "repeats": 1, "backward": False}
    (got,) = balance_profile([[13, 2, 7]], world_size=4, algorithms=["hamilton"], **options)
    assert sum(got.work) == sum(n * (n + 1) // 2 for n in (13, 2, 7))


def test_text_of_a_balance_profile():
    profile = BalanceProfile("ring", seconds=(0.001, 0.003), work=(10, 40), unit="pairs")
    assert (profile.busiest, profile.imbalance, profile.work_imbalance) == (0.003, 1.5, 1.6)
    assert str(profile).splitlines() == [
        "ring: busiest rank 3.00 ms, 1.500 of the mean; in pairs 1.600",
        "  rank    ms  pairs",
        "  0     1.00     10",
        "  1     3.00     40",
    ]
    assert BalanceProfile("ring", seconds=(1.0, 1.0), work=(0, 0), unit="pairs").work_imbalance == 1
