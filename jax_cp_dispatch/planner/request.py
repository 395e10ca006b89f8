"""What a plan on the host is made of: checked once, then passed on as a whole."""

from typing import Any, NamedTuple

from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner.seen_keys import SeenKeys, seen_keys
from jax_cp_dispatch.planner.slices import slice_of_rank


class PlanRequest(NamedTuple):
    """A batch, the ranks, and the choices of a plan.

    Attributes:
      documents: of the batch.
      positions: of the batch `[B, T]`; None: they count from 0 in each document.
      world_size: number of ranks W.
      seen: which keys of its document a query sees.
      config: a `PlanConfig` or a `PlacementConfig`.
      rank: the rank whose part is made; None: all.
    """

    documents: DocumentTable
    positions: Ids | None
    world_size: int
    seen: SeenKeys
    config: Any
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
