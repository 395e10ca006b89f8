"""`fit_plan_config`: capacities for a run, from the tail of what a sample of its batches needs."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch._text import warn_caller
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planning.config import (
    CAPACITIES,
    PLACED_CAPACITIES,
    PlanConfig,
)
from jax_cp_dispatch.planning.on_host import plan_attention
from jax_cp_dispatch.planning.placement import place_tokens

_OP = "fit_plan_config"


def fit_plan_config(
    batches: Iterable[Any],
    *,
    world_size: int,
    placed: bool = False,
    overflow: float = 1e-4,
    columns: int | None = None,
    mask: Mask | str | Sequence[Mask] | None = None,
    masks: Sequence[Mask | str] | Sequence[Sequence[Mask | str]] | None = None,
    layers: Sequence[int | float | np.number] | None = None,
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
      masks, layers: as for `place_tokens` or `plan_attention`; capacities suffice for all plans.
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
    check_type(_OP, "config", config, PlanConfig, "Omit it for the default.")
    if not placed and num_groups != 1:
        raise ValueError(
            f"{_OP}: got num_groups, which are those of a placement. Pass placed=True, or omit it."
        )
    names: Any = CAPACITIES
    plan_of: Any = plan_attention
    fixed: dict[str, Any] = {"world_size": world_size, "layers": layers}
    if placed:
        names, plan_of = PLACED_CAPACITIES, place_tokens
        fixed["num_groups"] = num_groups
    free = [name for name in names if getattr(config, name) is None]
    none: dict[str, Any] = dict.fromkeys(free)
    fixed["config"] = dataclasses.replace(config, **none)
    is_list = lambda x: isinstance(x, list | tuple)
    of_batches: Any = (("mask", mask), ("masks", masks))
    has_own = {"mask": is_list(mask), "masks": is_list(masks) and any(map(is_list, masks or ()))}
    if not 0 < overflow < 1:
        raise ValueError(f"{_OP}: overflow is {overflow}; it needs to be between 0 and 1.")
    needs, sizes_of_ranks = [], []
    for number, given in enumerate(_read_batches(batches, columns)):
        for name, values in of_batches:
            if has_own[name] and number >= len(values):
                _refuse_masks(name, values, "more")
            given[name] = values[number] if has_own[name] else values
        made = plan_of(**given, **fixed)
        plans = made.plans if placed else (made,)
        needs.append(np.concatenate([np.reshape(x.largest_needs, (-1, 5)) for x in plans]).max(0))
        sizes_of_ranks.append(plans[0].num_tokens)
    for name, values in of_batches:
        if has_own[name] and len(needs) < len(values):
            _refuse_masks(name, values, str(len(needs)))
    if not needs:
        raise ValueError(
            f"{_OP}: batches is empty. Pass at least one batch, preferably a few hundred."
        )
    own = max(sizes_of_ranks)
    if min(sizes_of_ranks) < own:
        warn_caller(
            f"{_OP}: a rank holds {min(sizes_of_ranks)} to {own} tokens, so plans of these batches "
            "differ in shape. Pass batches of one shape; with lengths, columns=."
        )
    # No batch of this shape exceeds the tokens of all ranks. Of its own, a rank sends each query
    # once; in a placement, its pieces have them.
    of_rank = ("max_pieces", "max_cut_pieces") if placed else ("max_q_transfers",)
    sizes: dict[str, Any] = {}
    rates = []
    for name, values in zip(names, np.array(needs, np.int64).T, strict=True):
        if name not in free:
            continue
        enough = max(own if name in of_rank else own * world_size, 1)
        rate = overflow / len(free)  # so that all together exceed it rarely enough
        step = 1024 if name.endswith("_capacity") else 8
        sizes[name] = min(math.ceil(quantile(values, rate) / step) * step, enough)
        rates.append(tail(values, sizes[name]) if sizes[name] < enough else 0.0)
    sizes["expected_overflow"] = float(sum(rates))
    return dataclasses.replace(config, **sizes)


def _read_batches(batches: Iterable[Any], columns: int | None) -> Iterator[dict[str, Any]]:
    """Yields the documents of each batch, by the names of arguments."""
    shape = getattr(batches, "shape", None)
    if shape is not None and len(shape) < 3:
        raise TypeError(
            f"{_OP}: batches is an array of shape {shape}; it needs to be a list of "
            "batches. Pass [segment_ids] for a single one, or lists of lengths."
        )
    for number, batch in enumerate(batches):
        if isinstance(batch, list | tuple) or np.ndim(batch) != 2:
            yield {"lengths": batch, "columns": columns}
            continue
        if columns is not None:
            raise TypeError(
                f"{_OP}: batch {number} is an array of shape {np.shape(batch)}, which means "
                "segment ids, but columns goes with lengths. Pass lengths as lists, "
                "batch.tolist(); for segment ids omit columns."
            )
        yield {"segment_ids": batch}


def _refuse_masks(name: str, values: Sequence[Any], num_batches: str) -> None:
    raise ValueError(
        f"{_OP}: {name} is a list for {len(values)} batches, but there are {num_batches}. Pass one "
        "element for each batch."
    )


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
