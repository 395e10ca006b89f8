"""Where the time of a compiled program goes, by the named scopes of its operations."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

OTHER = "other"
_SCOPE = re.compile(r"cpd\.\w+")
_NAMED = re.compile(r"([\w.-]+) = .*op_name=\"([^\"]*)\"")

Span = tuple[float, float]


def seconds_by_scope(program: Any, run: Callable[[], Any]) -> dict[str, float]:
    """Profiles one run of a compiled program on CPU devices.

    Returns the mean over the devices of the seconds in which an operation of a scope was running or
    waiting; `OTHER` has the rest of the time in which any operation was. A loop counts with the
    scope that it is in.
    """
    scope_of = {
        name: scopes[-1] if (scopes := _SCOPE.findall(path)) else OTHER
        for name, path in _NAMED.findall(program.as_text())
    }
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    spans: dict[int, dict[str, list[Span]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for event in (e for plane in data.planes for line in plane.lines for e in line.events):
        stats = dict(event.stats)
        if "hlo_op" in stats:
            scope = scope_of.get(stats["hlo_op"], OTHER)
            end = event.start_ns + event.duration_ns
            spans[stats["device_ordinal"]][scope].append((event.start_ns, end))
    total: dict[str, float] = collections.defaultdict(float)
    for of_device in spans.values():
        for scope, found in of_device.items():
            total[scope] += _covered(found)
        scoped = [s for scope, found in of_device.items() if scope != OTHER for s in found]
        total[OTHER] -= _covered(of_device[OTHER])
        total[OTHER] += _covered(scoped + of_device[OTHER]) - _covered(scoped)
    return {scope: 1e-9 * value / len(spans) for scope, value in total.items()}


def _covered(spans: Iterable[Span]) -> float:
    """Returns the length of the union of the spans."""
    length, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, last))
        last = max(last, end)
    return length
