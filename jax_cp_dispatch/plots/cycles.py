"""Draws cycles over ranks: one small diagram for each, and one for all of them."""

import cmath
import math
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from jax_cp_dispatch.cycles.checks import CycleRows, check_cycles
from jax_cp_dispatch.plots.svg import LINE, color, document, text

# Pixels; a diagram fills a square of `_SIZE`.
_SIZE, _TITLE, _MARGIN = 118, 26, 8
_DISC = 7.5


class CyclesRow(NamedTuple):
    """One row of the picture: a title, cycles over n ranks, and the number of nodes."""

    title: str
    cycles: CycleRows
    nodes: int = 1


def plot_cycles(rows: Sequence[CyclesRow], path: str | os.PathLike) -> None:
    """Draws, for each row, every cycle separately and then all together; one colour per chunk.

    Args:
      rows: of the picture; cycles as in `check_cycles`.
      path: of the SVG file to write.
    Raises:
      ValueError, TypeError: see `check_cycles`; the nodes do not divide the ranks.
    """
    body, columns = [], 0
    for number, row in enumerate(rows):
        num_ranks = len(row.cycles[0])
        cycles = check_cycles(row.cycles, num_ranks, op="plot_cycles")
        if row.nodes < 1 or num_ranks % row.nodes:
            raise ValueError(
                f"plot_cycles: nodes is {row.nodes} but there are {num_ranks} ranks; it needs to "
                "divide them."
            )
        top = _MARGIN + number * (_TITLE + _SIZE)
        body.append(text(_MARGIN, top + 16, row.title))
        places = _places(num_ranks, row.nodes)
        diagrams = [{chunk: cycle} for chunk, cycle in enumerate(cycles)]
        diagrams.append(dict(enumerate(cycles)))
        for column, diagram in enumerate(diagrams):
            body += _diagram(diagram, places, _MARGIN + column * _SIZE, top + _TITLE)
        columns = max(columns, len(diagrams))
    height = 2 * _MARGIN + len(rows) * (_TITLE + _SIZE)
    picture = document(2 * _MARGIN + columns * _SIZE, height, "Hamiltonian cycles over ranks", body)
    pathlib.Path(path).write_text(picture)


def _places(num_ranks: int, nodes: int) -> list[complex]:
    """Places ranks on a circle, or each node on a half circle, so that rails are horizontal."""
    if nodes == 1:
        turns = (rank / num_ranks - 0.25 for rank in range(num_ranks))
        return [complex(1, 1) * _SIZE / 2 + cmath.rect(0.38 * _SIZE, math.tau * x) for x in turns]
    size = num_ranks // nodes
    places = []
    for node in range(nodes):
        middle = 0.4 + 0.2 * node / (nodes - 1)
        for rank in range(size):
            turn = math.pi * (rank / (size - 1) if size > 1 else 0.5)
            bow = 0.3 * math.sin(turn)  # so that arcs avoid the ranks between
            x = middle + (bow if node % 2 else -bow)
            places.append(complex(x, 0.5 - 0.38 * math.cos(turn)) * _SIZE)
    return places


def _diagram(
    cycles: dict[int, tuple[int, ...]], places, left: int | float, top: int | float
) -> list[str]:
    parts = [f'<g transform="translate({left:g} {top:g})">']
    for chunk, cycle in cycles.items():
        following = (*cycle[1:], cycle[0])
        arcs = (_arc(places[a], places[b]) for a, b in zip(cycle, following, strict=True))
        lines, heads = ("".join(shapes) for shapes in zip(*arcs, strict=True))
        parts.append(f'<path d="{lines}" fill="none" stroke="{color(chunk)}"/>')
        parts.append(f'<path d="{heads}" fill="{color(chunk)}"/>')
    for rank, place in enumerate(places):
        x, y = round(place.real, 1), round(place.imag, 1)
        parts.append(f'<circle cx="{x}" cy="{y}" r="{_DISC}" fill="white" stroke="{LINE}"/>')
        parts.append(text(x, y + 3.2, str(rank), font_size="9", text_anchor="middle"))
    return [*parts, "</g>"]


def _arc(tail: complex, head: complex) -> tuple[str, str]:
    """Returns a line from disc to disc, bent so that opposite arcs differ, and its arrowhead."""
    bend = (tail + head) / 2 + 0.1j * (head - tail)
    out, onto = ((bend - place) / abs(bend - place) for place in (tail, head))
    tip = head + _DISC * onto
    base = tip + 6 * onto
    line = "M{}Q{} {}".format(*map(_point, (tail + _DISC * out, bend, base)))
    corners = base + 2.5j * onto, base - 2.5j * onto
    return line, "M{}L{}L{}z".format(*map(_point, (tip, *corners)))


def _point(place: complex) -> str:
    return f"{place.real:.1f} {place.imag:.1f}"
