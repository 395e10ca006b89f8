"""Pictures: they need matplotlib and say so; the format follows the suffix; files repeat."""

import sys
from typing import Any

import numpy as np
import pytest
from pictures import texts

from jax_cp_dispatch import compute_metadata, cost, plan_attention
from jax_cp_dispatch.cycles import hamiltonian_cycles
from jax_cp_dispatch.masks import SlidingWindow
from jax_cp_dispatch.plots import (
    CyclesRow,
    plot_cycles,
    plot_masks,
    plot_overlap,
    plot_plan,
    plot_schedules,
    plot_timeline,
)
from jax_cp_dispatch.profiling import OverlapProfile
from jax_cp_dispatch.timeline import COMMUNICATION, COMPUTATION, Span

SPANS = (
    Span(0, COMPUTATION, "GEMM 0 (f, x)", 0.0, 0.002),
    Span(0, COMMUNICATION, "send", 0.002, 0.001),
    Span(1, COMPUTATION, "a name that does not fit into its bar", 0.0, 0.0001),
)


def steps():
    workload = cost.Workload(2, 64, 4, 2, 8, 2)
    hardware = cost.HARDWARE["h100"]
    return {x: cost.step_costs(x, workload, hardware=hardware) for x in ("ring", "zigzag")}


PLOTS: dict[str, Any] = {
    "plot_plan": lambda path: plot_plan(plan_attention(lengths=[[4, 4]], world_size=2), path),
    "plot_masks": lambda path: plot_masks(
        {"near": SlidingWindow(2)}, np.array([[1, 1, 1, 2]]), path
    ),
    "plot_timeline": lambda path: plot_timeline(
        steps(), path, title="2 ranks (h100)", rearrangement={"zigzag": 1e-6}
    ),
    "plot_cycles": lambda path: plot_cycles([CyclesRow("five", hamiltonian_cycles(5))], path),
    "plot_schedules": lambda path: plot_schedules(3, path),
    "plot_overlap": lambda path: plot_overlap({"both": OverlapProfile(None, SPANS)}, path),
}


@pytest.mark.parametrize("name", PLOTS)
def test_pictures_need_matplotlib(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=rf"{name}: needs matplotlib. Run `pip install 'jax_cp_"):
        PLOTS[name](tmp_path / "no.png")


@pytest.mark.parametrize(
    "name, said",
    [
        ("plot_plan", ["after planning: max/mean 1.00", "queries that move"]),
        (
            "plot_timeline",
            ["ring", "zigzag", "2 ranks (h100): predicted, not measured", "rearrangement"],
        ),
        ("plot_cycles", ["five", *"01234"]),
        ("plot_masks", ["near"]),
        # Pairs of 3 ranks of 4 tokens: 10 + 16 + 16 for the last; 78 / 3 in the mean.
        (
            "plot_schedules",
            ["ring, contiguous: query-key pairs of the slowest ranks of all steps: 42; of a mean "
             "rank: 26", "step 2"],
        ),
        (
            "plot_overlap",
            ["both: 3 ms, of which 1 ms is communication alone", "rank 1", "GEMM 0", "send"],
        ),
    ],
)  # fmt: skip
def test_pictures_say_what_they_show_and_repeat(name, said, tmp_path):
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    for path in (first, again):
        PLOTS[name](path)
    assert first.read_bytes() == again.read_bytes()
    found = texts(first)
    assert set(said) <= set(found)
    assert not any("does not fit" in text for text in found)


def test_the_suffix_selects_the_format(tmp_path):
    metadata = compute_metadata(np.full((2, 1), 4, np.int32), np.array([[1], [0]], np.int32))[0]
    for name in ("moves.svg", "moves.png"):
        plot_plan(metadata, tmp_path / name)
    assert (tmp_path / "moves.png").read_bytes().startswith(b"\x89PNG")
    assert {"moved rows of each rank", "rows that move"} <= set(texts(tmp_path / "moves.svg"))


@pytest.mark.parametrize(
    "plot, message",
    [
        (lambda path: plot_cycles([CyclesRow("three", [[0, 1, 2]], nodes=2)], path),
         "plot_cycles: nodes is 2 but there are 3 ranks"),
        (lambda path: plot_schedules(1, path), "plot_schedules: num_ranks is 1"),
        (lambda path: plot_overlap({"nothing": OverlapProfile(None, ())}, path),
         "plot_overlap: the profiles contain no span"),
    ],
)  # fmt: skip
def test_invalid_pictures_are_rejected(tmp_path, plot, message):
    with pytest.raises(ValueError, match=message):
        plot(tmp_path / "no.svg")
