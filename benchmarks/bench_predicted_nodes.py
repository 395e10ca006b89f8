"""Predicts (does not measure) attention on nodes of 8 H100, H200 and B200, 8 to 4096 ranks.

One layer, forward and backward, 32 query and 8 KV heads of 128 in bfloat16, on `cost.HARDWARE`.
Packed: 64K to 1M tokens per rank, at most 2**30 in total; documents are drawn from published
lengths (tests/data) until all ranks are full. "balanced" and "placed" have the traffic of their
plans, by the kind of link. One document: 64K to 1M tokens in total, divided among the ranks. Writes
the numbers and the picture.
"""

import dataclasses
import json
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any

import common
import packing
from matplotlib.figure import Figure

from jax_cp_dispatch import PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.cost import HARDWARE, Prediction, Traffic, Workload, predict, rows_by_link
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.plots.figure import label_log_axis

MACHINES = ("h100", "h200", "b200")
RANKS = (8, 32, 128, 512, 4096)
TOKENS = (2**16, 2**18, 2**20)
MOST_TOKENS = 2**30  # of all ranks, for packed documents
NODE = 8
LENGTHS = ("wlbllm", "prolong")
MODEL = Workload(1, 1, num_heads=32, num_kv_heads=8, head_size=128, itemsize=2)
SHOWN = ("ring", "zigzag", "hamilton", "hamilton_nodes", "all_gather", "balanced", "placed")


def drawn(name: str, num_ranks: int, num_tokens: int) -> tuple[int, ...]:
    """Draws documents as in docs/placement.md: until the ranks are full; the last one is cut."""
    batches = json.loads((packing.PUBLISHED / f"dist_{name}.json").read_text())
    known = [length for batch in batches for length in batch["lengths"]]
    choose, lengths, total = random.Random(num_ranks), [], 0
    while total < num_tokens:
        lengths.append(min(choose.choice(known), num_tokens - total))
        total += lengths[-1]
    return tuple(lengths)


def packed(all_ranks: list[int], all_tokens: list[int]) -> Iterator[dict[str, Any]]:
    for name in LENGTHS:
        for num_ranks in all_ranks:
            for tokens in all_tokens:
                if num_ranks * tokens > MOST_TOKENS:
                    continue  # millions of documents
                lengths = drawn(name, num_ranks, num_ranks * tokens)
                yield from rows(
                    f"packed, {name}", num_ranks, tokens, moves(lengths, num_ranks), lengths
                )


def one_document(all_ranks: list[int], all_tokens: list[int]) -> Iterator[dict[str, Any]]:
    for num_ranks in all_ranks:
        for num_tokens in all_tokens:
            yield from rows("one document", num_ranks, num_tokens // num_ranks, {})


def rows(
    documents: str,
    num_ranks: int,
    tokens: int,
    moves: dict[str, Any],
    lengths: tuple[int, ...] | None = None,
) -> Iterator[dict[str, Any]]:
    begin = time.perf_counter()
    workload = dataclasses.replace(
        MODEL,
        num_ranks=num_ranks,
        tokens_per_rank=tokens,
        lengths=None if lengths is None else (lengths,),
    )
    for machine in MACHINES:
        predictions = predict(workload, hardware=HARDWARE[machine], with_backward=True, **moves)
        if not moves:
            del predictions["balanced"]  # only an estimate
        yield {
            "hardware": machine,
            "documents": documents,
            "ranks": num_ranks,
            "tokens_per_rank": tokens,
            "algorithms": {name: numbers(x) for name, x in predictions.items()},
        }
    print(f"{documents}, {num_ranks} x {tokens}: {time.perf_counter() - begin:.1f} s", flush=True)


def numbers(prediction: Prediction) -> dict[str, float]:
    values = {
        "ms": 1e3 * prediction.total,
        "compute_ms": 1e3 * prediction.compute,
        "waiting_ms": 1e3 * prediction.exposed_communication,
        "MB_inside_node": (prediction.bytes_per_rank - prediction.bytes_between_nodes) / 1e6,
        "MB_between_nodes": prediction.bytes_between_nodes / 1e6,
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def moves(lengths: tuple[int, ...], num_ranks: int) -> dict[str, Any]:
    """Plans the batch both ways; returns the rows that move, by the kind of link."""
    size = NODE if num_ranks > NODE else None
    config = PlanConfig(
        num_heads=MODEL.num_heads, num_kv_heads=MODEL.num_kv_heads, ranks_per_node=size
    )
    plan = plan_attention(lengths=[lengths], world_size=num_ranks, config=config)
    queries, keys = by_link(plan.q_metadata), by_link(plan.kv_metadata)
    nodes = PlanConfig(ranks_per_node=size)
    placed = place_tokens([lengths], world_size=num_ranks, config=nodes).plan
    return {"moved_tokens": (queries, keys), "placed_tokens": by_link(placed.kv_metadata)}


def by_link(metadata: Metadata) -> Traffic:
    return rows_by_link(metadata.rows_between_ranks(), ranks_per_node=NODE)


def draw_picture(result: list[dict[str, Any]], path: pathlib.Path) -> None:
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    figure.suptitle("Predicted, not measured: one layer of attention, forward and backward")
    cases = (
        ("packed, wlbllm", lambda row: row["tokens_per_rank"] == TOKENS[0], "64K tokens per rank"),
        (
            "one document",
            lambda row: row["tokens_per_rank"] * row["ranks"] == TOKENS[-1],
            "1M tokens in total",
        ),
    )
    grid = figure.subplots(len(cases), len(MACHINES), sharex=True, sharey="row")
    for line, (documents, chosen, size) in zip(grid, cases, strict=True):
        for axes, machine in zip(line, MACHINES, strict=True):
            found = [
                row
                for row in result
                if (row["hardware"], row["documents"]) == (machine, documents) and chosen(row)
            ]
            for algorithm in SHOWN:
                points = [
                    (row["ranks"], row["algorithms"][algorithm]["ms"])
                    for row in found
                    if algorithm in row["algorithms"]
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), marker=".", label=algorithm)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            label_log_axis(axes.yaxis)
            axes.set_title(f"{machine.upper()}: {documents}, {size}")
            axes.set_xticks(RANKS, [str(x) for x in RANKS])
            axes.grid(alpha=0.3)
        line[0].set_ylabel("ms")
        line[0].legend(fontsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("ranks, 8 in a node")
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    arguments = common.options(parser, ranks=[8, 32], tokens=[TOKENS[0]])
    sizes = arguments.ranks, arguments.tokens
    result = [*packed(*sizes), *one_document(*sizes)]
    common.write(
        arguments.output,
        "predicted, not measured: attention on nodes of 8 GPUs, 8 to 4096 ranks",
        result,
        hardware={x: dataclasses.asdict(HARDWARE[x]) for x in MACHINES},
        heads=[MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_size, MODEL.itemsize],
    )
    draw_picture(result, arguments.pictures / "predicted_nodes.png")


if __name__ == "__main__":
    main()
