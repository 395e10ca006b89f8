"""Whether a batch fits its config on the host: static sizes, and refusals before planning."""

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.planner.config import PlanConfig
from jax_cp_dispatch.planner.request import PlanRequest


class DoesNotFitError(ValueError):
    """A batch does not fit its configured sizes or limits; another one may."""


def static_size(
    op: str, config: PlanConfig, name: str, what: str, needs: Int[np.ndarray, " W"], step: int
) -> int:
    """Returns the size in the config if sufficient; else the need, rounded up to share programs.

    Args:
      op: the public function, for error messages.
      config, name: the config, and the field with the size; None: by default.
      what: what a rank would do, with `{}` for its need.
      needs: of each rank.
      step: smallest step of rounding; larger needs are rounded up by at most 1/8.
    Raises:
      DoesNotFitError: the given size is too small.
    """
    need, rank = int(needs.max()), int(needs.argmax())
    given = getattr(config, name)
    if need > np.iinfo(np.int32).max:
        raise ValueError(
            f"{op}: rank {rank} {what.format(need)}, but row numbers have 32 bits. Plan for more "
            "ranks, or fewer tokens at a time."
        )
    if given is None:
        step = max(step, 1 << max(need.bit_length() - 4, 0))
        return max(-(-need // step), 1) * step
    if given < need:
        raise DoesNotFitError(
            f"{op}: rank {rank} {what.format(need)} but {name} is {given}. Pass {name}>={need} or "
            f"None in PlanConfig."
        )
    return given


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
            f"kv_capacity>={keys} or None in PlanConfig."
        )


def check_mean_queries(op: str, config: PlanConfig, num_queries: int, world_size: int) -> None:
    """Rejects a capacity below the mean number of queries.

    Raises:
      DoesNotFitError: names the mean.
    """
    mean = -(-num_queries // world_size)
    if config.q_capacity is not None and config.q_capacity < mean:
        raise DoesNotFitError(
            f"{op}: {num_queries} queries are computed by {world_size} ranks, so a rank receives "
            f"at least {mean} of them, but q_capacity is {config.q_capacity}. Pass q_capacity>="
            f"{mean} or None in PlanConfig."
        )
