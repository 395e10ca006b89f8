"""The record of a profile: times of each step and of each rank, and their spans."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from jaxtyping import Array

from jax_cp_dispatch.attention.profile.stopwatch import Stopwatch
from jax_cp_dispatch.timeline import (
    COMMUNICATION,
    COMPUTATION,
    Span,
    busy_seconds,
    write_chrome_trace,
)


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """One step; median seconds until the slowest rank was ready.

    Attributes:
      name: "to zigzag", "step t" and "from zigzag".
      communication: time of the exchange of this step; 0 if there is none.
      computation: time of attention over the held keys.
    """

    name: str
    communication: float
    computation: float


@dataclasses.dataclass(frozen=True)
class RankProfile:
    """One rank; seconds of all steps, each from the start of the step until the rank was ready.

    Attributes:
      rank: its number.
      communication: time of its exchanges; it includes waiting for slower ranks.
      computation: time of its attention. Virtual devices share cores, so it includes waiting for a
        core.
    """

    rank: int
    communication: float
    computation: float


@dataclasses.dataclass(frozen=True)
class AttentionProfile:
    """Times of a forward pass: as a whole, and by step.

    Attributes:
      total: seconds of the whole program, compiled as one, where an exchange and the computation
        of its step overlap; median.
      steps: the same exchanges and attention, run step by step. The work before and after them
        (ranges, cutting into blocks, division by the sums) is only included in `total`.
      spans: of each rank. The exchange and the computation of a step start together; the next step
        starts when the slowest rank has finished both.
      out: the output, from the steps.
    """

    total: float
    steps: tuple[StepProfile, ...]
    spans: tuple[Span, ...]
    out: Array

    @property
    def communication(self) -> float:
        """Seconds of all exchanges."""
        return sum(step.communication for step in self.steps)

    @property
    def computation(self) -> float:
        """Seconds of all computation."""
        return sum(step.computation for step in self.steps)

    @property
    def ranks(self) -> tuple[RankProfile, ...]:
        """The times of each rank, from the spans."""
        busy = [busy_seconds(self.spans, kind) for kind in (COMMUNICATION, COMPUTATION)]
        ranks = sorted({span.rank for span in self.spans})
        return tuple(RankProfile(rank, *(x.get(rank, 0.0) for x in busy)) for rank in ranks)

    def write_chrome_trace(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes the spans as a JSON trace for Perfetto, with two rows per rank."""
        return write_chrome_trace(self.spans, path)

    def __str__(self) -> str:
        all_steps = StepProfile("all", self.communication, self.computation)
        rows = [(x.name, x.communication, x.computation) for x in (*self.steps, all_steps)]
        ranks = [(f"rank {x.rank}", x.communication, x.computation) for x in self.ranks]
        return "\n".join(
            [
                f"hamilton: {1e3 * self.total:.2f} ms as one program; step by step, "
                "until the slowest rank is ready, ms:",
                *_table(rows),
                "All steps, by rank, ms:",
                *_table(ranks),
            ]
        )


def _table(rows: list[tuple[str, float, float]]) -> list[str]:
    lines = [f"{'':<12}{'communication':>14}{'computation':>14}"]
    return lines + [f"{name:<12}{1e3 * x:14.2f}{1e3 * y:14.2f}" for name, x, y in rows]


class StepRecord:
    """Runs steps in sequence, and times each on every rank."""

    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch, self.steps, self.spans = stopwatch, [], []
        self._now = 0.0

    def step(self, name: str, **parts: Any) -> list[Any]:
        """Runs the parts, kind=(program, *operands), of one step; returns their results."""
        results, slowest = [], {COMMUNICATION: 0.0, COMPUTATION: 0.0}
        for kind, (program, *operands) in parts.items():
            seconds, result = self.stopwatch.run(program, *operands)
            results.append(result)
            slowest[kind] = max(seconds)
            self.spans += [Span(r, kind, name, self._now, s) for r, s in enumerate(seconds)]
        self.steps.append(StepProfile(name, **slowest))
        self._now += max(slowest.values())
        return results
