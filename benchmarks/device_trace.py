"""What ran on a GPU according to JAX's profiler: kernels, their streams and times."""

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

OWN_KERNEL = re.compile(r"\bcpd::|_ZN3cpd")  # names of this package's kernels
Interval = tuple[float, float]


class Kernel(NamedTuple):
    """A kernel or a copy on a stream; times in ns, on the clock of `Trace.windows`."""

    name: str
    stream: str
    start: float
    end: float


class Trace(NamedTuple):
    """A profile.

    Attributes:
      kernels: of all GPUs, by their start.
      windows: the host's times of each `jax.profiler.TraceAnnotation`, by its name.
    """

    kernels: list[Kernel]
    windows: dict[str, Interval]

    def within(self, name: str) -> list[Kernel]:
        """Returns the kernels whose middle lies in an annotation; it has to wait for them.

        Raises:
          RuntimeError: there are none.
        """
        start, end = self.windows[name]
        found = [x for x in self.kernels if start <= (x.start + x.end) / 2 < end]
        if not found:
            times = (
                f"from {self.kernels[0].start} to {self.kernels[-1].end}" if self.kernels else ""
            )
            raise RuntimeError(
                f"the profile has {len(self.kernels)} kernels {times}, but none in {name!r}, from "
                f"{start} to {end}"
            )
        return found


def traced(run: Callable[[], Any], annotations: Iterable[str] = ()) -> Trace:
    """Calls `run`, which waits for its work, under the profiler."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of Python would be an event
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    names = set(annotations)
    kernels: list[Kernel] = []
    windows: dict[str, Interval] = {}
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                times = event.start_ns, event.start_ns + event.duration_ns
                if plane.name.startswith("/device:GPU:") and line.name.startswith("Stream #"):
                    kernels.append(Kernel(event.name, line.name, *times))
                elif event.name in names:
                    windows[event.name] = times
    return Trace(sorted(kernels, key=lambda x: x.start), windows)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals, by their start, that cover the same times."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def busy(kernels: Iterable[Kernel]) -> float:
    """Returns the ns in which at least one of the kernels runs."""
    return sum(end - start for start, end in union((x.start, x.end) for x in kernels))


def overlap(kernels: Iterable[Kernel], others: Iterable[Kernel]) -> float:
    """Returns the ns in which one of the kernels runs, and one of the others too."""
    kernels, others = list(kernels), list(others)
    return busy(kernels) + busy(others) - busy(kernels + others)
