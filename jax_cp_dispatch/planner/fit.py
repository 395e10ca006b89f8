"""`fit_plan_config`: capacities of plans for a run, from a sample of its batches."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner.config import CAPACITIES, PlanConfig, check_config
from jax_cp_dispatch.planner.plan import plan_attention
from jax_cp_dispatch.planner.sample import Needs, OfEachBatch, SampledPlanner, config_of_sample

_OP = "fit_plan_config"


def fit_plan_config(
    batches: Iterable[Any],
    *,
    world_size: int,
    overflow: float = 1e-4,
    columns: int | None = None,
    mask: Mask | str | Sequence[Mask] | None = None,
    config: PlanConfig = PlanConfig(),
) -> PlanConfig:
    """Finds capacities for a run from a sample of its batches, for plans made outside `jit`.

    With the result, the plans of all batches have the same shapes, so a training step is compiled
    once. Each capacity is the larger of the sample's maximum and the quantile of an exponential
    tail, fitted to the largest tenth of the sample (at least ten batches). So a batch exceeds any
    of them with a probability of about `overflow`, if batches are drawn like the sample and their
    needs do not have a heavier tail. The sample itself can only show rates of about
    1 / len(batches); pass at least a few hundred batches. `expected_overflow` is the estimate for
    the result. For a batch that does not fit, see `fallback` of `plan_attention`.

    Call on the host. Takes the time of `plan_attention` for each batch.

    Args:
      batches: for each batch its lengths as for `plan_attention`, or its segment ids. A
        two-dimensional array is segment ids [B, columns], whatever its values are.
      world_size, columns: as for `plan_attention`.
      mask: see `plan_attention`; masks with arrays as a list, one for each batch.
      overflow: wanted share of batches that do not fit, between 0 and 1.
      config: other choices of the plans, such as the numbers of heads. Capacities that it has are
        kept.
    Returns:
      The config with all capacities, and `expected_overflow` of those that were found.
    Raises:
      TypeError, ValueError: there is no batch, `overflow` is not between 0 and 1, or as
        `plan_attention`.
    """
    check_config(_OP, config)

    masks = OfEachBatch(_OP, "mask", mask, is_list=isinstance(mask, list | tuple))

    def needs(**given: Any) -> Needs:
        plan = plan_attention(world_size=world_size, mask=next(masks), **given)
        own, all_ranks = plan.num_tokens, plan.num_tokens * world_size
        # A rank sends each of its queries once.
        most = all_ranks, all_ranks, own, all_ranks, all_ranks
        return Needs(own, plan.largest_needs[0].tolist(), [max(x, 1) for x in most])

    planner = SampledPlanner(_OP, CAPACITIES, needs)
    found = config_of_sample(planner, batches, config, overflow=overflow, columns=columns)
    masks.check_number()
    return found
