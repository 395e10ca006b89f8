"""Redraws overlap.svg of ../comm_gemm.md: a prediction, not a measurement."""

import pathlib
import sys
from collections.abc import Callable

from jax_cp_dispatch.cost import HARDWARE, CommGemmShape
from jax_cp_dispatch.plots import plot_overlap
from jax_cp_dispatch.profiling import COMMUNICATION, COMPUTATION, OverlapProfile, Span

# Two products of an attention layer with 64 query and 2 x 8 key and value heads of 128 in bfloat16,
# over 8192 tokens and 4 ranks: in (queries, keys, values), and out.
P = 4
IN = CommGemmShape("all_gather_matmul", 8192, 8192, 80 * 128 // P, P, 2)
OUT = CommGemmShape("matmul_reduce_scatter", 8192, 64 * 128 // P, 8192, P, 2)
H100 = HARDWARE["h100"]

# The activities of a rank: kind, name, start and end in seconds.
Track = list[tuple[str, str, float, float]]


def draw(folder: pathlib.Path) -> None:
    plot_overlap(overlaps(), folder / "overlap.svg")


def overlaps() -> dict[str, OverlapProfile]:
    """Returns the schedules with times of `cost`; times are equal on all ranks, chunks differ."""
    schedules = {
        "gather, then multiply": gather_then_multiply,
        "ring of an all-gather": gather_in_ring,
        "multiply, then reduce-scatter": multiply_then_scatter,
        "ring of a reduce-scatter": scatter_in_ring,
        "pipeline of 4": scatter_in_pipeline,
    }
    where = f"predicted on {P} H100"
    return {f"{x}, {where}": on_all_ranks(schedule) for x, schedule in schedules.items()}


def on_all_ranks(schedule: Callable[[int], Track]) -> OverlapProfile:
    spans = (
        Span(rank, kind, name, begin, end - begin)
        for rank in range(P)
        for kind, name, begin, end in schedule(rank)
    )
    return OverlapProfile(None, tuple(sorted(spans)))


def multiplying(shape: CommGemmShape, chunks: int = 1) -> float:
    return shape.flops / H100.matmul_flops / chunks


def sending(shape: CommGemmShape, receivers: int) -> float:
    message = shape.sent_bytes / (P - 1)
    return H100.exchange_seconds(message, num_ranks=P, inside=receivers)


def gather_then_multiply(rank: int) -> Track:
    gathered = sending(IN, P - 1)
    end = gathered + multiplying(IN)
    return [(COMMUNICATION, "gather", 0.0, gathered), (COMPUTATION, "GEMM", gathered, end)]


def gather_in_ring(rank: int) -> Track:
    track: Track = []
    arrived = computed = 0.0
    for step in range(P):
        chunk, begin = (rank - step) % P, max(arrived, computed)
        computed = begin + multiplying(IN, P)
        track.append((COMPUTATION, f"GEMM {chunk}", begin, computed))
        if step < P - 1:  # another rank sends its chunk at the same time
            begin, arrived = arrived, arrived + sending(IN, 1)
            track.append((COMMUNICATION, f"send {chunk}", begin, arrived))
    return track


def multiply_then_scatter(rank: int) -> Track:
    computed = multiplying(OUT)
    end = computed + sending(OUT, P - 1)
    return [(COMPUTATION, "GEMM", 0.0, computed), (COMMUNICATION, "reduce-scatter", computed, end)]


def scatter_in_ring(rank: int) -> Track:
    track: Track = []
    computed = sent = 0.0
    for step in range(P):
        block, begin = (rank + step + 1) % P, computed
        computed = begin + multiplying(OUT, P)
        track.append((COMPUTATION, f"GEMM {block}", begin, computed))
        if step < P - 1:
            begin = max(sent, computed)
            sent = begin + sending(OUT, 1)
            track.append((COMMUNICATION, f"send {block}", begin, sent))
    begin = max(sent, computed)
    end = begin + OUT.sent_bytes / H100.link_bandwidth / P
    return [*track, (COMPUTATION, "sum", begin, end)]


def scatter_in_pipeline(rank: int) -> Track:
    track: Track = []
    computed = reduced = 0.0
    for chunk in range(4):
        begin, computed = computed, computed + multiplying(OUT, 4)
        track.append((COMPUTATION, f"GEMM {chunk}", begin, computed))
        begin = max(reduced, computed)
        reduced = begin + sending(OUT, P - 1) / 4
        track.append((COMMUNICATION, f"reduce-scatter {chunk}", begin, reduced))
    return track


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
