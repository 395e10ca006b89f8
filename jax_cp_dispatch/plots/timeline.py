"""Draws the predicted steps of algorithms over time."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_cp_dispatch.cost import StepCost
from jax_cp_dispatch.plots.figure import color, figure_class, save

_LANES = "compute", "communication"


def plot_timeline(steps: Mapping[str, Sequence[StepCost]], path: str | pathlib.Path) -> None:
    """Draws when each algorithm computes and communicates, as predicted.

    A step takes as long as the longer of its computation and its communication, which overlap.

    Args:
      steps: for each algorithm its steps, as `cost.step_costs` returns them.
      path: the file to write; its suffix selects the format.
    Raises:
      ImportError: matplotlib is not installed.
      ValueError: `steps` is empty.
    """
    Figure = figure_class("plot_timeline")
    if not steps:
        raise ValueError("plot_timeline: steps is empty. Pass the steps of at least one algorithm.")
    figure = Figure(figsize=(10, 1 + 0.7 * len(steps)), layout="constrained")
    axes: Any = figure.subplots()
    for place, costs in enumerate(steps.values()):
        ends = np.cumsum([max(x.compute, x.communication) for x in costs])
        starts = np.concatenate([[0.0], ends[:-1]])
        for lane, kind in enumerate(_LANES):
            spans = [
                (1e3 * start, 1e3 * seconds)
                for start, cost in zip(starts, costs, strict=True)
                if (seconds := getattr(cost, kind)) > 0
            ]
            axes.broken_barh(
                spans, (place + 0.4 * (lane - 1), 0.36), facecolors=color(lane),
                edgecolor="white", linewidth=0.3, label=None if place else kind,
            )  # fmt: skip
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set(title="predicted steps of one layer", xlabel="ms", xlim=(0, None))
    figure.legend(loc="outside upper right", ncols=2)
    save(figure, path)
