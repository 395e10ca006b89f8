"""Output of the command: tables for people, or JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_cp_dispatch._text import byte_count, count, duration, paragraph, table
from jax_cp_dispatch.plan_command.compare import Comparison


def report(comparison: Comparison, num_left_out: int, hardware_name: str) -> str:
    """Returns the tables of one number of ranks."""
    workload = comparison.workload
    lengths = [length for row in workload.rows for length in row]
    n, tokens = workload.num_ranks, comparison.num_tokens
    nodes = comparison.num_nodes
    head = [
        f"{n} ranks of {count(workload.rows_per_rank)} tokens in {nodes} "
        f"node{'s' if nodes > 1 else ''} ({hardware_name})",
        f"  documents  {count(len(lengths))} of {count(min(lengths))} to {count(max(lengths))} "
        f"tokens in {count(len(workload.rows))} batch row{'s' if len(workload.rows) > 1 else ''}",
        f"  tokens     {count(tokens)}; {count(tokens - sum(lengths))} of them padding",
    ]
    if num_left_out:
        head.append(f"  left out   {count(num_left_out)} documents or parts that exceed the ranks")
    rows = [
        [
            layout.name,
            f"{layout.imbalance:.3f}",
            f"{layout.queries / tokens:.3f}",
            f"{layout.keys / tokens:.3f}",
            byte_count(layout.bytes_inside / n),
            byte_count(layout.bytes_between / n),
        ]
        for layout in comparison.layouts
    ]
    header = ("", "work max/mean", "queries", "keys", "inside nodes", "between nodes")
    caption = (
        "Queries and keys that move, per token; a row that two ranks receive counts twice. Bytes "
        "that a rank sends on average, in one layer, forward; outputs return with the queries."
    )
    predictions = comparison.choice.predictions
    chosen = comparison.chosen
    times = [
        [
            ("* " if name == chosen else "  ") + name,
            duration(comparison.seconds[name]),
            duration(predictions[name].compute),
            duration(predictions[name].communication),
            duration(predictions[name].exposed_communication),
        ]
        for name in sorted(comparison.seconds, key=comparison.seconds.__getitem__)
    ]
    return "\n".join(
        [
            *head,
            "",
            table(header, rows),
            paragraph(caption),
            "",
            table(("  algorithm", "predicted", "compute", "communication", "waiting"), times),
            "",
            paragraph("Choice: " + comparison.choice.reason),
            paragraph(
                "Times of one layer, predicted, not measured. Those of zigzag and hamilton include "
                "the rearrangement of contiguous tokens."
            ),
        ]
    )


def summary(comparisons: Sequence[Comparison]) -> str:
    """Returns one line for each number of ranks."""
    rows = []
    for comparison in comparisons:
        layouts = {layout.name.split(",")[0]: layout for layout in comparison.layouts[::-1]}
        chosen = comparison.chosen
        rows.append(
            [
                str(comparison.workload.num_ranks),
                *(
                    f"{layouts[name].imbalance:.3f}"
                    for name in ("contiguous", "zigzag", "balanced", "placed")
                ),
                f"{layouts['placed'].keys / comparison.num_tokens:.3f}",
                chosen,
                duration(comparison.seconds[chosen]),
            ]
        )
    header = (
        "ranks",
        "contiguous",
        "zigzag",
        "balanced",
        "placed",
        "keys placed",
        "choice",
        "time",
    )
    caption = (
        "Work max/mean of four layouts, keys that move per token if tokens are placed, and the "
        "predicted time of the choice."
    )
    return f"All numbers of ranks\n{table(header, rows)}\n{paragraph(caption)}"


def as_json(comparison: Comparison, num_left_out: int) -> dict[str, Any]:
    """Returns the numbers of `report`; times in seconds, moved rows and bytes of all ranks."""
    workload = comparison.workload
    lengths = [length for row in workload.rows for length in row]
    return {
        "ranks": workload.num_ranks,
        "nodes": comparison.num_nodes,
        "tokens_per_rank": workload.rows_per_rank,
        "batch_rows": len(workload.rows),
        "documents": len(lengths),
        "left_out": num_left_out,
        "padding": comparison.num_tokens - sum(lengths),
        "layouts": [layout._asdict() for layout in comparison.layouts],
        "predictions": {
            name: {
                **dataclasses.asdict(comparison.choice.predictions[name]),
                "total_with_rearrangement": seconds,
            }
            for name, seconds in comparison.seconds.items()
        },
        "choice": comparison.chosen,
        "algorithm": repr(comparison.choice.algorithm),
        "reason": comparison.choice.reason,
    }
