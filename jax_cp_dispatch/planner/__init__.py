"""From packed documents to a balanced plan of attention.

`blocks`: documents on a grid of blocks, and their cost; `balance`: which rank computes which block,
the one decision to replace for another planner; `stages`: the arrays that say so; `capacities`: how
large they may be; `plan`: the public call; `segment_ids`: what ids mean, for all of attention;
`stamp`: the checksums by which a plan knows its batch. `placement/`: tokens placed before the step
instead, so that queries stay where they are.
"""

from jax_cp_dispatch.planner.capacities import PlanConfig
from jax_cp_dispatch.planner.placement import (
    PlacedPlan,
    Placement,
    PlacementConfig,
    place_tokens,
)
from jax_cp_dispatch.planner.plan import AttentionPlan, plan_attention

__all__ = [
    "AttentionPlan",
    "PlacedPlan",
    "Placement",
    "PlacementConfig",
    "PlanConfig",
    "place_tokens",
    "plan_attention",
]
