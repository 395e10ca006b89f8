"""Constraints that `PlanConfig` and `PlacementConfig` share: their domains, and early refusals."""

import math
from typing import Any

from jax_cp_dispatch._arguments import check_positive, check_rows
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.static_size import DoesNotFitError


def check_domains(config: Any, capacities: tuple[str, ...]) -> None:
    """Checks the values of a new config; `rank_speeds` becomes a tuple of floats."""
    op = type(config).__name__
    if not 0 <= config.balance_tolerance <= 1:
        raise ValueError(
            f"{op}: balance_tolerance is {config.balance_tolerance}; it needs to be in [0, 1]. "
            "Pass 0.01 to allow a rank 1 % more than its share."
        )
    optional = (*capacities, "ranks_per_node", "block")
    values = {name: getattr(config, name) for name in optional}
    values = {name: x for name, x in values.items() if x is not None}
    check_positive(op, **values)
    for name in set(values).intersection(capacities):
        check_rows(op, name, values[name])
    if config.rank_speeds is not None:
        try:
            speeds = tuple(map(float, config.rank_speeds))
        except (TypeError, ValueError, OverflowError):
            speeds = ()
        if not speeds or not all(math.isfinite(x) and x > 0 for x in speeds):
            raise ValueError(
                f"{op}: rank_speeds is {config.rank_speeds!r}; it needs one positive number per "
                "rank, or None for equal speeds."
            )
        object.__setattr__(config, "rank_speeds", speeds)


def check_ranks(op: str, config: Any, world_size: int) -> None:
    """Requires constraints that match the ranks."""
    speeds, size = config.rank_speeds, config.ranks_per_node
    if speeds is not None and len(speeds) != world_size:
        raise ValueError(
            f"{op}: rank_speeds has {len(speeds)} numbers but there are {world_size} ranks. Pass "
            "one number per rank."
        )
    if size is not None and world_size % size:
        raise ValueError(
            f"{op}: {world_size} ranks cannot be divided into nodes of ranks_per_node={size}. Pass "
            "a divisor of world_size."
        )


def check_traced(op: str, config: Any) -> None:
    """Refuses constraints that plans inside `jit` do not keep."""
    defaults = type(config)()
    names = ("rank_speeds", "ranks_per_node")
    given = [name for name in names if getattr(config, name) != getattr(defaults, name)]
    if given:
        raise ValueError(
            f"{op}: plans made inside jit do not support {', '.join(given)} of PlanConfig. Plan "
            "outside jit, for example in the data loader, or use their defaults."
        )


def check_longest_keys(op: str, request: PlanRequest) -> None:
    """Rejects a capacity that is too small for the keys of a single query.

    Raises:
      DoesNotFitError: names the document.
    """
    documents, config, seen = request.documents, request.config, request.seen
    if not len(documents.lengths) or config.kv_capacity is None:
        return
    document, keys = seen.most_keys()
    query = "the last query" if request.mask.is_causal and seen.table is None else "a query"
    if config.kv_capacity < keys:
        raise DoesNotFitError(
            f"{op}: {query} of {documents.name(document)} attends to {keys} keys, so its "
            f"rank receives at least {keys} rows, but kv_capacity is {config.kv_capacity}. Pass "
            f"kv_capacity>={keys} or None in {type(config).__name__}."
        )


def check_mean_queries(op: str, config: Any, num_queries: int, world_size: int) -> None:
    """Rejects a capacity below the mean number of queries.

    Raises:
      DoesNotFitError: names the mean.
    """
    mean = -(-num_queries // world_size)
    if config.q_capacity is not None and config.q_capacity < mean:
        raise DoesNotFitError(
            f"{op}: {num_queries} queries are computed by {world_size} ranks, so a rank receives "
            f"at least {mean} of them, but q_capacity is {config.q_capacity}. Pass q_capacity>="
            f"{mean} or None in {type(config).__name__}."
        )
