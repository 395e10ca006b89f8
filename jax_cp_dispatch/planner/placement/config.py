"""The static choices of a placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch._window import Window
from jax_cp_dispatch.planner.constraints import check_domains

# Fields of `PlacementConfig`, in the order of `PlacedPlan.needs`.
CAPACITIES = ("kv_capacity", "max_transfers", "max_pieces")


@dataclasses.dataclass(frozen=True)
class PlacementConfig:
    """Static choices of `place_tokens`. None selects the need of a batch, rounded up, or no limit.

    Attributes:
      balance_tolerance: fraction by which the work of a rank may exceed its share, which is the
        mean if all ranks are equally fast. A larger tolerance moves fewer keys.
      kv_capacity: rows of the buffer in which a rank receives keys and values, its own included.
      max_transfers: ranges of keys that one rank may send.
      max_pieces: pieces of documents that one rank may hold.
      block: tokens; documents are cut at multiples of it, counted from their start, where the
        planner finds such cuts.
      rank_speeds: relative speed of each rank. The share of a rank in the work is proportional to
        it; all ranks hold the same number of tokens. None: all are equally fast.
      ranks_per_node: consecutive ranks of one node. Fewer keys between nodes are preferred to fewer
        keys in total. None: no nodes.
      expected_overflow: set by `from_sample`; the estimated share of batches that do not fit the
        capacities that it found.
    """

    balance_tolerance: float = 0.01
    kv_capacity: int | None = None
    max_transfers: int | None = None
    max_pieces: int | None = None
    block: int = 1
    rank_speeds: tuple[float, ...] | None = None
    ranks_per_node: int | None = None
    expected_overflow: float | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        check_domains(self, CAPACITIES)

    @classmethod
    def from_sample(
        cls,
        batches: Iterable[Any],
        *,
        world_size: int,
        overflow: float = 1e-4,
        columns: int | None = None,
        causal: bool = True,
        window: Window | None = None,
        config: PlacementConfig | None = None,
    ) -> PlacementConfig:
        """Finds capacities for a run from a sample of its batches.

        With the result, the plans of all batches have the same shapes, so a training step is
        compiled once. Each capacity is the larger of the sample's maximum and the quantile of an
        exponential tail, fitted to the largest tenth of the sample (at least ten batches). So a
        batch exceeds any of them with a probability of about `overflow`, if batches are drawn like
        the sample and their needs do not have a heavier tail. The sample itself can only show
        rates of about 1 / len(batches); take at least a few hundred batches. `expected_overflow` is
        the estimate for the result. For a batch that does not fit, see
        `fallback` of `place_tokens`.

        Call on the host. Takes the time of `place_tokens` for each batch.

        Args:
          batches: for each batch its lengths as for `place_tokens`, or its segment ids. A
            two-dimensional array is segment ids [B, columns], whatever its values are.
          world_size, columns, causal, window: as for `place_tokens`.
          overflow: wanted share of batches that do not fit, between 0 and 1.
          config: balance and constraints of the placements. Capacities that it has are kept.
        Returns:
          The config with all capacities, and `expected_overflow` of those that were found.
        Raises:
          TypeError, ValueError: there is no batch, `overflow` is not between 0 and 1, or as
            `place_tokens`.
        """
        from jax_cp_dispatch.planner.placement.place import place_tokens
        from jax_cp_dispatch.planner.sample import Needs, config_of_sample

        def needs(**given: Any) -> Needs:
            mask: Any = {"causal": causal, "window": window}
            placement = place_tokens(world_size=world_size, **mask, **given)
            values = [getattr(placement.needs, name) for name in CAPACITIES]
            own, all_ranks = placement.plan.num_tokens, placement.plan.num_tokens * world_size
            most = all_ranks, all_ranks, own
            return Needs(own, values, [max(x, 1) for x in most])

        op, config = "PlacementConfig.from_sample", config or cls()
        check_type(op, "config", config, cls, "Omit it for the default.")
        return config_of_sample(op, batches, overflow, columns, config, CAPACITIES, needs)
