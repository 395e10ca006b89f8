"""Draws plans, predicted times and overlap; needs the extra `plots`."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_cp_dispatch._text import rows_between_ranks
from jax_cp_dispatch.cost import StepCost
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning import Placement, Plan
from jax_cp_dispatch.profiling import COMMUNICATION, COMPUTATION, OverlapProfile

__all__ = ["plot_overlap", "plot_plan", "plot_timeline"]

COLORS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
LINE = "#cbd2d9"


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def figure_class(op: str) -> Any:
    """Returns matplotlib's `Figure`."""
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


_LANES = COMPUTATION, COMMUNICATION  # of a rank, from above
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
    ranks = [len({span.rank for span in profile.spans}) for profile in profiles.values()]
    height = 0.8 + sum(0.5 + 0.28 * n for n in ranks)
    figure = Figure(figsize=(9, height), layout="constrained")
    panels = figure.subplots(len(profiles), 1, sharex=True, squeeze=False, height_ratios=ranks)
    for axes, (title, profile) in zip(panels[:, 0], profiles.items(), strict=True):
        exposed = profile.exposed_communication
        times = f"{_ms(profile.total)} ms, of which {_ms(exposed)} ms is communication alone"
        axes.set_title(f"{title}: {times}", loc="left", fontsize=9)
        _draw_run(axes, profile, total)
    panels[-1, 0].set(xlabel="ms", xlim=(0, 1e3 * total))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    save(figure, path)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _draw_run(axes: Any, profile: OverlapProfile, total: float) -> None:
    """Draws the bars of all ranks, with names where they fit."""
    ranks = sorted({span.rank for span in profile.spans})
    for lane, kind in enumerate(_LANES):
        label = kind
        for place, rank in enumerate(ranks):
            spans = [x for x in profile.spans if x.rank == rank and x.kind == kind]
            bottom = place + 0.45 * (lane - 1)
            bars = [(1e3 * x.start, 1e3 * x.duration) for x in spans]
            look = {"facecolors": color(lane), "edgecolor": "white", "linewidth": 0.5}
            axes.broken_barh(bars, (bottom, 0.43), **look, label=label)
            label = None  # one entry of the legend
            for span in spans:
                name = span.name.partition(" (")[0]  # without the function and its axis
                if _LETTER * len(name) * total < span.duration:
                    middle = 1e3 * (span.start + span.duration / 2)
                    look = {"ha": "center", "va": "center", "color": "white", "fontsize": 6}
                    axes.text(middle, bottom + 0.2, name, **look)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=8)
    axes.invert_yaxis()


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
        traffic = {"rows": placed}
    else:
        traffic = {"keys and values": placed.kv_metadata}
        if not placed.is_placed:
            traffic = {"queries": placed.q_metadata, **traffic}
    widths = [1.5, *[1] * len(traffic)]
    figure = Figure(figsize=(4.3 * sum(widths), 4.4), layout="constrained")
    first, *others = figure.subplots(1, len(widths), width_ratios=widths)
    sent = {what: rows_between_ranks("plot_plan", x) for what, x in traffic.items()}
    if isinstance(placed, Metadata):
        _draw_ends(first, sent["rows"])
    else:
        names = ("before planning", "after planning")
        if placed.is_placed:
            names = ("before placing", "placed")
        _draw_work(first, dict(zip(names, (placed.pairs_before, placed.pairs), strict=True)))
    for axes, (what, rows) in zip(others, sent.items(), strict=True):
        _draw_traffic(figure, axes, what, rows)
    figure.legend(loc="outside lower left", ncols=2)
    save(figure, path)


def _draw_work(axes: Any, pairs: dict[str, Any]) -> None:
    values = [np.asarray(x, float) for x in pairs.values()]
    mean = max(values[-1].mean(), 1)
    labels = [
        f"{name}: max/mean {x.max() / (x.mean() or 1):.2f}"
        for name, x in zip(pairs, values, strict=True)
    ]
    _draw_bars(axes, dict(zip(labels, (x / mean for x in values), strict=True)))
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(title="attention work", xlabel="rank", ylabel="query-key pairs / mean")


def _draw_ends(axes: Any, sent: Any) -> None:
    own = np.diag(sent)
    ends = {"sent to others": sent.sum(1) - own, "received from others": sent.sum(0) - own}
    _draw_bars(axes, ends)
    axes.set(title="moved rows of each rank", xlabel="rank", ylabel="rows")


def _draw_bars(axes: Any, series: dict[str, np.ndarray]) -> None:
    """Draws one or two bars per rank."""
    width = 0.8 / len(series)
    colors = [_BEFORE, _AFTER][-len(series) :]
    for number, (label, values) in enumerate(series.items()):
        place = np.arange(len(values)) + (number - (len(series) - 1) / 2) * width
        axes.bar(place, values, width, color=colors[number], label=label)
    axes.locator_params(axis="x", integer=True)


def _draw_traffic(figure: Any, axes: Any, what: str, sent: Any) -> None:
    moved = np.array(sent, float)
    np.fill_diagonal(moved, 0)
    shown = {"cmap": "viridis", "vmin": 0, "vmax": max(moved.max(), 1)}
    image = axes.imshow(np.where(moved > 0, moved, np.nan), **shown)
    figure.colorbar(image, ax=axes, label="tokens")
    axes.set(title=f"{what} that move", xlabel="to rank", ylabel="from rank")
    axes.locator_params(integer=True)


_PREDICTED_LANES = "compute", "communication"


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
        _draw_spans(axes, place, 1, color(2), [(0.0, begin)])
        starts = begin + np.cumsum([0.0, *(max(x.compute, x.communication) for x in costs)])
        for lane, kind in enumerate(_PREDICTED_LANES):
            spans = [(at, getattr(x, kind)) for at, x in zip(starts, costs, strict=False)]
            _draw_spans(axes, place, lane, color(lane), spans)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set(title=f"{title}: predicted, not measured", xlabel="ms", xlim=(0, None))
    names = [*_PREDICTED_LANES, *(["rearrangement"] if any(before.values()) else [])]
    boxes = [axes.bar(0, 0, color=color(i), label=name) for i, name in enumerate(names)]
    figure.legend(handles=boxes, loc="outside lower center", ncols=len(names))
    save(figure, path)


def _draw_spans(
    axes: Any, place: int, lane: int, face: str, spans: Sequence[tuple[float, float]]
) -> None:
    """Draws start and duration, in seconds, in a lane of an algorithm."""
    shown = [(1e3 * start, 1e3 * seconds) for start, seconds in spans if seconds > 0]
    where = place + 0.4 * (lane - 1), 0.36
    axes.broken_barh(shown, where, facecolors=face, edgecolor="white", linewidth=0.3)
