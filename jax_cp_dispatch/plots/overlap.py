"""Draws the computation and communication of overlapped GEMMs on each rank over time."""

import os
from collections.abc import Mapping
from typing import Any

from jax_cp_dispatch.comm_gemm import OverlapProfile
from jax_cp_dispatch.plots.figure import color, figure_class, save
from jax_cp_dispatch.timeline import COMMUNICATION, COMPUTATION

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
