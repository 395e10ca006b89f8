"""Times the part of each rank alone, on one device, and says how they balance."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_cp_dispatch._text import table


@dataclasses.dataclass(frozen=True)
class BalanceProfile:
    """What every rank computes, each alone on the same device.

    Attributes:
      name: of the algorithm, or of the function.
      seconds: of each rank; median over the rounds.
      work: of each rank, a count.
      unit: what `work` counts: "pairs" of a query and a key, "rows" of experts.
    """

    name: str
    seconds: tuple[float, ...]
    work: tuple[int, ...]
    unit: str

    @property
    def busiest(self) -> float:
        """Seconds of the slowest rank: a lower bound for a step of all ranks."""
        return max(self.seconds)

    @property
    def imbalance(self) -> float:
        """Longest time of a rank divided by the mean; 1 is perfect."""
        return self.busiest / statistics.mean(self.seconds)

    @property
    def work_imbalance(self) -> float:
        """Largest work of a rank divided by the mean; 1 is perfect, and the value without work."""
        mean = statistics.mean(self.work)
        return max(self.work) / mean if mean else 1.0

    def __str__(self) -> str:
        ranks = zip(self.seconds, self.work, strict=True)
        rows = [(str(r), f"{1e3 * s:.2f}", str(n)) for r, (s, n) in enumerate(ranks)]
        return (
            f"{self.name}: busiest rank {1e3 * self.busiest:.2f} ms, {self.imbalance:.3f} of "
            f"the mean; in {self.unit} {self.work_imbalance:.3f}\n"
            f"{table(('rank', 'ms', self.unit), rows)}"
        )


def time_ranks(
    runs: Sequence[Callable[[int], Any]], num_ranks: Sequence[int], repeats: int
) -> list[tuple[float, ...]]:
    """Returns the median seconds of each rank in each program.

    Ranks and programs take turns in each round. On CPU, seconds are processor time, so other
    processes do not count.

    Args:
      runs: each runs one rank of a program, and returns its arrays.
      num_ranks: of each program.
      repeats: rounds.
    """
    now = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    for run in runs:  # compile, and touch memory
        jax.block_until_ready(run(0))
    times: list[list[list[float]]] = [[[] for _ in range(n)] for n in num_ranks]
    for _ in range(repeats):
        for of_program, run in zip(times, runs, strict=True):
            for rank, of_rank in enumerate(of_program):
                start = now()
                jax.block_until_ready(run(rank))
                of_rank.append(now() - start)
    return [tuple(map(statistics.median, of_program)) for of_program in times]
