"""Draws plans, predicted times and overlap; needs the extra `plots`."""

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_cp_dispatch._text import rows_between_ranks
from jax_cp_dispatch.cost import StepCost
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning import Placement, Plan
from jax_cp_dispatch.profiling import COMMUNICATION, COMPUTATION, OverlapProfile

__all__ = ["plot_overlap", "plot_plan", "plot_timeline"]

LINE = "#cbd2d9"


def figure_class(op: str) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{op}: needs matplotlib. Run `pip install 'jax_cp_dispatch[plots]'`."
        ) from error
    return Figure


def save(figure: Any, path: str | os.PathLike) -> None:
    """Writes a figure; its suffix selects the format. Texts of SVG files stay texts."""
    import matplotlib

    metadata = {"Date": None} if os.fspath(path).lower().endswith(".svg") else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jax_cp_dispatch"}):
        figure.savefig(path, dpi=120, metadata=metadata)


# ---- Times: rows of two lanes, from above.

_LANES = COMPUTATION, COMMUNICATION
_LETTER = 0.008  # width of a letter in a bar, of the whole picture


def plot_overlap(profiles: Mapping[str, OverlapProfile], path: str | os.PathLike) -> None:
    """Draws the spans of several runs below each other, on one time scale.

    Each rank has two rows: computation above, communication below. The title shows the time of the
    run, and how long the slowest rank communicates without computing.

    Args:
      profiles: results of `overlap_profile`, by title.
      path: the file to write; its suffix selects the format.
    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there is nothing to draw.
    """
    total = max((profile.total for profile in profiles.values()), default=0.0)
    if total <= 0:
        raise ValueError(
            "plot_overlap: the profiles contain no span that takes time. Pass at least one profile "
            "of overlap_profile, by its title."
        )
    Figure = figure_class("plot_overlap")
    ranks = [sorted({span.rank for span in profile.spans}) for profile in profiles.values()]
    heights = [len(of_run) for of_run in ranks]
    figure = Figure(figsize=(9, 0.8 + sum(0.5 + 0.28 * n for n in heights)), layout="constrained")
    panels = figure.subplots(len(profiles), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, of_run, (title, run) in zip(panels[:, 0], ranks, profiles.items(), strict=True):
        alone = f"{1e3 * run.exposed_communication:.3g} ms is communication alone"
        title = f"{title}: {1e3 * run.total:.3g} ms, of which {alone}"
        axes.set_title(title, loc="left", fontsize=9)
        for lane, kind in enumerate(_LANES):
            for place, rank in enumerate(of_run):
                spans = [x for x in run.spans if x.rank == rank and x.kind == kind]
                _draw_bars(axes, place, lane, f"C{lane}", ((x.start, x.duration) for x in spans))
                for span in spans:
                    name = span.name.partition(" (")[0]  # without the function and its axis
                    if _LETTER * len(name) * total < span.duration:
                        look = {"ha": "center", "va": "center", "color": "white", "fontsize": 6}
                        middle = 1e3 * (span.start + span.duration / 2)
                        axes.text(middle, _bottom(place, lane) + _HEIGHT / 2, name, **look)
        axes.set_yticks(range(len(of_run)), [f"rank {rank}" for rank in of_run], fontsize=8)
        axes.invert_yaxis()
    panels[-1, 0].set(xlabel="ms", xlim=(0, 1e3 * total))
    _draw_legend(figure, panels[-1, 0], _LANES, loc="outside upper right")
    save(figure, path)


def plot_timeline(
    steps: Mapping[str, Sequence[StepCost]],
    path: str | pathlib.Path,
    *,
    title: str,
    rearrangement: Mapping[str, float] | None = None,
) -> None:
    """Draws when each algorithm computes and communicates, as predicted.

    A step takes as long as the longer of its computation and its communication, which overlap.

    Args:
      steps: for each algorithm its steps, as `Algorithm.step_costs` returns them.
      path: the file to write; its suffix selects the format.
      title: what the steps are of: passes, ranks and hardware.
      rearrangement: for some algorithms, the seconds to rearrange tokens; drawn before the steps,
        with a colour of its own.
    Raises:
      ImportError: matplotlib is not installed.
      ValueError: `steps` is empty.
    """
    Figure = figure_class("plot_timeline")
    if not steps:
        raise ValueError("plot_timeline: steps is empty. Pass the steps of at least one algorithm.")
    figure = Figure(figsize=(10, 1 + 0.7 * len(steps)), layout="constrained")
    axes: Any = figure.subplots()
    before = rearrangement or {}
    for place, (name, costs) in enumerate(steps.items()):
        begin = before.get(name, 0.0)
        _draw_bars(axes, place, 1, "C2", [(0.0, begin)])
        starts = begin + np.cumsum([0.0, *(max(x.compute, x.communication) for x in costs)])
        for lane, kind in enumerate(("compute", "communication")):
            times = (getattr(x, kind) for x in costs)
            _draw_bars(axes, place, lane, f"C{lane}", zip(starts, times, strict=False))
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set(title=f"{title}: predicted, not measured", xlabel="ms", xlim=(0, None))
    names = "compute", "communication", *["rearrangement"] * any(before.values())
    _draw_legend(figure, axes, names, loc="outside lower center")
    save(figure, path)


_HEIGHT = 0.4  # of a lane


def _bottom(place: int, lane: int) -> float:
    return place + _HEIGHT * (lane - 1)


def _draw_bars(
    axes: Any, place: int, lane: int, face: str, spans: Iterable[tuple[float, float]]
) -> None:
    """Draws start and duration, in seconds, in a lane of a place."""
    shown = [(1e3 * start, 1e3 * seconds) for start, seconds in spans if seconds > 0]
    look = {"facecolors": face, "edgecolor": "white", "linewidth": 0.4}
    axes.broken_barh(shown, (_bottom(place, lane), 0.95 * _HEIGHT), **look)


def _draw_legend(figure: Any, axes: Any, names: Sequence[str], *, loc: str) -> None:
    boxes = [axes.bar(0, 0, color=f"C{i}", label=name) for i, name in enumerate(names)]
    figure.legend(handles=boxes, loc=loc, ncols=len(names))


# ---- Plans.

_BEFORE, _AFTER = "#9aa5b1", "#1f77b4"


def plot_plan(plan: Plan | Placement | Metadata, path: str | pathlib.Path) -> None:
    """Draws the work of each rank, and the tokens that it sends to others.

    Also the work before planning. For `Metadata`, the rows that each rank sends to and receives
    from others, instead of the work.

    Args:
      plan: concrete, for all ranks.
      path: the file to write; its suffix selects the format.
    Raises:
      ImportError: matplotlib is not installed.
    """
    Figure = figure_class("plot_plan")
    placed = plan.plan if isinstance(plan, Placement) else plan
    if isinstance(placed, Metadata):
        metadata = {"rows": placed}
    else:
        metadata = {"keys and values": placed.kv_metadata}
        if not placed.is_placed:
            metadata = {"queries": placed.q_metadata, **metadata}
    sent = {what: rows_between_ranks("plot_plan", x) for what, x in metadata.items()}
    widths = [1.5, *[1] * len(sent)]
    figure = Figure(figsize=(4.3 * sum(widths), 4.4), layout="constrained")
    first, *others = figure.subplots(1, len(widths), width_ratios=widths)
    if isinstance(placed, Metadata):
        rows, own = sent["rows"], np.diag(sent["rows"])
        bars = {"sent to others": rows.sum(1) - own, "received from others": rows.sum(0) - own}
        first.set(title="moved rows of each rank", ylabel="rows")
    else:
        names = "before planning", "after planning"
        if placed.is_placed:
            names = "before placing", "placed"
        before, after = (np.asarray(x, float) for x in (placed.pairs_before, placed.pairs))
        most = [x.max() / (x.mean() or 1) for x in (before, after)]
        labels = [f"{name}: max/mean {x:.2f}" for name, x in zip(names, most, strict=True)]
        mean = max(after.mean(), 1)
        bars = dict(zip(labels, (before / mean, after / mean), strict=True))
        first.axhline(1, color="black", linewidth=0.8, linestyle="--")
        first.set(title="attention work", ylabel="query-key pairs / mean")
    for side, face, (label, values) in zip(
        (-0.2, 0.2), (_BEFORE, _AFTER), bars.items(), strict=True
    ):
        first.bar(np.arange(len(values)) + side, values, 0.4, color=face, label=label)
    first.set_xlabel("rank")
    first.locator_params(axis="x", integer=True)
    for axes, (what, rows) in zip(others, sent.items(), strict=True):
        moved = np.array(rows, float)
        np.fill_diagonal(moved, 0)
        shown = {"cmap": "viridis", "vmin": 0, "vmax": max(moved.max(), 1)}
        image = axes.imshow(np.where(moved > 0, moved, np.nan), **shown)
        figure.colorbar(image, ax=axes, label="tokens")
        axes.set(title=f"{what} that move", xlabel="to rank", ylabel="from rank")
        axes.locator_params(integer=True)
    figure.legend(loc="outside lower left", ncols=2)
    save(figure, path)
