"""Draws causal attention step by step: which rank attends to which keys, and when."""

import os
import pathlib
from typing import Any

import numpy as np

from jax_cp_dispatch.attention import Hamilton, Ring
from jax_cp_dispatch.attention.rotating.chunks import Chunking
from jax_cp_dispatch.attention.rotating.layout import (
    SequenceLayout,
    contiguous_layout,
    zigzag_layout,
)
from jax_cp_dispatch.attention.rotating.schedule_of import schedule_of
from jax_cp_dispatch.plots.svg import LINE, color, document, text

# Pixels.
_GRID, _GAP, _LEFT, _TOP, _TITLE, _BAR = 150, 22, 26, 30, 24, 7

# A rectangle of the causal triangle: first key, keys, first query, queries.
_Rectangle = tuple[int, int, int, int]


def plot_schedules(num_ranks: int, path: str | os.PathLike) -> None:
    """Draws the steps of ring, zigzag and Hamilton attention for one causal document.

    For each step, the part of the causal triangle (queries down, keys to the right) that each rank
    computes, in its colour; below it the work of each rank, on a common scale.

    Args:
      num_ranks: at least 2.
      path: of the SVG file to write.
    Raises:
      ValueError: there are fewer ranks.
    """
    if num_ranks < 2:
        raise ValueError(f"plot_schedules: num_ranks is {num_ranks}; it needs to be at least 2.")
    num_tokens = 2 * (num_ranks - 1)  # per rank, so that each block has a token for every chunk
    contiguous, zigzag = contiguous_layout, zigzag_layout
    ring, hamilton = (
        schedule_of("plot_schedules", algorithm, num_ranks) for algorithm in (Ring(), Hamilton())
    )
    algorithms = [
        ("ring, contiguous", contiguous(num_ranks, num_tokens), ring),
        ("zigzag ring", zigzag(num_ranks, num_tokens), ring),
        (f"Hamilton, {hamilton.num_chunks} chunks", zigzag(num_ranks, num_tokens), hamilton),
    ]
    total = num_ranks * num_tokens
    body = [
        f'<clipPath id="past"><path d="M0 0L{total} {total}L0 {total}z"/></clipPath>',
        *(
            text(_LEFT + step * (_GRID + _GAP), _TOP - 12, f"step {step}")
            for step in range(num_ranks)
        ),
    ]
    height = _TITLE + _GRID + (num_ranks + 2) * _BAR + 8
    for number, (title, layout, schedule) in enumerate(algorithms):
        body += _algorithm(title, layout, schedule, _TOP + number * height)
    size = _LEFT + num_ranks * (_GRID + _GAP), _TOP + len(algorithms) * height
    pathlib.Path(path).write_text(document(*size, "Causal attention step by step", body))


def _algorithm(title: str, layout: SequenceLayout, schedule: Any, top: int | float) -> list[str]:
    n = layout.num_ranks
    steps = [[_attended(layout, schedule, rank, step) for rank in range(n)] for step in range(n)]
    work = np.array([[sum(map(_pairs, rectangles)) for rectangles in ranks] for ranks in steps])
    slowest, mean = int(work.max(axis=1).sum()), work.sum() / n
    summary = (
        f"query-key pairs of the slowest ranks of all steps: {slowest}; of a mean rank: {mean:g}"
    )
    parts = [text(_LEFT, top + 14, f'<tspan font-weight="bold">{title}</tspan>: {summary}')]
    top += _TITLE
    middle = top + _GRID / 2
    turned = {"transform": f"rotate(-90 {_LEFT - 8} {middle:g})", "text_anchor": "middle"}
    parts.append(text(_LEFT - 8, middle, "queries", font_size="11", **turned))
    for step, ranks in enumerate(steps):
        left = _LEFT + step * (_GRID + _GAP)
        parts += _grid(layout, ranks, left, top)
        if step == 0:
            place = {"font_size": "11", "text_anchor": "end"}
            parts.append(text(left + _GRID, top + 12, "keys →", **place))
        most = (layout.num_tokens / n) ** 2  # all queries of a rank with all keys of another
        parts += _bars(work[step] * _GRID / most, left, top + _GRID + _BAR)
    return parts


def _attended(layout: SequenceLayout, schedule: Any, rank: int, step: int) -> list[_Rectangle]:
    """Returns blocks of queries with the held keys, without future keys."""
    held = Chunking(layout, schedule.num_chunks).key_order(*schedule.held(rank, step))
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


def _grid(
    layout: SequenceLayout, ranks: list[list[_Rectangle]], left: int | float, top: int | float
):
    total, block = layout.num_tokens, layout.block_rows
    scale = f"translate({left:g} {top:g}) scale({_GRID / total:g})"
    lines = "".join(f"M0 {at}H{at}M{at} {at}V{total}" for at in range(block, total, block))
    parts = [f'<g transform="{scale}">', '<g clip-path="url(#past)">']
    for rank, rectangles in enumerate(ranks):
        shapes = (f"M{k} {q}h{ks}v{qs}h-{ks}z" for k, ks, q, qs in rectangles)
        parts.append(f'<path d="{"".join(shapes)}" fill="{color(rank)}"/>')
    outline = f'd="M0 0L{total} {total}H0z{lines}" fill="none" stroke="{LINE}"'
    return [*parts, "</g>", f'<path {outline} stroke-width="{0.5 * total / _GRID:g}"/>', "</g>"]


def _bars(widths: np.ndarray, left: int | float, top: int | float) -> list[str]:
    return [
        f'<rect x="{left:g}" y="{top + rank * _BAR:g}" width="{width:.4g}" height="{_BAR - 1}" '
        f'fill="{color(rank)}"/>'
        for rank, width in enumerate(widths)
    ]
