"""Spans of computation and communication on each rank, and the trace file that shows them."""

import json
import os
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

COMPUTATION, COMMUNICATION = "computation", "communication"
_KINDS = (COMPUTATION, COMMUNICATION)


class Span(NamedTuple):
    """Something that a rank did.

    Attributes:
      rank: who.
      kind: "computation" or "communication".
      name: what, for example "step 3".
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

    One process a rank, with two threads: computation and communication.

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
