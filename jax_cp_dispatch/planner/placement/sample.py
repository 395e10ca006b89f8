"""Finds capacities from a sample of batches: the tail of what placements need, extrapolated."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.place import place_tokens

_OP = "PlacementConfig.from_sample"
_CAPACITIES = {"kv_capacity": 1024, "max_transfers": 8, "max_pieces": 8}  # and their steps


def config_of_sample(
    batches: Iterable[Any], overflow: float, config: PlacementConfig, **options: Any
) -> PlacementConfig:
    """See `PlacementConfig.from_sample`."""
    if not 0 < overflow < 1:
        raise ValueError(f"{_OP}: overflow is {overflow} but must be between 0 and 1.")
    free = [name for name in _CAPACITIES if getattr(config, name) is None]
    none: dict[str, Any] = dict.fromkeys(free)
    open_config = dataclasses.replace(config, **none)
    needs = []
    for batch in batches:
        is_ids = not isinstance(batch, list | tuple) and np.ndim(batch) == 2
        given: dict[str, Any] = {"segment_ids" if is_ids else "lengths": batch}
        if is_ids:
            given["columns"] = None
        need = place_tokens(config=open_config, **(options | given)).needs
        needs.append([getattr(need, name) for name in free])
    if not needs:
        raise ValueError(f"{_OP}: there are no batches. Pass at least one, better a few hundred.")
    columns = np.array(needs, np.int64).reshape(len(needs), len(free)).T
    sizes: dict[str, Any] = {}
    rates = []
    for name, values in zip(free, columns, strict=True):
        rate = overflow / len(free)  # so that all together exceed it rarely enough
        size, step = quantile(values, rate), _CAPACITIES[name]
        sizes[name] = math.ceil(size / step) * step
        rates.append(tail(values, sizes[name]))
    return dataclasses.replace(config, **sizes, expected_overflow=float(sum(rates)))


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
