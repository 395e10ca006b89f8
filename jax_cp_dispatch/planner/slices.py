"""The part of a plan that one rank needs: all arrays with a leading axis of size 1."""

from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch._arguments import check_integer

Plan = TypeVar("Plan")


def check_rank(op: str, rank: int | None, world_size: int) -> None:
    if rank is None:
        return
    check_integer(op, "rank", rank)
    if not 0 <= rank < world_size:
        raise ValueError(f"{op}: rank is {rank}; it needs to be in [0, {world_size}), or None.")


def check_all_ranks(op: str, held: int, world_size: int) -> None:
    """Requires what depends on all ranks."""
    if held != world_size:
        raise ValueError(
            f"{op}: this is the part of {held} of {world_size} ranks. Call it on the plan or "
            "placement of all ranks."
        )


def slice_plan(op: str, plan: Plan, rank: int) -> Plan:
    """Returns the part of one rank of the plan of all ranks; for `slice_of`."""
    whole: Any = plan
    held, world_size = np.shape(whole.fingerprint)[0], whole.world_size
    check_integer(op, "rank", rank)
    if not 0 <= rank < world_size or held != world_size:
        raise ValueError(
            f"{op}: got rank {rank} with {held} of {world_size} ranks. Call it on the plan of all "
            f"ranks, with a rank in [0, {world_size})."
        )
    return jax.tree.map(lambda x: x[rank : rank + 1], plan)


def slice_of_rank(rank: int | None) -> slice:
    """Returns the slice of a leading axis over ranks that keeps one rank, or all."""
    return slice(None) if rank is None else slice(rank, rank + 1)


def order_by_rank(ranks: Int[np.ndarray, " N"], rank: int | None) -> Int[np.ndarray, " M"]:
    """Returns the indices of the entries of one rank, or of all, one rank after another."""
    return np.argsort(ranks, kind="stable") if rank is None else np.flatnonzero(ranks == rank)
