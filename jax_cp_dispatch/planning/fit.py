"""`fit_plan_config`: capacities for a run, from the tail of what a sample of its batches needs."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jax_cp_dispatch._text import warn_caller
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planning.config import (
    CAPACITIES,
    PLACED_CAPACITIES,
    PlanConfig,
    check_config,
)
from jax_cp_dispatch.planning.on_host import plan_attention
from jax_cp_dispatch.planning.placement import place_tokens

_OP = "fit_plan_config"


class _Needs(NamedTuple):
    """What the plan of a batch needs; `values` and `most` are in the order of the capacities.

    Attributes:
      num_tokens: of a rank.
      values: rows, ranges and pieces.
      most: what no batch of this shape exceeds.
    """

    num_tokens: int
    values: Sequence[int]
    most: Sequence[int]


class _OfEachBatch:
    """A mask, or masks, of each batch: the elements of a list in order, or the same for all."""

    def __init__(self, name: str, values: Any, *, is_list: bool) -> None:
        self._name, self._values, self._is_list = name, values, is_list
        self._num_batches = 0

    def __next__(self) -> Any:
        self._num_batches += 1
        if not self._is_list:
            return self._values
        if self._num_batches > len(self._values):
            self._refuse("more")
        return self._values[self._num_batches - 1]

    def check_number(self) -> None:
        """Requires, after the last batch, that no element is left."""
        if self._is_list and self._num_batches < len(self._values):
            self._refuse(str(self._num_batches))

    def _refuse(self, num_batches: str) -> None:
        raise ValueError(
            f"{_OP}: {self._name} is a list for {len(self._values)} batches, but there are "
            f"{num_batches}. Pass one element for each batch."
        )


def fit_plan_config(
    batches: Iterable[Any],
    *,
    world_size: int,
    placed: bool = False,
    overflow: float = 1e-4,
    columns: int | None = None,
    mask: Mask | str | Sequence[Mask] | None = None,
    masks: Sequence[Mask | str] | Sequence[Sequence[Mask | str]] | None = None,
    layers: Sequence[int] | None = None,
    num_groups: int = 1,
    config: PlanConfig = PlanConfig(),
) -> PlanConfig:
    """Finds capacities for a run from a sample of its batches, for plans made outside `jit`.

    With the result, the plans of all batches have the same shapes, so a training step is compiled
    once. Each capacity is the larger of the sample's maximum and the quantile of an exponential
    tail, fitted to the largest tenth of the sample (at least ten batches). So a batch exceeds any
    of them with a probability of about `overflow`, if batches are drawn like the sample and their
    needs do not have a heavier tail. The sample itself can only show rates of about
    1 / len(batches); pass at least a few hundred batches. `expected_overflow` is the estimate for
    the result. For a batch that does not fit, see `fallback` of `plan_attention` and
    `place_tokens`.

    Call on the host. Takes the time of planning each batch.

    Args:
      batches: for each batch its lengths as for `plan_attention`, or its segment ids. A
        two-dimensional array is segment ids [B, columns], whatever its values are.
      world_size, columns: as for `plan_attention`.
      placed: for `place_tokens` instead of `plan_attention`.
      mask: see `plan_attention`; masks with arrays as a list, one for each batch.
      masks, layers: if placed, as for `place_tokens`; capacities suffice for the plan of each mask.
        Masks with arrays as a list, with the `masks` of each batch.
      num_groups: if placed, as for `place_tokens`; capacities suffice for each group.
      overflow: wanted share of batches that do not fit, between 0 and 1.
      config: other choices of the plans. Capacities that it has are kept.
    Returns:
      The config with all capacities, and `expected_overflow` of those that were found.
    Raises:
      TypeError, ValueError: there is no batch, `overflow` is not between 0 and 1, or as
        `plan_attention` or `place_tokens`.
    """
    check_config(_OP, config)
    if not placed and (masks is not None or layers is not None or num_groups != 1):
        raise ValueError(
            f"{_OP}: got masks, layers or num_groups, which are those of a placement. Pass "
            "placed=True, or omit them."
        )
    is_list = lambda x: isinstance(x, list | tuple)
    of_batches = (
        _OfEachBatch("mask", mask, is_list=is_list(mask)),
        _OfEachBatch("masks", masks, is_list=is_list(masks) and any(map(is_list, masks or ()))),
    )

    def needs(**given: Any) -> _Needs:
        seen = dict(zip(("mask", "masks"), map(next, of_batches), strict=True))
        if placed:
            seen |= {"layers": layers, "num_groups": num_groups}
            return _placement_needs(world_size=world_size, **seen, **given)
        return _plan_needs(world_size=world_size, mask=seen["mask"], **given)

    names = PLACED_CAPACITIES if placed else CAPACITIES
    is_free = [getattr(config, name) is None for name in names]
    free = [name for name, x in zip(names, is_free, strict=True) if x]
    none: dict[str, Any] = dict.fromkeys(free)
    sample = _plan_sample(batches, columns, overflow, needs, dataclasses.replace(config, **none))
    for each in of_batches:
        each.check_number()
    sizes: dict[str, Any] = {}
    rates = []
    values_of = np.array([need.values for need in sample], np.int64).T[is_free]
    most = np.array([need.most for need in sample], np.int64).max(0)[is_free]
    for name, values, enough in zip(free, values_of, most.tolist(), strict=True):
        rate = overflow / len(free)  # so that all together exceed it rarely enough
        step = 1024 if name.endswith("_capacity") else 8
        sizes[name] = min(math.ceil(quantile(values, rate) / step) * step, enough)
        rates.append(tail(values, sizes[name]) if sizes[name] < enough else 0.0)
    sizes["expected_overflow"] = float(sum(rates))
    return dataclasses.replace(config, **sizes)


def _plan_needs(**given: Any) -> _Needs:
    plan = plan_attention(**given)
    own, all_ranks = plan.num_tokens, plan.num_tokens * plan.world_size
    # A rank sends each of its queries once.
    most = all_ranks, all_ranks, own, all_ranks, all_ranks
    return _Needs(own, plan.largest_needs[0].tolist(), [max(x, 1) for x in most])


def _placement_needs(**given: Any) -> _Needs:
    placement = place_tokens(**given)
    needed, plan = placement.needs, placement.plan
    own, all_ranks = plan.num_tokens, plan.num_tokens * plan.world_size
    most = all_ranks, all_ranks, own, own, all_ranks
    values = [getattr(needed, name) for name in PLACED_CAPACITIES]
    return _Needs(own, values, [max(x, 1) for x in most])


def _plan_sample(
    batches: Iterable[Any],
    columns: int | None,
    overflow: float,
    needs: Callable[..., _Needs],
    config: PlanConfig,
) -> list[_Needs]:
    """Returns what each batch needs."""
    shape = getattr(batches, "shape", None)
    if shape is not None and len(shape) < 3:
        raise TypeError(
            f"{_OP}: batches is an array of shape {shape}; it needs to be a list of "
            "batches. Pass [segment_ids] for a single one, or lists of lengths."
        )
    if not 0 < overflow < 1:
        raise ValueError(f"{_OP}: overflow is {overflow}; it needs to be between 0 and 1.")
    seen: list[_Needs] = []
    for number, batch in enumerate(batches):
        is_ids = not isinstance(batch, list | tuple) and np.ndim(batch) == 2
        if is_ids and columns is not None:
            raise TypeError(
                f"{_OP}: batch {number} is an array of shape {np.shape(batch)}, which means "
                "segment ids, but columns goes with lengths. Pass lengths as lists, "
                "batch.tolist(); for segment ids omit columns."
            )
        given = {"segment_ids": batch} if is_ids else {"lengths": batch, "columns": columns}
        seen.append(needs(config=config, **given))
    if not seen:
        raise ValueError(
            f"{_OP}: batches is empty. Pass at least one batch, preferably a few hundred."
        )
    sizes_of_ranks = {need.num_tokens for need in seen}
    if len(sizes_of_ranks) > 1:
        warn_caller(
            f"{_OP}: a rank holds {min(sizes_of_ranks)} to {max(sizes_of_ranks)} tokens, so plans "
            "of these batches differ in shape. Pass batches of one shape; with lengths, columns=."
        )
    return seen


def quantile(values: Int[np.ndarray, " N"], rate: float) -> float:
    """Returns the value that is exceeded with probability `rate`; at least the largest one."""
    threshold, excess, share = _fit(values)
    return max(float(values.max()), threshold + excess * max(0.0, math.log(share / rate)))


def tail(values: Int[np.ndarray, " N"], size: int | float) -> float:
    """Returns the estimated probability of a value above `size`."""
    threshold, excess, share = _fit(values)
    return share * math.exp(-max(0.0, size - threshold) / excess)


def _fit(values: Float[np.ndarray, " N"] | Int[np.ndarray, " N"]) -> tuple[float, float, float]:
    """Fits an exponential tail: threshold, mean excess above it, share of values above it.

    The maximum-likelihood fit of the excesses over a high quantile (peaks over threshold). One
    pseudo-observation of 1/8 of the threshold keeps the tail of a constant sample from vanishing.
    """
    ordered = np.sort(values).astype(float)
    num = min(len(ordered), max(10, len(ordered) // 10))
    threshold = ordered[-num]
    excess = (float((ordered[-num:] - threshold).sum()) + threshold / 8) / (num + 1)
    return threshold, max(excess, 1e-9), num / len(ordered)
