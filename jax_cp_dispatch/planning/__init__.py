"""Plans attention of packed documents: which rank computes what, and which keys it receives.

From documents to a plan, in this order:

1. `config`: the static choices, `PlanConfig`. `fit` finds its capacities from a sample of batches.
2. `plan_batch`: `plan_attention`, which moves queries to balance a batch. `place`: `place_tokens`,
   which puts tokens on ranks once, so that queries stay; `groups` are the groups of rows and the
   masks of layers that it serves.
3. On the host, `request` is what a plan is made of, and whether it fits; `seen_keys` is what its
   queries see, and `csrc/planner` assigns pieces of documents to ranks. `piece_table` lays them out
   in rows, `transfers` lists what moves, with its metadata, and `runs` says what rows see.
   `on_host` makes a plan of these, `placed_plan` that of a placement, with its `cuts`. `fallback`
   is the plan of a batch that does not fit.
4. `inside_jit` does the same in `jax.numpy`: `block_grid` cuts documents into blocks,
   `seen_inside` says what they see, `balance` assigns them to ranks (replace this part for another
   planner) within the `key_limit` of the mask, `stages` makes the arrays, and `slots` their
   metadata.
5. `plan`: the result, `Plan`, which `pieces_fingerprint` ties to its batch. `stack` is several
   plans as one, `saved` a pickle. `placement`: the order of tokens that goes with a plan.

What is on the host uses NumPy and C++ only, and does not start JAX.
"""

from jax_cp_dispatch.planning.config import PlanConfig
from jax_cp_dispatch.planning.fit import fit_plan_config
from jax_cp_dispatch.planning.inside_jit import needs_inside_jit
from jax_cp_dispatch.planning.on_host import plan_attention
from jax_cp_dispatch.planning.placement import Placement, place_tokens
from jax_cp_dispatch.planning.plan import Plan, stack_plans

__all__ = [
    "Placement",
    "Plan",
    "PlanConfig",
    "fit_plan_config",
    "needs_inside_jit",
    "place_tokens",
    "plan_attention",
    "stack_plans",
]
