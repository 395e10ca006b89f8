"""Draws cycles over ranks: one small diagram for each, and one for all of them."""

import cmath
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch.cycles.integer_rows import CycleRows, check_cycles
from jax_cp_dispatch.plots.figure import LINE, color, figure_class, save

_SIZE = 1.25  # inches of a diagram


class CyclesRow(NamedTuple):
    """One row of the picture: a title, cycles over n ranks, and the number of nodes."""

    title: str
    cycles: CycleRows
    nodes: int = 1


def plot_cycles(rows: Sequence[CyclesRow], path: str | os.PathLike) -> None:
    """Draws, for each row, every cycle separately and then all together; one colour per chunk.

    Args:
      rows: of the picture; cycles as in `check_cycles`.
      path: the file to write; its suffix selects the format.
    Raises:
      ImportError: matplotlib is not installed.
      ValueError, TypeError: see `check_cycles`; the nodes do not divide the ranks.
    """
    checked = []
    for row in rows:
        num_ranks = len(row.cycles[0])
        checked.append(check_cycles(row.cycles, num_ranks, op="plot_cycles"))
        if row.nodes < 1 or num_ranks % row.nodes:
            raise ValueError(
                f"plot_cycles: nodes is {row.nodes} but there are {num_ranks} ranks; it needs to "
                "divide them."
            )
    columns = 1 + max(map(len, checked))
    size = columns * _SIZE, len(rows) * (_SIZE + 0.3)
    figure = figure_class("plot_cycles")(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for axes in panels.ravel():
        axes.set(xlim=(0, 1), ylim=(1, 0), aspect="equal")
        axes.axis("off")
    for line, row, cycles in zip(panels, rows, checked, strict=True):
        line[0].set_title(row.title, loc="left", fontsize=9)
        places = _places(len(cycles[0]), row.nodes)
        for chunk, cycle in enumerate(cycles):
            _draw(line[chunk], {chunk: cycle}, places)
        _draw(line[len(cycles)], dict(enumerate(cycles)), places)
    save(figure, path)


def _places(num_ranks: int, nodes: int) -> list[complex]:
    """Places ranks on a circle, or each node on a half circle, so that rails are horizontal."""
    if nodes == 1:
        turns = (rank / num_ranks - 0.25 for rank in range(num_ranks))
        return [complex(0.5, 0.5) + cmath.rect(0.38, math.tau * x) for x in turns]
    size = num_ranks // nodes
    places = []
    for node in range(nodes):
        middle = 0.4 + 0.2 * node / (nodes - 1)
        for rank in range(size):
            turn = math.pi * (rank / (size - 1) if size > 1 else 0.5)
            bow = 0.3 * math.sin(turn)  # so that arcs avoid the ranks between
            x = middle + (bow if node % 2 else -bow)
            places.append(complex(x, 0.5 - 0.38 * math.cos(turn)))
    return places


def _draw(axes: Any, cycles: Mapping[int, Sequence[int]], places: list[complex]) -> None:
    """Draws arrows, bent so that opposite ones differ, and the ranks."""
    at = [(place.real, place.imag) for place in places]
    for chunk, cycle in cycles.items():
        look = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.2", "color": color(chunk)}
        look |= {"shrinkA": 5, "shrinkB": 5, "mutation_scale": 7}
        for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            axes.annotate("", xy=at[b], xytext=at[a], arrowprops=look)
    for rank, (x, y) in enumerate(at):
        axes.plot(x, y, "o", markersize=10, markerfacecolor="white", markeredgecolor=LINE)
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=7)
