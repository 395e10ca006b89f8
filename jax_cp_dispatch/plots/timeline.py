"""Draws the predicted steps of algorithms over time."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_cp_dispatch.cost import StepCost
from jax_cp_dispatch.plots.figure import color, figure_class, save

_LANES = "compute", "communication"


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
      steps: for each algorithm its steps, as `cost.step_costs` returns them.
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
        for lane, kind in enumerate(_LANES):
            spans = [(at, getattr(x, kind)) for at, x in zip(starts, costs, strict=False)]
            _draw_spans(axes, place, lane, color(lane), spans)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set(title=f"{title}: predicted, not measured", xlabel="ms", xlim=(0, None))
    names = [*_LANES, *(["rearrangement"] if any(before.values()) else [])]
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
