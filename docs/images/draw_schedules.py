"""Redraws schedules.svg of ../choose_an_algorithm.md: which rank attends which keys, and when."""

import pathlib
import sys
from typing import Any

import numpy as np

from jax_cp_dispatch.attention import Hamilton, Ring
from jax_cp_dispatch.attention.key_chunks import Chunking
from jax_cp_dispatch.documents.layouts import (
    SequenceLayout,
    contiguous_layout,
    zigzag_layout,
)
from jax_cp_dispatch.plots import LINE, figure_class, save

_BAR = 0.05  # height of a bar, of the side of the triangle

# A rectangle of the causal triangle: first key, keys, first query, queries.
_Rectangle = tuple[int, int, int, int]


def draw(folder: pathlib.Path) -> None:
    """Draws the steps of ring, zigzag and Hamilton attention for one causal document.

    For each step, the part of the causal triangle (queries down, keys to the right) that each rank
    computes, in its colour; below it the work of each rank, on a common scale.
    """
    num_ranks = 5
    num_tokens = 2 * (num_ranks - 1)  # per rank, so that each block has a token for every chunk
    contiguous, zigzag = contiguous_layout, zigzag_layout
    ring, hamilton = (x.schedule("draw_schedules", num_ranks) for x in (Ring(), Hamilton()))
    algorithms = [
        ("ring, contiguous", contiguous(num_ranks, num_tokens), ring),
        ("zigzag ring", zigzag(num_ranks, num_tokens), ring),
        (f"Hamilton, {hamilton.num_chunks} chunks", zigzag(num_ranks, num_tokens), hamilton),
    ]
    size = 1.6 * num_ranks, len(algorithms) * (2.0 + 0.08 * num_ranks)
    figure = figure_class("draw_schedules")(figsize=size)
    panels = figure.subplots(len(algorithms), num_ranks, squeeze=False)
    figure.subplots_adjust(0.04, 0.05, 0.99, 0.95, wspace=0.1, hspace=0.15)  # wide titles overlap
    for line, (title, layout, schedule) in zip(panels, algorithms, strict=True):
        _draw_algorithm(line, title, layout, schedule)
    for step, axes in enumerate(panels[0]):
        axes.annotate(f"step {step}", (0.98, 0.98), xycoords="axes fraction", ha="right", va="top",
                      fontsize=8)  # fmt: skip
    panels[0, 0].set_ylabel("queries", fontsize=8)
    panels[0, 0].set_xlabel("keys; work of ranks", fontsize=8)
    save(figure, folder / "schedules.svg")


def _draw_algorithm(line: Any, title: str, layout: SequenceLayout, schedule: Any) -> None:
    n = layout.num_ranks
    steps = [[_attended(layout, schedule, rank, step) for rank in range(n)] for step in range(n)]
    work = np.array([[sum(map(_pairs, rectangles)) for rectangles in ranks] for ranks in steps])
    slowest, mean = int(work.max(axis=1).sum()), work.sum() / n
    summary = (
        f"query-key pairs of the slowest ranks of all steps: {slowest}; of a mean rank: {mean:g}"
    )
    line[0].set_title(f"{title}: {summary}", loc="left", fontsize=9)
    most = (layout.num_tokens / n) ** 2  # all queries of a rank with all keys of another
    for axes, ranks, pairs in zip(line, steps, work, strict=True):
        _draw_step(axes, layout, ranks, pairs / most)


def _attended(layout: SequenceLayout, schedule: Any, rank: int, step: int) -> list[_Rectangle]:
    """Returns blocks of queries with the held keys, without future keys."""
    held = Chunking.of(layout, schedule.num_chunks).key_order(*schedule.held(rank, step))
    pieces = zip(held.start.tolist(), held.length.tolist(), strict=True)
    return [
        (key, keys, query, queries)
        for key, keys in sorted(pieces)
        for query, queries in layout.blocks[rank]
        if keys and key < query + queries
    ]


def _pairs(rectangle: _Rectangle) -> int:
    key, keys, query, queries = rectangle
    return int(np.clip(np.arange(query, query + queries) + 1 - key, 0, keys).sum())


def _draw_step(
    axes: Any, layout: SequenceLayout, ranks: list[list[_Rectangle]], work: np.ndarray
) -> None:
    """Draws the computed part of the triangle in the colours of the ranks, and their work."""
    from matplotlib.patches import Polygon, Rectangle

    total, block = layout.num_tokens, layout.block_rows
    corners = [(0, 0), (total, total), (0, total)]
    past = axes.add_patch(Polygon(corners, fill=False, edgecolor=LINE))
    for at in range(block, total, block):
        axes.plot([0, at, at], [at, at, total], color=LINE, linewidth=0.5)
    for rank, rectangles in enumerate(ranks):
        for key, keys, query, queries in rectangles:
            part = Rectangle((key, query), keys, queries, facecolor=f"C{rank}")
            axes.add_patch(part).set_clip_path(past)
        place = total * (1 + _BAR * (rank + 1.5))
        axes.barh(place, total * work[rank], 0.8 * _BAR * total, color=f"C{rank}")
    bottom = total * (1 + _BAR * (len(ranks) + 1.5))
    axes.set(xlim=(0, total), ylim=(bottom, 0), aspect="equal", xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
