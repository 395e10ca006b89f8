"""What balanced and placed attention of given documents would send: by their plans."""

from __future__ import annotations

from typing import Any

from jax_cp_dispatch.cost import Hardware, Traffic, Workload, rows_by_link
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning import Placement, Plan, PlanConfig, place_tokens, plan_attention


def balanced_plan(workload: Workload, hardware: Hardware) -> Plan:
    """Plans attention for the heads of the workload and the nodes of the hardware."""
    config = PlanConfig(
        num_heads=workload.num_heads,
        num_kv_heads=workload.num_kv_heads,
        ranks_per_node=_ranks_per_node(workload, hardware),
    )
    sizes = _sizes(workload)
    return plan_attention(lengths=workload.rows, mask=workload.mask, config=config, **sizes)


def placement(workload: Workload, hardware: Hardware) -> Placement:
    """Places the tokens of the workload for the nodes of the hardware."""
    config = PlanConfig(ranks_per_node=_ranks_per_node(workload, hardware))
    return place_tokens(workload.rows, **_sizes(workload), mask=workload.mask, config=config)


def traffic_of_plans(
    hardware: Hardware, balanced: Plan | None, placed: Plan | None
) -> dict[str, Any]:
    """Returns `moved_tokens` and `placed_tokens` of `cost.predict`, of the plans that there are."""

    def rows(metadata: Metadata, capacity: int) -> Traffic:
        size = hardware.node_size(metadata.world_size)
        sent = metadata.rows_between_ranks()
        return rows_by_link(sent, ranks_per_node=size, capacity=capacity)

    moves: dict[str, Any] = {}
    if balanced is not None:
        queries = rows(balanced.q_metadata, balanced.q_capacity)
        keys = rows(balanced.kv_metadata, balanced.kv_capacity)
        moves["moved_tokens"] = queries, keys
    if placed is not None:
        moves["placed_tokens"] = rows(placed.kv_metadata, placed.kv_capacity)
    return moves


def _ranks_per_node(workload: Workload, hardware: Hardware) -> int | None:
    size = hardware.node_size(workload.num_ranks)
    return size if size < workload.num_ranks else None


def _sizes(workload: Workload) -> dict[str, Any]:
    n = workload.num_ranks
    return {"world_size": n, "columns": n * workload.tokens_per_rank}
