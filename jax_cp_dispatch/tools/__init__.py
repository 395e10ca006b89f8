"""The commands of `python -m jax_cp_dispatch`, and what they share: arguments, progress, timing.

No other part imports them. The benchmarks time by the same functions.
"""

import argparse
import contextlib
import importlib.metadata
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import jax

Name = TypeVar("Name", bound=Hashable)

MOST_DEVICES = 1024
"""Virtual CPU devices of a command; each has threads, and programs take longer to compile."""


class InputError(ValueError):
    """A file or an argument is not usable; the message says what to do."""


def at_most(most: int) -> Callable[[str], int]:
    """Returns the type of an argument: an integer from 1 to `most`."""

    def number(text: str) -> int:
        if not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"it is {text}; pass 1 to {most}")
        return int(text)

    return number


def start_on_cpu() -> bool:
    """Whether a command starts virtual CPU devices; does not use JAX."""
    return os.environ.get("JAX_PLATFORMS", "" if has_gpu() else "cpu") == "cpu"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU driver is present; does not use JAX."""
    return pathlib.Path("/dev/nvidiactl").exists()


class Progress:
    """Prints numbered steps with their time on standard error."""

    def __init__(self, num_steps: int):
        self._num_steps, self._step = num_steps, 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._step += 1
        label, start = f"[{self._step}/{self._num_steps}] {what}", time.perf_counter()
        if sys.stderr.isatty():
            print(label, end="\r", file=sys.stderr, flush=True)
        yield
        seconds = time.perf_counter() - start
        print(f"{label:<60}{seconds:6.1f} s", file=sys.stderr, flush=True)


def interleaved(
    runs: Mapping[Name, Callable[[], Any]],
    repeats: int,
    *,
    longest: float | None = 20.0,
    calls: int = 1,
) -> dict[Name, float]:
    """Returns the median seconds of each run; all run in turn, `repeats` times.

    Runs are interleaved because the speed of a shared machine varies; ratios are then more reliable
    than absolute times. Each runs twice in a row and the second run is timed, as in a loop: a
    program may return gigabytes to the system after its results are ready, which slows the next
    one. Several `calls` in a row, timed together, hide the host's overhead on a GPU.

    Runs that take more than `longest` seconds are timed in the first round only. Pass None if
    several processes measure together: each must run everything equally often.
    """
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if longest is None or not times[name] or times[name][0] <= longest:
                times[name].append(call_seconds(run, calls))
    return {name: statistics.median(values) for name, values in times.items()}


def call_seconds(run: Callable[[], Any], calls: int = 1) -> float:
    """Returns the mean seconds of calls in a row, after one that is not timed."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(calls)][-1])
    return (time.perf_counter() - start) / calls


def machine() -> dict[str, Any]:
    """Returns the processor's model, its cores, and the system."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [x.split(":")[1].strip() for x in lines if "model name" in x]
    system = f"{platform.system()} {platform.machine()}"
    models.append(platform.processor() or "unknown")
    return {"cpu": models[0], "cores": os.cpu_count(), "system": system}


def version_of(*packages: str) -> str | None:
    """Returns the version of the first of these packages that is installed."""
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, JAX and NumPy, and of those `packages` that are installed."""
    found = {name: version_of(name) for name in ("jax", "jaxlib", "numpy", *packages)}
    installed = {name: version for name, version in found.items() if version}
    return {"python": platform.python_version()} | installed
