"""Spans of computation and communication on each rank, and their trace file."""

import json
import os
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

COMPUTATION, COMMUNICATION = "computation", "communication"
_KINDS = (COMPUTATION, COMMUNICATION)


class Span(NamedTuple):
    """An activity of a rank.

    Attributes:
      rank: its rank.
      kind: "computation" or "communication".
      name: for example "step 3".
      start: seconds from the beginning of the timeline.
      duration: seconds.
    """

    rank: int
    kind: str
    name: str
    start: float
    duration: float


def write_chrome_trace(spans: Iterable[Span], path: str | os.PathLike) -> pathlib.Path:
    """Writes spans as a JSON trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    Each rank is shown as a process with two threads: computation and communication.

    Args:
      spans: in any order.
      path: of the file to write.
    Returns:
      The path.
    References:
      Trace Event Format (Google), "complete" and "metadata" events; times in microseconds.
    """
    spans = sorted(spans)
    events: list[dict] = []
    for rank in sorted({span.rank for span in spans}):
        events.append(_label("process_name", rank, 0, f"rank {rank}"))
        events += [_label("thread_name", rank, i, kind) for i, kind in enumerate(_KINDS)]
    for span in spans:
        event = {"ph": "X", "name": span.name, "cat": span.kind, "pid": span.rank}
        event |= {"tid": _KINDS.index(span.kind)}
        events.append(event | {"ts": 1e6 * span.start, "dur": 1e6 * span.duration})
    path = pathlib.Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    return path


def _label(name: str, rank: int, thread: int, text: str) -> dict:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": {"name": text}}


def busy_seconds(spans: Iterable[Span], kind: str) -> dict[int, float]:
    """Returns, for each rank, the seconds covered by at least one span of `kind`."""
    return {rank: _length(parts) for rank, parts in _by_rank(spans, kind).items()}


def exposed_seconds(spans: Iterable[Span]) -> dict[int, float]:
    """Returns, for each rank, the seconds in which it communicates without computing."""
    spans = list(spans)
    computing = _by_rank(spans, COMPUTATION)
    exposed = {}
    for rank, parts in _by_rank(spans, COMMUNICATION).items():
        hidden = computing.get(rank, [])
        exposed[rank] = _length(parts + hidden) - _length(hidden)
    return exposed


def _by_rank(spans: Iterable[Span], kind: str) -> dict[int, list[tuple[float, float]]]:
    parts: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        if span.kind == kind:
            parts.setdefault(span.rank, []).append((span.start, span.start + span.duration))
    return parts


def _length(parts: list[tuple[float, float]]) -> float:
    """Returns the length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(parts):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total
