"""`fit_placement_config`: capacities of placements for a run, from a sample of its batches."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner.placement.config import CAPACITIES, PlacementConfig
from jax_cp_dispatch.planner.placement.place import place_tokens
from jax_cp_dispatch.planner.sample import Needs, OfEachBatch, SampledPlanner, config_of_sample

_OP = "fit_placement_config"


def fit_placement_config(
    batches: Iterable[Any],
    *,
    world_size: int,
    overflow: float = 1e-4,
    columns: int | None = None,
    mask: Mask | str | Sequence[Mask] | None = None,
    masks: Sequence[Mask | str] | Sequence[Sequence[Mask | str]] | None = None,
    layers: Sequence[int] | None = None,
    config: PlacementConfig = PlacementConfig(),
    num_groups: int = 1,
) -> PlacementConfig:
    """Finds capacities for a run from a sample of its batches.

    With the result, the plans of all batches have the same shapes, so a training step is compiled
    once. `fit_plan_config` describes the method. `expected_overflow` is the estimated share of
    batches that do not fit. For a batch that does not fit, see `fallback` of `place_tokens`.

    Call on the host. Takes the time of `place_tokens` for each batch.

    Args:
      batches: for each batch its lengths as for `place_tokens`, or its segment ids. A
        two-dimensional array is segment ids [B, columns], whatever its values are.
      world_size, columns, layers: as for `place_tokens`.
      mask, masks: as for `place_tokens`; capacities suffice for the plan of each mask. Masks with
        arrays as a list, with the `mask` or the `masks` of each batch.
      overflow: wanted share of batches that do not fit, between 0 and 1.
      config: balance and constraints of the placements. Capacities that it has are kept.
      num_groups: as for `place_tokens`; capacities suffice for each group.
    Returns:
      The config with all capacities, and `expected_overflow` of those that were found.
    Raises:
      TypeError, ValueError: there is no batch, `overflow` is not between 0 and 1, or as
        `place_tokens`.
    """
    check_type(_OP, "config", config, PlacementConfig, "Omit it for the default.")

    seen: dict[str, Any] = {"layers": layers, "num_groups": num_groups}
    is_list = lambda x: isinstance(x, list | tuple)
    of_batches = (
        OfEachBatch(_OP, "mask", mask, is_list=is_list(mask)),
        OfEachBatch(_OP, "masks", masks, is_list=is_list(masks) and any(map(is_list, masks or ()))),
    )

    def needs(**given: Any) -> Needs:
        options = {**dict(zip(("mask", "masks"), map(next, of_batches), strict=True)), **seen}
        placement = place_tokens(world_size=world_size, **options, **given)
        needed = placement.needs
        values = [getattr(needed, name) for name in CAPACITIES]
        own, all_ranks = placement.plan.num_tokens, placement.plan.num_tokens * world_size
        most = all_ranks, all_ranks, own, own, all_ranks
        return Needs(own, values, [max(x, 1) for x in most])

    planner = SampledPlanner(_OP, CAPACITIES, needs)
    found = config_of_sample(planner, batches, config, overflow=overflow, columns=columns)
    for each in of_batches:
        each.check_number()
    return found
