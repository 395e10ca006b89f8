"""What the ranks of a program's overlapped GEMMs did and when, and how much was hidden."""

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
    """One run of a program; times of the slowest rank in seconds.

    Attributes:
      result: of the program.
      spans: GEMMs and communication of each rank, in order of time; ranks of other groups follow
        those of the first.
    """

    result: Any
    spans: tuple[Span, ...]

    @property
    def total(self) -> float:
        """From the first span's begin to the last one's end."""
        return max((s.start + s.duration for s in self.spans), default=0.0)

    @property
    def computation(self) -> float:
        """In which a rank multiplies or sums."""
        return max(busy_seconds(self.spans, COMPUTATION).values(), default=0.0)

    @property
    def communication(self) -> float:
        """In which a rank sends or reads."""
        return max(busy_seconds(self.spans, COMMUNICATION).values(), default=0.0)

    @property
    def exposed_communication(self) -> float:
        """In which a rank sends or reads, and does not multiply."""
        return max(exposed_seconds(self.spans).values(), default=0.0)

    @property
    def bound(self) -> float:
        """max(computation, communication): what is cut in these parts is not faster."""
        return max(self.computation, self.communication)

    def write_trace(self, path: str | os.PathLike) -> pathlib.Path:
        """See `timeline.write_chrome_trace`."""
        return write_chrome_trace(self.spans, path)


def overlap_profile(fn: Callable[..., Any], *operands: Any) -> OverlapProfile:
    """Runs a compiled program twice and tells what its overlapped GEMMs did the second time.

    Call on the host. Concerns every call of `all_gather_matmul`, `matmul_reduce_scatter` and `gemm`
    with a buffer that this process runs meanwhile on the package's transports. Of several processes
    each sees its own ranks, which fetch what others send; all of them have to call it.

    Args:
      fn: a function under `jax.jit`.
      operands: its arguments.
    Raises:
      ValueError: nothing was recorded: the program has no such call, or from XLA's collectives; its
        calls are over several axes.
    """
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
            "package. See available_implementations(). On GPUs calls in recorded command buffers "
            "are not seen: XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )
    axes = {op.split(" over ")[-1] for op, *_ in recorded}
    if len(axes) > 1:
        raise ValueError(
            f"overlap_profile: the program's GEMMs communicate over {' and '.join(sorted(axes))}, "
            "whose ranks are not the same. Profile them in programs of their own."
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
