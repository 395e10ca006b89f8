"""`load_profile`: times the experts of each rank alone, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from jax_cp_dispatch._arguments import check_positive, check_type
from jax_cp_dispatch.experts.describe import rows_of_experts
from jax_cp_dispatch.experts.routing import Routing
from jax_cp_dispatch.profiling import BalanceProfile, time_ranks


def load_profile(
    routing: Routing,
    compute: Callable[..., PyTree[Any]],
    *arrays: PyTree[Any],
    repeats: int = 3,
) -> BalanceProfile:
    """Times the experts of each rank of a routing, one rank after the other, on one device.

    A step over many devices takes as long as its busiest rank. This measures the busiest rank, and
    the balance in seconds, without a mesh: each rank's `group_sizes`, with the same arrays.
    Exchanges are not run. On CPU, seconds are processor time, so other processes do not count.

    Call outside `jit`, with the routing of all ranks.

    Args:
      routing: from `route`.
      compute: what a rank computes: `compute(group_sizes, *arrays)`, compiled once.
      arrays: those of one rank, such as its rows `[capacity, D]` and the matrices of its experts.
      repeats: rounds.
    Returns:
      The profile; its `work` are the rows of each rank.
    Raises:
      TypeError: an argument is invalid, or the values of the routing are traced.
      ValueError: an argument is invalid, or the routing is one rank's part.
    """
    op = "load_profile"
    check_type(op, "routing", routing, Routing, "Pass the result of route.")
    check_positive(op, repeats=repeats)
    rows = rows_of_experts(op, routing)
    sizes = rows.astype("int32")
    compiled, arrays = jax.jit(compute), jax.device_put(arrays)
    run = lambda rank: compiled(sizes[rank], *arrays)
    [seconds] = time_ranks([run], [len(rows)], repeats)
    name = getattr(compute, "__name__", type(compute).__name__)
    return BalanceProfile(name, seconds, tuple(rows.sum(1).tolist()), "rows")
