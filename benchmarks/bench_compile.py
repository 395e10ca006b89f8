"""Measures how long attention compiles, forward and backward, over 8 virtual devices.

Documents are traced. For each method: seconds to trace, to lower and to compile a new program, each
the median of interleaved rounds. Balanced attention plans inside the program, or follows a plan of
the host.
"""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from attention_programs import AXIS, DENSE, HEAD_SIZE, NUM_HEADS, NUM_RANKS, mesh
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch import Documents, context_parallel_attention, plan_attention
from jax_cp_dispatch.bench_command.attention import gradients, random_operands
from jax_cp_dispatch.cpu_devices import start_cpu_devices

NUM_DOCUMENTS = 8


def _ours(algorithm: str, plan: Any = None) -> Callable[..., Any]:
    options: dict[str, Any] = {"mesh": mesh(), "axis_name": AXIS, "algorithm": algorithm}

    def attend(q, k, v, cotangent, segment_ids, plan):
        documents = {"segment_ids": segment_ids}
        if plan is not None:
            documents = {"documents": Documents(segment_ids).with_plan(plan)}
        attend = partial(context_parallel_attention, **options, **documents)
        return gradients(attend)(q, k, v, cotangent)

    return lambda *arrays: jax.jit(partial(attend, plan=plan)).trace(*arrays)


def _dense() -> Callable[..., Any]:
    def attend(q, k, v, cotangent, segment_ids):
        same = (segment_ids[0][:, None] == segment_ids[0])[None, None]
        attend = partial(jax.nn.dot_product_attention, mask=same, is_causal=True)
        return gradients(attend)(q, k, v, cotangent)

    return lambda *arrays: jax.jit(attend).trace(*arrays)


def seconds_of(trace: Callable[..., Any], arrays: list[jax.Array]) -> tuple[float, float, float]:
    """Returns the seconds to trace, lower and compile, as in a new process but for JAX itself."""
    jax.clear_caches()
    gc.collect()
    times = [time.perf_counter()]
    traced = trace(*arrays)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    first, second, third = np.diff(times)
    return first, second, third


def main() -> None:
    parser = common.parser(__doc__, repeats=7)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = common.options(parser, tokens=1024)
    start_cpu_devices(NUM_RANKS)
    tokens = arguments.tokens
    ids = np.repeat(np.arange(1, 1 + NUM_DOCUMENTS, dtype=np.int32), tokens // NUM_DOCUMENTS)[None]
    sharding = NamedSharding(mesh(), P(None, AXIS))
    arrays = random_operands(tokens, NUM_HEADS, HEAD_SIZE, "float32")
    arrays = [jax.device_put(jnp.asarray(x), sharding) for x in (*arrays, ids)]
    programs = {
        "ring": _ours("ring"),
        "balanced, planned inside": _ours("balanced"),
        "balanced, planned on the host": _ours(
            "balanced", plan_attention(ids, world_size=NUM_RANKS)
        ),
        DENSE: _dense(),
    }
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in programs}
    for step in range(1 + arguments.repeats):  # the first also loads what JAX needs
        for name, trace in programs.items():
            seconds = seconds_of(trace, arrays)
            if step:
                times[name].append(seconds)
    rows = []
    for name, measured in times.items():
        trace_s, lower_s, compile_s = map(statistics.median, zip(*measured, strict=True))
        total_s = statistics.median(map(sum, measured))
        row = {"method": name, "tokens": tokens, "trace_s": trace_s, "lower_s": lower_s}
        row |= {"compile_s": compile_s, "total_s": total_s}
        row = {x: round(y, 3) if isinstance(y, float) else y for x, y in row.items()}
        row["of_ring"] = round(total_s / rows[0]["total_s"], 2) if rows else 1.0
        print(*(f"{x}={y}" for x, y in row.items()), flush=True)
        rows.append(row)
    title = f"attention over {NUM_RANKS} devices, forward and backward, traced documents"
    common.write(arguments.output, title, rows)


if __name__ == "__main__":
    main()
