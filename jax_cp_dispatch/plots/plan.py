"""Draws a plan: work of each rank, and the rows that it sends to others."""

import pathlib
from typing import Any

import numpy as np

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.metadata.describe import rows_between_ranks
from jax_cp_dispatch.planner import Placement, Plan
from jax_cp_dispatch.plots.figure import figure_class, save

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
