"""Pictures: they need matplotlib and say so; the format follows the suffix; files repeat."""

import sys
from typing import Any

import numpy as np
import pytest
from pictures import texts

from jax_cp_dispatch import Ring, Zigzag, compute_metadata, cost, plan_attention
from jax_cp_dispatch.plots import plot_overlap, plot_plan, plot_timeline
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
    return {x.label: x.step_costs(workload, hardware=hardware) for x in (Ring(), Zigzag())}


PLOTS: dict[str, Any] = {
    "plot_plan": lambda path: plot_plan(plan_attention(lengths=[[4, 4]], world_size=2), path),
    "plot_timeline": lambda path: plot_timeline(
        steps(), path, title="2 ranks (h100)", rearrangement={"zigzag": 1e-6}
    ),
    "plot_overlap": lambda path: plot_overlap({"both": OverlapProfile(None, SPANS)}, path),
}


@pytest.mark.parametrize("name", PLOTS)
def test_pictures_need_matplotlib(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=rf"{name}: needs matplotlib. Run `pip install 'jax_cp_"):
        PLOTS[name](tmp_path / "no.png")


@pytest.mark.parametrize("name", PLOTS)
def test_the_suffix_selects_the_format_and_files_repeat(name, tmp_path):
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    for path in (first, again, tmp_path / "picture.png"):
        PLOTS[name](path)
    assert first.read_bytes() == again.read_bytes()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name, said",
    [
        ("plot_plan", ["after planning: max/mean 1.00", "queries that move"]),
        (
            "plot_timeline",
            ["ring", "zigzag", "2 ranks (h100): predicted, not measured", "rearrangement"],
        ),
        (
            "plot_overlap",
            ["both: 3 ms, of which 1 ms is communication alone", "rank 1", "GEMM 0", "send"],
        ),
    ],
)  # fmt: skip
def test_pictures_say_what_they_show(name, said, tmp_path):
    PLOTS[name](tmp_path / "picture.svg")
    found = texts(tmp_path / "picture.svg")
    assert set(said) <= set(found)
    assert not any("does not fit" in text for text in found)


def test_heat_maps_leave_out_what_stays(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    images, draw = [], Axes.imshow
    spy = lambda axes, image, **options: (images.append(image), draw(axes, image, **options))[1]
    monkeypatch.setattr(Axes, "imshow", spy)
    plan = plan_attention(lengths=[[1] * 8, [8]], world_size=2)
    plot_plan(plan, tmp_path / "plan.svg")
    for image, metadata in zip(images, (plan.q_metadata, plan.kv_metadata), strict=True):
        moved = np.array(metadata.rows_between_ranks())
        assert moved.diagonal().all()
        np.fill_diagonal(moved, 0)
        assert np.array_equal(np.nan_to_num(image), moved)


def test_a_rearrangement_is_no_communication(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    bars, draw = {}, Axes.broken_barh

    def spy(axes, spans, where, **look):
        bars.setdefault(look["facecolors"], []).extend((where[0], *span) for span in spans)
        return draw(axes, spans, where, **look)

    monkeypatch.setattr(Axes, "broken_barh", spy)
    plot_timeline(
        {"a": [cost.StepCost(2.0, 1.0, 0.0)]},
        tmp_path / "a.svg",
        title="",
        rearrangement={"a": 3.0},
    )
    lanes = {"compute": -0.4, "communication": 0.0}
    assert [*bars.values()] == [
        [(lanes["communication"], 0.0, 3e3)],
        [(lanes["compute"], 3e3, 2e3)],
        [(lanes["communication"], 3e3, 1e3)],
    ]


def test_metadata_is_drawn_too(tmp_path):
    metadata = compute_metadata(np.full((2, 1), 4, np.int32), np.array([[1], [0]], np.int32))[0]
    plot_plan(metadata, tmp_path / "moves.svg")
    assert {"moved rows of each rank", "rows that move", "received from others"} <= set(
        texts(tmp_path / "moves.svg")
    )


@pytest.mark.parametrize("profiles", [{}, {"nothing": OverlapProfile(None, ())}])
def test_an_overlap_without_spans_is_rejected(profiles, tmp_path):
    with pytest.raises(ValueError, match="plot_overlap: the profiles contain no span"):
        plot_overlap(profiles, tmp_path / "no.svg")
