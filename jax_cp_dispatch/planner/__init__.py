"""Plans balanced attention of packed documents.

`plan`: the public function. `attention_plan`: its result. `config`: its configuration.
`stack`: plans of several batches as one.
On the host: `request`: what a plan is made of. `documents`: their positions in a batch. `home`:
  what ranks hold of them. `on_host`: the plan, assigned by `csrc/planner`, whose input is
  `native_problem`. `piece_table`: their rows on ranks. `transfers`: what moves, and its metadata.
  `runs`: key ranges. `sizes`: static sizes of these arrays. `sample`: the tail of the needs of a
  sample of batches. `fit`: capacities from it. `fallback`: the plan of a batch that does not fit.
  `planned_pieces`: what ranks compute, read back from a plan. `describe`: a text for people.
Inside `jit`: `capacities`: sizes that are always sufficient. `block_grid`: documents on a grid of
  blocks, and their cost. `balance`: assigns blocks to ranks; replace this part for another planner.
  `stages`: the arrays of the plan. `slots`: metadata.
`segment_ids`: the meaning of segment ids, for all of attention. `fingerprint`: checksums that tie a
  plan to its batch, its rank and the plans of other ranks; `fingerprint_of_pieces`: on the host.
`placement/`: places tokens before the step instead, so that queries do not move.
"""

from jax_cp_dispatch.planner.attention_plan import AttentionPlan
from jax_cp_dispatch.planner.capacities import needs_inside_jit
from jax_cp_dispatch.planner.config import PlanConfig
from jax_cp_dispatch.planner.fit import fit_plan_config
from jax_cp_dispatch.planner.placement import (
    PlacedPlan,
    Placement,
    PlacementConfig,
    fit_placement_config,
    place_tokens,
)
from jax_cp_dispatch.planner.plan import plan_attention
from jax_cp_dispatch.planner.stack import stack_plans

__all__ = [
    "AttentionPlan",
    "PlacedPlan",
    "Placement",
    "PlacementConfig",
    "PlanConfig",
    "fit_placement_config",
    "fit_plan_config",
    "needs_inside_jit",
    "place_tokens",
    "plan_attention",
    "stack_plans",
]
