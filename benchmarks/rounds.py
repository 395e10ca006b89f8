"""Measures programs in turn for minutes, since the speed of a shared machine drifts by the second.

All programs run in every round, so a slow time meets all of them alike. The median over the rounds
is then the time at the usual speed; medians of half of the rounds tell how well it is known.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax

Name = TypeVar("Name", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Program:
    """What is measured: a function that returns arrays, and its calls in each round.

    Several calls make the time of a fast program long enough. All processes of a job must make the
    same calls.
    """

    run: Callable[[], Any]
    calls: int = 1


def in_rounds(programs: Mapping[Name, Program], rounds: int) -> dict[Name, list[float]]:
    """Returns the seconds of a call in each round; before it, the program runs once."""
    times: dict[Name, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            jax.block_until_ready(program.run())
            start = time.perf_counter()
            for _ in range(program.calls):
                jax.block_until_ready(program.run())
            times[name].append((time.perf_counter() - start) / program.calls)
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    """Returns the median in ms, and the relative difference of the even and the odd rounds."""
    even, odd = (statistics.median(times[i::2] or times) for i in (0, 1))
    return {
        "measured_ms": float(f"{1e3 * statistics.median(times):.4g}"),
        "halves_differ": round(abs(even - odd) / min(even, odd), 3),
    }
