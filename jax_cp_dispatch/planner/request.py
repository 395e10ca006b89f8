"""What a plan on the host is made of: checked once, then passed on as a whole, also to C++."""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float32

from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner.config import PlanConfig
from jax_cp_dispatch.planner.piece_table import PieceTable
from jax_cp_dispatch.planner.seen_keys import SeenKeys, seen_keys
from jax_cp_dispatch.planner.slices import slice_of_rank
from jax_cp_dispatch.planner.transfers import sums_of_ranks

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
        return slice_of_rank(self.rank)

    def pairs(self, pieces: PieceTable) -> Float32[np.ndarray, " held"]:
        """Returns the query-key pairs of each rank's pieces."""
        pairs = self.seen.pairs(pieces.document, pieces.start, pieces.end)
        return sums_of_ranks(pieces.rank, pairs, self.world_size)[self.held].astype(np.float32)


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
