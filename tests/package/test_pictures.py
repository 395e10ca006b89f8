"""Pictures say what they show, repeat, and need matplotlib; those of the docs are drawn alike."""

import sys
from typing import Any

import numpy as np
import pytest
from in_ci import in_ci
from pictures import IMAGES, drawing_script, texts

from jax_cp_dispatch import Ring, Zigzag, compute_metadata, cost, plan_attention
from jax_cp_dispatch.comm_gemm import choose_comm_gemm
from jax_cp_dispatch.plots import plot_overlap, plot_plan, plot_timeline
from jax_cp_dispatch.profiling import COMMUNICATION, COMPUTATION, OverlapProfile, Span

SPANS = (
    Span(0, COMPUTATION, "GEMM 0 (f, x)", 0.0, 0.002),
    Span(0, COMMUNICATION, "send", 0.002, 0.001),
    Span(1, COMPUTATION, "a name that does not fit into its bar", 0.0, 0.0001),
)
MOVES = np.full((2, 1), 4, np.int32), np.array([[1], [0]], np.int32)


def plot_steps(path):
    workload, hardware = cost.Workload(2, 64, 4, 2, 8, 2), cost.HARDWARE["h100"]
    steps = {x.label: x.step_costs(workload, hardware=hardware) for x in (Ring(), Zigzag())}
    plot_timeline(steps, path, title="2 ranks (h100)", rearrangement={"zigzag": 1e-6})


PLOTS: dict[str, Any] = {
    "plot_plan": lambda path: plot_plan(plan_attention(lengths=[[4, 4]], world_size=2), path),
    "plot_plan of metadata": lambda path: plot_plan(compute_metadata(*MOVES)[0], path),
    "plot_timeline": plot_steps,
    "plot_overlap": lambda path: plot_overlap({"both": OverlapProfile(None, SPANS)}, path),
}
SAID = {
    "plot_plan": {"after planning: max/mean 1.00", "queries that move"},
    "plot_plan of metadata": {"moved rows of each rank", "rows that move", "received from others"},
    "plot_timeline": {"ring", "zigzag", "2 ranks (h100): predicted, not measured", "rearrangement"},
    "plot_overlap": {
        *("both: 3 ms, of which 1 ms is communication alone", "rank 1", "GEMM 0", "send")
    },
}


@pytest.mark.parametrize("name", PLOTS)
def test_pictures_say_what_they_show(name, tmp_path, monkeypatch):
    PLOTS[name](tmp_path / "picture.svg")
    found = texts(tmp_path / "picture.svg")
    assert SAID[name] <= set(found)
    assert not any("does not fit" in text for text in found)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    needs = rf"{name.split()[0]}: needs matplotlib. Run `pip install 'jax_cp_"
    with pytest.raises(ImportError, match=needs):
        PLOTS[name](tmp_path / "no.png")


def test_pictures_repeat_in_the_format_of_their_suffix(tmp_path):
    paths = [tmp_path / name for name in ("first.svg", "again.svg", "picture.png")]
    for path in paths:
        PLOTS["plot_overlap"](path)
    first, again, png = (path.read_bytes() for path in paths)
    assert first == again and png.startswith(b"\x89PNG")


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
    steps = {"a": [cost.StepCost(2.0, 1.0, 0.0)]}
    plot_timeline(steps, tmp_path / "a.svg", title="", rearrangement={"a": 3.0})
    compute, communication = -0.4, 0.0  # where each lane is
    rearranged = [(communication, 0.0, 3e3)]
    assert [*bars.values()] == [rearranged, [(compute, 3e3, 2e3)], [(communication, 3e3, 1e3)]]


@pytest.mark.parametrize("profiles", [{}, {"nothing": OverlapProfile(None, ())}])
def test_an_overlap_without_spans_is_rejected(profiles, tmp_path):
    with pytest.raises(ValueError, match="plot_overlap: the profiles contain no span"):
        plot_overlap(profiles, tmp_path / "no.svg")


# ---- Pictures of the documentation.


@in_ci
@pytest.mark.parametrize(
    "name", sorted(path.stem.removeprefix("draw_") for path in IMAGES.glob("draw_*.py"))
)
def test_picture_matches_the_script(name, tmp_path):
    drawing_script(name).draw(tmp_path)
    assert texts(tmp_path / f"{name}.svg") == texts(IMAGES / f"{name}.svg")


def test_overlap_follows_the_cost_model():
    """Its totals equal the predictions, except for the time to start chunks."""
    script, times = drawing_script("overlap"), []
    for title, run in script.overlaps().items():
        assert ", predicted on " in title
        assert {span.rank for span in run.spans} == set(range(script.P))
        times.append(run.total)
    predicted = [
        (script.IN, "none", 1),
        (script.IN, "ring", script.P),
        (script.OUT, "none", 1),
        (script.OUT, "ring", script.P),
        (script.OUT, "pipeline 4", 4),
    ]
    for total, (shape, label, chunks) in zip(times, predicted, strict=True):
        choice = choose_comm_gemm(shape, hardware=script.H100)
        latency = chunks * script.H100.link_latency if chunks > 1 else 0.0
        assert total + latency == pytest.approx(choice.seconds[label], rel=1e-6), label


def test_swizzle_follows_the_formula_beside_it():
    row, block = np.divmod(np.arange(512), 4)
    offset = row % 32 * 16 + row // 32 * 4 + block
    np.testing.assert_array_equal(drawing_script("swizzle").order()[offset], np.arange(512))
