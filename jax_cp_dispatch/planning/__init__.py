"""Plans attention of packed documents: which rank computes what, and which keys it receives.

From documents to a plan, in this order:

1. `config`: the static choices, `PlanConfig`. `fit` finds its capacities from a sample of batches.
2. `on_host`: `plan_attention`, which moves queries to balance a batch. `placement`: `place_tokens`,
   which puts tokens on ranks once, so that queries stay.
3. On the host, `request` is what a plan is made of: the batch, what its queries see, and pieces of
   documents, which `csrc/planner` assigns to ranks. It lays them out in rows, lists what moves,
   with its metadata, and says whether that fits. `runs` says what rows see, and which documents
   are cut. `on_host` makes a plan of these, also the fallback for a batch that does not fit.
4. `inside_jit` does the same in `jax.numpy`: it makes the arrays of a plan and their metadata.
   `blocks` cuts documents into blocks, says what they see, and assigns them to ranks within the key
   limit of the mask (replace `balance_blocks` for another planner).
5. `plan`: the result, `Plan`; several plans as one; saved plans.

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
