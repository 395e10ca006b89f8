"""The problems of `csrc/planner`, from what a plan on the host is made of."""

from typing import Any, TypeVar

import numpy as np

from jax_cp_dispatch.planner.request import PlanRequest

Problem = TypeVar("Problem")


def native_problem(kind: type[Problem], request: PlanRequest, limits: dict[str, Any]) -> Problem:
    """Returns a `PlacementProblem` or a `QueryProblem`, with the fields that both have.

    Args:
      kind: the class.
      request: what the plan is made of.
      limits: fields that are set unless they are None.
    """
    config = request.config
    speeds = np.array(config.rank_speeds or [1.0] * request.world_size)
    fields = {
        "lengths": request.documents.lengths.tolist(),
        "num_ranks": request.world_size,
        "tolerance_ppm": round(1e6 * config.balance_tolerance),
        # Integers; the fastest rank has 10**6.
        "speeds": np.maximum(np.round(1e6 * speeds / speeds.max()), 1).astype(int).tolist(),
        "ranks_per_node": config.ranks_per_node or 1,
        "block": config.block or 1,
    }
    problem = kind()
    for name, value in (fields | limits).items():
        if value is not None:
            setattr(problem, name, value)
    request.seen.describe_to(problem, request.documents.num_tokens)
    return problem
