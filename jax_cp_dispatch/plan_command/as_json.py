"""Output of the command as JSON. docs/plan_command.md lists all keys; a test compares them.

The end of a key names its scope and unit. A change of a key's name or meaning needs a new `SCHEMA`.
"""

from collections.abc import Iterable
from typing import Any

from jax_cp_dispatch.plan_command.batch import Batch
from jax_cp_dispatch.plan_command.compare import Comparison, Layout

SCHEMA = 1


def as_json(
    results: Iterable[tuple[Comparison, Batch]], *, understood: str, hardware: str, forward: bool
) -> dict[str, Any]:
    """Returns the numbers of all reports."""
    return {
        "schema": SCHEMA,
        "input": understood,
        "hardware": hardware,
        "predicted_passes": "forward" if forward else "forward and backward",
        "points": [_point(*result) for result in results],
    }


def _point(comparison: Comparison, batch: Batch) -> dict[str, Any]:
    workload, slowest = comparison.workload, comparison.slowest
    lengths = [length for row in workload.rows for length in row]
    return {
        "ranks": workload.num_ranks,
        "nodes": comparison.num_nodes,
        "batch_rows": len(workload.rows),
        "tokens_per_rank": workload.rows_per_rank,
        "tokens_per_rank_and_row": workload.tokens_per_rank,
        "documents": len(lengths),
        "documents_cut": batch.num_cut,
        "documents_left_out": batch.num_left_out,
        "padding_tokens": comparison.num_tokens - sum(lengths),
        "slowest_before_planning": {
            "rank": slowest.rank,
            "work_over_mean": slowest.imbalance,
            "document": batch.name(slowest.batch_row, slowest.document),
            "document_share_of_work": slowest.share,
            "document_tokens": slowest.length,
            "document_tokens_on_rank": slowest.queries,
        },
        "layouts": [_layout(layout) for layout in comparison.layouts],
        "predictions": {name: _prediction(comparison, name) for name in comparison.seconds},
        "choice": comparison.chosen,
        "algorithm": repr(comparison.choice.algorithm),
        "reason": comparison.choice.reason,
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "name": layout.name,
        "algorithm": layout.algorithm,
        "work_max_over_mean": layout.imbalance,
        "slowest_rank": layout.slowest,
        "queries_moved_all_ranks": layout.queries,
        "keys_moved_all_ranks": layout.keys,
        "forward_bytes_inside_nodes_mean_rank": layout.inside.mean,
        "forward_bytes_inside_nodes_busiest_rank": layout.inside.busiest,
        "forward_bytes_between_nodes_mean_rank": layout.between.mean,
        "forward_bytes_between_nodes_busiest_rank": layout.between.busiest,
    }


def _prediction(comparison: Comparison, name: str) -> dict[str, float]:
    prediction = comparison.choice.predictions[name]
    return {
        "seconds": comparison.seconds[name],
        "compute_seconds": prediction.compute,
        "communication_seconds": prediction.communication,
        "waiting_seconds": prediction.exposed_communication,
        "rearrangement_seconds": comparison.rearrangement[name],
        "slowest_over_mean_of_steps": prediction.imbalance,
        "bytes_mean_rank": prediction.bytes_per_rank,
        "bytes_between_nodes_mean_rank": prediction.bytes_between_nodes,
    }
