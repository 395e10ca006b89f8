"""Measures programs in turn, and describes the machine and the versions that were measured."""

import importlib.metadata
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jaxlib.version
import numpy as np

Name = TypeVar("Name", bound=Hashable)


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
    one.

    Args:
      runs: functions that return arrays, or None.
      repeats: rounds.
      longest: runs that take more seconds are timed in the first round only. Pass None if several
        processes measure together: each must run everything equally often.
      calls: calls in a row that are timed together; several hide the host's overhead on a GPU.
    """
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if longest is not None and times[name] and times[name][0] > longest:
                continue
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
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, JAX and NumPy, and of those `packages` that are installed."""
    found = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
    }
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
