"""A picture of each section: speeds relative to the limit and to the alternative."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jax_cp_dispatch.bench_command.ranks import Row
from jax_cp_dispatch.plots.figure import figure_class, label_log_axis

_RATIOS = {"of_limit": "fraction of the limit", "speedup": "times as fast as the alternative"}


def check_folder(folder: pathlib.Path) -> None:
    """Creates the folder.

    Raises:
      ImportError: matplotlib is not installed.
      OSError: the folder cannot be created.
    """
    figure_class("--pictures")
    folder.mkdir(parents=True, exist_ok=True)


def draw(rows: Sequence[Row], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws `SECTION.png` for each section that has ratios; returns the files."""
    Figure = figure_class("--pictures")
    paths = []
    for section in dict.fromkeys(row.section for row in rows):
        chosen = [r for r in rows if r.section == section and (r.of_limit or r.speedup)]
        if not chosen:
            continue
        figure = Figure(figsize=(10, 1 + 0.3 * len(chosen)), layout="constrained")
        shown = [name for name in _RATIOS if any(getattr(row, name) for row in chosen)]
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, shown, strict=True):
            _draw_ratio(axes, name, [getattr(row, name) for row in chosen])
        panels[0].set_yticks(range(len(chosen)), [row.what for row in chosen])
        panels[0].invert_yaxis()
        figure.suptitle(section)
        paths.append(folder / f"{section}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _draw_ratio(axes: Any, name: str, values: Sequence[float | None]) -> None:
    """Draws bars with their values; those of speedups begin at 1, on a logarithmic axis."""
    start = 1 if name == "speedup" else 0
    widths = [math.nan if value is None else value - start for value in values]
    bars = axes.barh(range(len(values)), widths, left=start, color="#1f77b4")
    texts = ["" if value is None else f"{value:.3g}" for value in values]
    axes.bar_label(bars, texts, padding=3)
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    if name == "speedup":
        axes.set_xscale("log")
        label_log_axis(axes.xaxis)
    axes.margins(x=0.2)  # for the values
    axes.set_xlabel(_RATIOS[name])
