"""Plans balanced attention of packed documents.

`blocks`: documents on a grid of blocks, and their cost. `balance`: assigns blocks to ranks; replace
  this part for another planner. `stages`: the arrays of the plan. `capacities`: their sizes.
  `plan`: the public function. `stack`: plans of several batches as one. `segment_ids`: the meaning
  of segment ids, for all of attention. `stamp`: checksums that tie a plan to its batch.
  `placement/`: places tokens before the step instead, so that queries do not move.
On the host: `documents`: their positions in a batch. `pieces`: their rows on ranks. `transfers`:
  what moves, and its metadata. `runs`: key ranges. `sizes`: static sizes of these arrays.
"""

from jax_cp_dispatch.planner.capacities import PlanConfig
from jax_cp_dispatch.planner.placement import (
    PlacedPlan,
    Placement,
    PlacementConfig,
    place_tokens,
)
from jax_cp_dispatch.planner.plan import AttentionPlan, plan_attention
from jax_cp_dispatch.planner.stack import stack_plans

__all__ = [
    "AttentionPlan",
    "PlacedPlan",
    "Placement",
    "PlacementConfig",
    "PlanConfig",
    "place_tokens",
    "plan_attention",
    "stack_plans",
]
