"""From packed documents to a balanced plan of attention.

`blocks`: documents on a grid of blocks, and their cost; `balance`: which rank computes which block,
the one decision to replace for another planner; `stages`: the arrays that say so; `plan`: the
public call, its checks and capacities.
"""

from jax_cp_dispatch.planner.plan import AttentionPlan, PlanConfig, plan_attention

__all__ = ["AttentionPlan", "PlanConfig", "plan_attention"]
