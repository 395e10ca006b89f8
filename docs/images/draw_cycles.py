"""Redraws cycles.svg of ../choose_an_algorithm.md: cycles over ranks, each and all together."""

import cmath
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch.cycles import hamiltonian_cycles, two_level_cycles
from jax_cp_dispatch.plots import LINE, figure_class, save

_SIZE = 1.25  # inches of a diagram


class Row(NamedTuple):
    """One row of the picture: a title, cycles over n ranks, and the number of nodes."""

    title: str
    cycles: Sequence[Sequence[int]]
    nodes: int = 1


def draw(folder: pathlib.Path) -> None:
    rails = two_level_cycles(4, 2, rail_aligned=True)
    rows = [
        Row("K₅: 5 ranks, 4 chunks, and all together", hamiltonian_cycles(5)),
        Row("K₈: 8 ranks, 7 chunks", hamiltonian_cycles(8)),
        Row("4-K₄-4: 2 nodes of 4 ranks, 4 chunks", two_level_cycles(4, 2), nodes=2),
        Row("the same, aligned to rails", rails, nodes=2),
    ]
    columns = 1 + max(len(row.cycles) for row in rows)
    size = columns * _SIZE, len(rows) * (_SIZE + 0.3)
    figure = figure_class("draw_cycles")(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for axes in panels.ravel():
        axes.set(xlim=(0, 1), ylim=(1, 0), aspect="equal")
        axes.axis("off")
    for line, (title, cycles, nodes) in zip(panels, rows, strict=True):
        line[0].set_title(title, loc="left", fontsize=9)
        places = _places(len(cycles[0]), nodes)
        for chunk, cycle in enumerate(cycles):
            _draw(line[chunk], {chunk: cycle}, places)
        _draw(line[len(cycles)], dict(enumerate(cycles)), places)
    save(figure, folder / "cycles.svg")


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
        look = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.2", "color": f"C{chunk}"}
        look |= {"shrinkA": 5, "shrinkB": 5, "mutation_scale": 7}
        for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            axes.annotate("", xy=at[b], xytext=at[a], arrowprops=look)
    for rank, (x, y) in enumerate(at):
        axes.plot(x, y, "o", markersize=10, markerfacecolor="white", markeredgecolor=LINE)
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=7)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
