"""Planning: time of a plan on the host, and what it does to the balance of work."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from jax_cp_dispatch.bench_command.packed_lengths import drawn_lengths
from jax_cp_dispatch.bench_command.ranks import Row
from jax_cp_dispatch.planner import PlanConfig, place_tokens, plan_attention

SECTION = "planning"
HEADS = PlanConfig(num_heads=32, num_kv_heads=8)


def measure(all_ranks: tuple[int, ...], tokens: int, repeats: int) -> Iterator[Row]:
    """Plans log-normal documents. Times are processor times of the thread that plans."""
    for num_ranks in all_ranks:
        lengths = drawn_lengths(num_ranks * tokens, seed=num_ranks)
        columns = num_ranks * tokens
        plan, seconds = timed(
            lambda n=num_ranks, x=lengths: plan_attention(lengths=x, world_size=n, config=HEADS),
            repeats,
        )
        before, after = float(plan.imbalance_before), float(plan.imbalance)
        balance = {"work before": before, "work after": after}
        name, size = f"plan_attention, {num_ranks} ranks", f"{tokens} tokens per rank"
        yield Row(SECTION, name, size, seconds, more=balance)
        placement, seconds = timed(
            lambda n=num_ranks, x=lengths, t=columns: place_tokens(x, world_size=n, columns=t),
            repeats,
        )
        balance = {"work before": before, "work after": float(placement.plan.imbalance)}
        yield Row(SECTION, f"place_tokens, {num_ranks} ranks", size, seconds, more=balance)


def timed(run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Returns the result, and the median of the processor seconds of this thread."""
    result, times = run(), []
    for _ in range(repeats):
        start = time.thread_time()
        result = run()
        times.append(time.thread_time() - start)
    return result, statistics.median(times)
