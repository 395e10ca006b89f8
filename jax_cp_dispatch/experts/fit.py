"""`fit_capacity`: rows for the experts of a rank, from a sample of routings."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Integer

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch.planning.fit import quantile

_OP = "fit_capacity"
_STEP = 128


def fit_capacity(
    samples: Iterable[Integer[np.ndarray, "tokens k"]],
    *,
    num_experts: int,
    world_size: int,
    overflow: float = 1e-4,
) -> int:
    """Finds a `capacity` for `route`, from the experts that the tokens of some batches chose.

    The larger of the sample's maximum and the quantile of an exponential tail that is fitted to its
    largest tenth (at least ten batches), rounded up to a multiple of 128; see `fit_plan_config`.
    Call on the host.

    Args:
      samples: the `expert_index` of all ranks, for each batch and layer, with experts spread
        evenly. With a map, the largest `Routing.num_rows` of some batches is what they need.
      num_experts, world_size: as for `route`; the number of ranks.
      overflow: wanted share of batches that need more, between 0 and 1.
    Returns:
      The capacity; at most what any routing of as many tokens needs.
    Raises:
      ValueError: an argument is invalid, or there is no sample.
    """
    check_positive(_OP, num_experts=num_experts, world_size=world_size)
    if num_experts % world_size:
        raise ValueError(
            f"{_OP}: num_experts is {num_experts}, not a multiple of the {world_size} ranks. With "
            "a map, take the largest Routing.num_rows of some batches."
        )
    if not 0 < overflow < 1:
        raise ValueError(f"{_OP}: overflow is {overflow}; it needs to be between 0 and 1.")
    needs, most = [], 1
    for sample in samples:
        index = np.asarray(sample)
        if index.size and not -1 <= index.min() <= index.max() < num_experts:
            raise ValueError(
                f"{_OP}: a sample has experts {index.min()} to {index.max()}; they need to be in "
                f"[-1, {num_experts}). Pass the num_experts of the model."
            )
        rank = index[index >= 0] // (num_experts // world_size)
        needs.append(np.bincount(rank, minlength=world_size).max())
        most = max(most, index.size)
    if not needs:
        raise ValueError(f"{_OP}: there is no sample. Pass the expert_index of some batches.")
    rows = quantile(np.array(needs, np.int64), overflow)
    return min(math.ceil(max(rows, 1) / _STEP) * _STEP, most)
