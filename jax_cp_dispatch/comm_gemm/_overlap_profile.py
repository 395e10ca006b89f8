"""Profiles a program's overlapped GEMMs: spans of each rank, and the hidden communication."""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.timeline import (
    COMMUNICATION,
    COMPUTATION,
    Span,
    busy_seconds,
    exposed_seconds,
    write_chrome_trace,
)


@dataclasses.dataclass(frozen=True)
class OverlapProfile:
    """The profile of one run; times are those of the slowest rank, in seconds.

    Attributes:
      result: result of the program.
      spans: GEMMs and communication of each rank, in order of time; ranks of other groups are
        numbered after those of the first.
    """

    result: Any
    spans: tuple[Span, ...]

    @property
    def total(self) -> float:
        """Time from the start of the first span to the end of the last one."""
        return max((s.start + s.duration for s in self.spans), default=0.0)

    @property
    def computation(self) -> float:
        """Time in which a rank multiplies or sums."""
        return max(busy_seconds(self.spans, COMPUTATION).values(), default=0.0)

    @property
    def communication(self) -> float:
        """Time in which a rank sends or reads."""
        return max(busy_seconds(self.spans, COMMUNICATION).values(), default=0.0)

    @property
    def exposed_communication(self) -> float:
        """Time in which a rank sends or reads, and does not multiply."""
        return max(exposed_seconds(self.spans).values(), default=0.0)

    @property
    def bound(self) -> float:
        """max(computation, communication), a lower bound for any overlap of the two."""
        return max(self.computation, self.communication)

    def write_trace(self, path: str | os.PathLike) -> pathlib.Path:
        """See `timeline.write_chrome_trace`."""
        return write_chrome_trace(self.spans, path)


def overlap_profile(fn: Callable[..., Any], *operands: Any) -> OverlapProfile:
    """Runs a compiled program twice and profiles its overlapped GEMMs in the second run.

    Call on the host. Records all calls of `all_gather_matmul`, `matmul_reduce_scatter`, and `gemm`
    with a buffer that this process runs on the package's transports in that run. With several
    processes, all must call it, and each records its own ranks, including the data they fetch from
    others.

    Args:
      fn: a function under `jax.jit`.
      operands: its arguments.
    Returns:
      The result of the second run, and the spans of every rank.
    Raises:
      TypeError: `fn` cannot be called.
      ValueError: nothing was recorded, because the program has no such call or uses XLA's
        collectives; or its calls use several axes.
    """
    if not callable(fn):
        raise TypeError(
            f"overlap_profile: fn is of type {type(fn).__name__}; it needs to be a function. Pass "
            "one under jax.jit, then its operands."
        )
    jax.block_until_ready(fn(*operands))
    recorders = [x for x in (runtime.native, runtime.cuda) if x is not None]
    for recorder in recorders:
        recorder.start_spans()
    try:
        result = jax.block_until_ready(fn(*operands))
    finally:
        recorded = [span for recorder in recorders for span in recorder.stop_spans()]
    if not recorded:
        raise ValueError(
            "overlap_profile: the program ran no GEMM with communication on a transport of this "
            "package. See available_implementations(). On GPUs, calls in command buffers are not "
            "recorded; set XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )
    axes = {op.split(" over ")[-1] for op, *_ in recorded}
    if len(axes) > 1:
        raise ValueError(
            f"overlap_profile: the program's GEMMs communicate over {' and '.join(sorted(axes))}, "
            "whose ranks differ. Profile them in separate programs."
        )
    begin = min(start for *_, start, _ in recorded)
    group_size = 1 + max(rank for _, _, rank, *_ in recorded)
    spans = [
        Span(
            rank=group * group_size + rank,
            kind=COMMUNICATION if is_communication else COMPUTATION,
            name=f"{name} ({op})",
            start=1e-9 * (start - begin),
            duration=1e-9 * duration,
        )
        for op, group, rank, is_communication, name, start, duration in recorded
    ]
    return OverlapProfile(result, tuple(sorted(spans, key=lambda span: (span.rank, span.start))))
