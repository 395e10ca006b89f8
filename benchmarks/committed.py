"""Results of the benchmarks as rows with which `python -m jax_cp_dispatch bench` compares.

A row is taken if the command measures the same operation at the same size.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from packing import DRAWN

from jax_cp_dispatch.bench_command import (
    attention as attention_section,
    gemm,
    in_processes,
    movement,
    planning,
)
from jax_cp_dispatch.bench_command.compare import Earlier, origin_of
from jax_cp_dispatch.bench_command.sizes import CPU

Result = dict[str, Any]


def rows_of(found: dict[str, Result]) -> list[dict[str, Any]]:
    """Returns the rows of all results that the command also measures."""
    rows = [row for of in ALL if of.__name__ in found for row in of(found[of.__name__])]
    return [row._asdict() for row in rows if row.what in _WHAT and row.size in _SIZES]


def planner(result: Result) -> Iterator[Earlier]:
    for row in result["rows"]:
        if row["lengths"] == DRAWN and row["num_kv_heads"] == planning.HEADS.num_kv_heads:
            what = planning.what_text("plan_attention", row["world_size"])
            size = planning.size_text(row["tokens_per_rank"])
            place = planning.SECTION, what, size
            yield Earlier(*place, row["plan_ms"] / 1e3, None, None, origin_of(result))


def dispatch(result: Result) -> Iterator[Earlier]:
    parts = re.search(r"([0-9]+ MB) over ([0-9]+ devices)", result["title"])
    by_xla = [x["ms"] for x in result["rows"] if x["what"] in _COLLECTIVES]
    for row in result["rows"]:
        if parts and by_xla and row["what"] in _MOVED:
            place = "movement", row["what"], ", ".join(parts.groups())
            ratios = row["of_memcpy"], min(by_xla) / row["ms"]
            yield Earlier(*place, row["ms"] / 1e3, *ratios, origin_of(result))


_COLLECTIVES = (movement.ALL_TO_ALL, movement.ALL_GATHER)
_MOVED = (movement.DONATED, movement.FRESH, movement.COMBINE, *_COLLECTIVES)


def latency(result: Result) -> Iterator[Earlier]:
    by_xla = {row["devices"]: row["loop_us"] for row in result["rows"] if row["what"] == "ppermute"}
    for row in result["rows"]:
        if row["what"] == "dispatch" and row["devices"] in by_xla:
            size = movement.small_size_text(f"{row['devices']} devices")
            speedup = by_xla[row["devices"]] / row["loop_us"]
            place = "movement", movement.SMALL_DISPATCH, size
            yield Earlier(*place, row["loop_us"] / 1e6, None, speedup, origin_of(result))


def attention(result: Result) -> Iterator[Earlier]:
    rows = [row for row in result["rows"] if row["case"] == "causal" and "ms" in row]
    dense = {row["dtype"]: row["ms"] for row in rows if row["method"] == attention_section.DENSE}
    devices = re.search(r"[0-9]+ devices", result["title"])
    for row in rows:
        if devices and row["dtype"] in dense:
            size = attention_section.size_text(row["tokens"], row["dtype"], devices[0])
            place = (
                attention_section.SECTION,
                attention_section.what_text(row["method"], row["case"]),
                size,
            )
            ratios = row["of_matmul"], dense[row["dtype"]] / row["ms"]
            yield Earlier(*place, row["ms"] / 1e3, *ratios, origin_of(result))


def comm_gemm(result: Result) -> Iterator[Earlier]:
    for row in result["rows"]:
        sizes = row["M"], row["K"], row["N"], row["dtype"]
        size = gemm.size_text(*sizes, f"{row['devices']} devices")
        name = gemm.XLA if row["what"] == "xla" else row["what"]
        place = gemm.SECTION, gemm.what_text(row["op"], name), size
        ratios = row["gemm_ms"] / row["ms"], row["of_xla"]
        yield Earlier(*place, row["ms"] / 1e3, *ratios, origin_of(result))


def processes(result: Result) -> Iterator[Earlier]:
    for row in result["rows"]:
        what = row["what"].removeprefix("gloo: ")
        what = movement.COMBINE if what == "combine" else what
        size = movement.size_text(row["MB"] << 20, f"{row['processes']} processes")
        ratios = row["of_memcpy"], row["times_gloo"]
        place = in_processes.SECTION, what, size
        yield Earlier(*place, row["ms"] / 1e3, *ratios, origin_of(result))


_ATTENTION = (*attention_section.CAUSAL, attention_section.DENSE)
_DEVICES = "8 devices"
# What the command measures by default on CPU devices.
_WHAT = {
    *(planning.what_text("plan_attention", ranks) for ranks in CPU.planning_ranks),
    *(*_MOVED, movement.SMALL_DISPATCH),
    *(attention_section.what_text(name, "causal") for name in _ATTENTION),
    *(
        gemm.what_text(op, name)
        for op, names in gemm.METHODS.items()
        for name in (*names, gemm.XLA)
    ),
}
_SIZES = {
    planning.size_text(CPU.planning_tokens),
    movement.size_text(8 * CPU.moved_tokens * math.prod(CPU.feature) * 2, _DEVICES),
    movement.small_size_text(_DEVICES),
    attention_section.size_text(CPU.attention_tokens, CPU.dtype, _DEVICES),
    *(gemm.size_text(m, k, n, CPU.dtype, _DEVICES) for _, m, k, n in CPU.gemms),
    movement.size_text(CPU.process_bytes, "2 processes"),
}

ALL: tuple[Callable[[Result], Iterator[Earlier]], ...] = (
    *(planner, dispatch, latency, attention, comm_gemm, processes),
)  # named after their result files
