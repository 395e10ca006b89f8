"""Draws the computation and communication of overlapped GEMMs on each rank over time."""

import html
import math
import os
import pathlib
from collections.abc import Mapping

from jax_cp_dispatch.comm_gemm import OverlapProfile
from jax_cp_dispatch.plots.svg import LINE, color, document, text
from jax_cp_dispatch.timeline import COMMUNICATION, COMPUTATION, Span

# Pixels.
_LEFT, _WIDTH, _RIGHT, _TOP, _TITLE, _ROW, _GAP = 62, 660, 16, 30, 24, 13, 4
_LETTER = 5.2  # width of a letter in a bar
_COLORS = {COMPUTATION: color(0), COMMUNICATION: color(1)}


def plot_overlap(profiles: Mapping[str, OverlapProfile], path: str | os.PathLike) -> None:
    """Draws the spans of several runs below each other, on one time scale.

    Each rank has two rows: computation above, communication below. The title shows the time of the
    run, and how long the slowest rank communicates without computing.

    Args:
      profiles: results of `overlap_profile`, by title.
      path: of the SVG file to write.
    Raises:
      ValueError: there is nothing to draw.
    """
    total = max((profile.total for profile in profiles.values()), default=0.0)
    if total <= 0:
        raise ValueError(
            "plot_overlap: the profiles contain no span that takes time. Pass at least one profile "
            "of overlap_profile, by its title."
        )
    scale, top, body = _WIDTH / total, _TOP, _legend()
    for title, profile in profiles.items():
        exposed = profile.exposed_communication
        times = f"{_ms(profile.total)} ms, of which {_ms(exposed)} ms are communication alone"
        body.append(text(8, top + 15, f"{html.escape(title)}: {times}"))
        top += _TITLE
        for rank in sorted({span.rank for span in profile.spans}):
            body.append(text(8, top + _ROW + 4, f"rank {rank}", font_size="11"))
            body += _rows([span for span in profile.spans if span.rank == rank], top, scale)
            top += 2 * _ROW + _GAP
        top += _GAP
    body = [*_ticks(total, scale, top), *body]
    size = _LEFT + _WIDTH + _RIGHT, top + 24
    pathlib.Path(path).write_text(document(*size, "Computation and communication of ranks", body))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _legend() -> list[str]:
    parts, left = [], _LEFT
    for kind, fill in _COLORS.items():
        parts.append(f'<rect x="{left}" y="8" width="12" height="12" fill="{fill}"/>')
        parts.append(text(left + 17, 18.5, kind))
        left += 125
    return parts


def _rows(spans: list[Span], top: int | float, scale: float) -> list[str]:
    """Returns the bars of one rank, with names where they fit."""
    parts = []
    for span in spans:
        left, width = _LEFT + span.start * scale, max(0.5, span.duration * scale)
        y = top + _ROW * (span.kind == COMMUNICATION)
        name = span.name.partition(" (")[0]  # without the function and its axis
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}" '
            f'fill="{_COLORS[span.kind]}" stroke="white" stroke-width="0.5">'
            f"<title>{html.escape(span.name)}: {_ms(span.duration)} ms</title></rect>"
        )
        if _LETTER * len(name) < width:
            middle = round(left + width / 2, 1)
            look = {"font_size": "9", "fill": "white", "text_anchor": "middle"}
            parts.append(text(middle, y + 9, html.escape(name), **look))
    return parts


def _ticks(total: float, scale: float, bottom: int | float) -> list[str]:
    """Returns about eight lines at round times."""
    rough = total / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    parts = []
    for i in range(int(total / step) + 1):
        x = round(_LEFT + i * step * scale, 1)
        parts.append(f'<path d="M{x} {_TOP - 4}V{bottom}" stroke="{LINE}" stroke-width="0.5"/>')
        unit = " ms" if i == 0 else ""
        label = f"{_ms(i * step)}{unit}"
        parts.append(text(x, bottom + 14, label, font_size="11", text_anchor="middle"))
    return parts
