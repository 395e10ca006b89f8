"""What a plan on the host is made of, as a whole, also for C++; and whether it fits its config."""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float32, Int

from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planning.config import PlanConfig
from jax_cp_dispatch.planning.piece_table import PieceTable
from jax_cp_dispatch.planning.seen_keys import SeenKeys, seen_keys
from jax_cp_dispatch.planning.transfers import rank_slice, rank_sums

Problem = TypeVar("Problem")


class PlanRequest(NamedTuple):
    """A batch, the ranks, and the choices of a plan.

    Attributes:
      documents: of the batch.
      positions: of the batch `[B, T]`; None: they count from 0 in each document.
      world_size: number of ranks W.
      seen: which keys of its document a query sees.
      config: the choices of the plan.
      rank: the rank whose part is made; None: all.
    """

    documents: DocumentTable
    positions: Ids | None
    world_size: int
    seen: SeenKeys
    config: PlanConfig
    rank: int | None

    @property
    def mask(self) -> Mask:
        return self.seen.mask

    @property
    def needs_lengths(self) -> bool:
        """Whether the keys of a query depend on the length of its document."""
        return self.seen.table is None and not self.mask.is_causal

    def with_mask(self, mask: Mask) -> "PlanRequest":
        """Returns the request of a plan for another mask."""
        return self._replace(seen=seen_keys(mask, self.documents))

    @property
    def num_tokens(self) -> int:
        """Rows of one rank."""
        return self.documents.num_tokens // self.world_size

    @property
    def held(self) -> slice:
        """The ranks whose parts are made, of arrays of all ranks."""
        return rank_slice(self.rank)

    def pairs(self, pieces: PieceTable) -> Float32[np.ndarray, " held"]:
        """Returns the query-key pairs of each rank's pieces."""
        pairs = self.seen.pairs(pieces.document, pieces.start, pieces.end)
        return rank_sums(pieces.rank, pairs, self.world_size)[self.held].astype(np.float32)


def native_problem(kind: type[Problem], request: PlanRequest, limits: dict[str, Any]) -> Problem:
    """Returns a problem of `csrc/planner`, with the fields that both have.

    Args:
      kind: `PlacementProblem` or `QueryProblem`.
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


class DoesNotFitError(ValueError):
    """A batch does not fit its configured sizes or limits; another one may."""


def static_size(
    op: str,
    config: PlanConfig,
    name: str,
    what: str,
    needs: Int[np.ndarray, " W"],
    step: int,
    most: int | None = None,
) -> int:
    """Returns the size in the config if sufficient; else the need, rounded up to share programs.

    Args:
      op: the public function, for error messages.
      config, name: the config, and the field with the size; None: by default.
      what: what a rank would do, with `{}` for its need.
      needs: of each rank.
      step: smallest step of rounding; larger needs are rounded up by at most 1/8.
      most: that any batch of this shape needs; None: not known.
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
        size = max(-(-need // step), 1) * step
        return size if most is None else min(size, max(most, 1))
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
