"""The static choices of a placement."""

import dataclasses

from jax_cp_dispatch.planner.constraints import check_domains

# Fields of `PlacementConfig`, in the order of `PlacedPlan.largest_needs`.
CAPACITIES = ("kv_capacity", "max_transfers", "max_pieces", "max_cut_pieces", "max_linked_pieces")


@dataclasses.dataclass(frozen=True)
class PlacementConfig:
    """Static choices of `place_tokens`. None selects the need of a batch, rounded up, or no limit.

    Attributes:
      balance_tolerance: fraction by which the work of a rank may exceed its share, which is the
        mean if all ranks are equally fast. A larger tolerance moves fewer keys.
      kv_capacity: rows of the buffer in which a rank receives keys and values, its own included.
      max_transfers: ranges of keys that one rank may send.
      max_pieces: pieces of documents that one rank may hold.
      max_cut_pieces: pieces of cut documents that one rank may hold.
      max_linked_pieces: pieces on other ranks of the documents of which one rank holds a cut piece.
      block: tokens; documents are cut at multiples of it, counted from their start, where the
        planner finds such cuts.
      rank_speeds: relative speed of each rank. The share of a rank in the work is proportional to
        it; all ranks hold the same number of tokens. None: all are equally fast.
      ranks_per_node: consecutive ranks of one node. Fewer keys between nodes are preferred to fewer
        keys in total. None: no nodes.
      expected_overflow: set by `fit_placement_config`; the estimated share of batches that do
        not fit the capacities that it found.
    """

    balance_tolerance: float = 0.01
    kv_capacity: int | None = None
    max_transfers: int | None = None
    max_pieces: int | None = None
    max_cut_pieces: int | None = None
    max_linked_pieces: int | None = None
    block: int = 1
    rank_speeds: tuple[float, ...] | None = None
    ranks_per_node: int | None = None
    expected_overflow: float | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        check_domains(self, CAPACITIES)
