"""Measures how long layers compile, forward and backward, over 8 virtual devices.

CPU seconds to trace, to lower and to compile a new program of one call, with traced documents, each
the least of interleaved rounds, because other programs only add to them; and of a further call of
the layer in a program, by one of three calls. Beside attention stands that of JAX, beside the delta
rule a scan over tokens.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from attention_programs import AXIS, DENSE, HEAD_SIZE, NUM_HEADS, NUM_RANKS, mesh
from bench_sequence import by_scan, operands as delta_rule_operands
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch import (
    Documents,
    context_parallel_attention,
    place_tokens,
    plan_attention,
    sequence,
)
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.tools.programs import random_operands

NUM_DOCUMENTS = 8
SCAN = "scan over tokens"
ALGORITHMS = "ring", "zigzag", "hamilton", "ulysses", "balanced"


def _program(layer: Callable[..., Any], num_calls: int) -> Callable[..., Any]:
    """Returns the gradients of so many layers; `layer(*operands, segment_ids)`."""

    def loss(operands, ids):
        x, *others = operands
        for _ in range(num_calls):
            x = x + layer(x, *others, ids)
        return jnp.sum(x * x)

    return jax.value_and_grad(loss)


def _attention(ids: np.ndarray) -> dict[str, Callable[..., Any]]:
    attend = partial(context_parallel_attention, mesh=mesh(), axis_name=AXIS)

    def dense(q, k, v, ids):
        same = (ids[0][:, None] == ids[0])[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)

    def traced(algorithm: str) -> Callable[..., Any]:
        return lambda q, k, v, ids: attend(q, k, v, algorithm=algorithm, segment_ids=ids)

    def known(algorithm: str, documents: Documents) -> Callable[..., Any]:
        return lambda q, k, v, _: attend(q, k, v, algorithm=algorithm, documents=documents)

    planned = Documents(ids).with_plan(plan_attention(ids, world_size=NUM_RANKS))
    placed = place_tokens(segment_ids=ids, world_size=NUM_RANKS).documents
    return {
        DENSE: dense,
        **{name: traced(name) for name in ALGORITHMS},
        "balanced, planned on the host": known("balanced", planned),
        "placed": known("placed", placed),
    }


def _recurrences() -> dict[str, Callable[..., Any]]:
    def delta_rule(*operands):
        *tensors, ids = operands
        options = {"mesh": mesh(), "axis_name": AXIS, "segment_ids": ids}
        return sequence.gated_delta_rule(*tensors, **options)

    return {SCAN: lambda *operands: by_scan(*operands[:-1]), "gated_delta_rule": delta_rule}


def seconds_of(program: Callable[..., Any], arrays: Any) -> tuple[float, float, float]:
    """Returns CPU seconds to trace, lower and compile, as in a new process but for JAX itself."""
    jax.clear_caches()
    gc.collect()
    times = [time.process_time()]
    traced = jax.jit(program).trace(*arrays)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    lowered.compile()
    times.append(time.process_time())
    first, second, third = np.diff(times)
    return first, second, third


def _rows(
    layers: dict[str, Callable[..., Any]], arrays: Any, repeats: int, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measures layers; the first is what others are compared with."""
    calls = 1, 3
    times: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for step in range(1 + repeats):  # the first also loads what JAX needs
        for name, layer in layers.items():
            for number in calls:
                seconds = seconds_of(_program(layer, number), arrays)
                if step:
                    times.setdefault((name, number), []).append(seconds)
    rows: list[dict[str, Any]] = []
    for name in layers:
        one, three = (times[name, number] for number in calls)
        trace_s, lower_s, compile_s = map(min, zip(*one, strict=True))
        total_s, total_of_three_s = (sum(map(min, zip(*x, strict=True))) for x in (one, three))
        row = {"layer": name, **settings, "trace_s": trace_s, "lower_s": lower_s}
        row |= {"compile_s": compile_s, "total_s": total_s}
        row["further_s"] = (total_of_three_s - total_s) / 2
        row = {x: round(y, 3) if isinstance(y, float) else y for x, y in row.items()}
        row["of_peer"] = round(total_s / rows[0]["total_s"], 2) if rows else 1.0
        print(*(f"{x}={y}" for x, y in row.items()), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = common.options(parser, tokens=1024)
    start_cpu_devices(NUM_RANKS)
    tokens = arguments.tokens
    ids = np.repeat(np.arange(1, 1 + NUM_DOCUMENTS, dtype=np.int32), tokens // NUM_DOCUMENTS)[None]
    place = lambda x: jax.device_put(jnp.asarray(x), NamedSharding(mesh(), P(None, AXIS)))
    q, k, v, _ = random_operands(tokens, NUM_HEADS, HEAD_SIZE, "float32")
    of_attention = jax.tree.map(place, ([q, k, v], ids))
    of_recurrences = jax.tree.map(place, (list(delta_rule_operands(tokens, 3)), ids))
    settings, repeats = {"tokens": tokens}, arguments.repeats
    rows = _rows(_attention(ids), of_attention, repeats, settings)
    rows += _rows(_recurrences(), of_recurrences, repeats, settings)
    title = f"one layer over {NUM_RANKS} devices, forward and backward, traced documents"
    common.write(arguments.output, title, rows)


if __name__ == "__main__":
    main()
