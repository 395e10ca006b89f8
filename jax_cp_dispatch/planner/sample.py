"""Finds capacities from a sample of batches: the tail of what plans need, extrapolated."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from jax_cp_dispatch._warning import warn_caller

Config = TypeVar("Config")


class Needs(NamedTuple):
    """What the plan of a batch needs; `values` and `most` are in the order of the capacities.

    Attributes:
      num_tokens: of a rank.
      values: rows, ranges and pieces.
      most: what no batch of this shape exceeds.
    """

    num_tokens: int
    values: Sequence[int]
    most: Sequence[int]


class OfEachBatch:
    """A mask, or masks, of each batch: the elements of a list in order, or the same for all."""

    def __init__(self, op: str, name: str, values: Any, *, is_list: bool) -> None:
        self._op, self._name, self._values, self._is_list = op, name, values, is_list
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
            f"{self._op}: {self._name} is a list for {len(self._values)} batches, but there are "
            f"{num_batches}. Pass one element for each batch."
        )


class SampledPlanner(NamedTuple):
    """What plans the batches of a sample.

    Attributes:
      op: the public function, for error messages.
      capacities: the fields of its config. Rows are rounded up to multiples of 1024, ranges and
        pieces of 8, as far as a batch can need them.
      needs: plans a batch, `lengths` and `columns` or `segment_ids`, with `config`.
    """

    op: str
    capacities: Sequence[str]
    needs: Callable[..., Needs]


def config_of_sample(
    planner: SampledPlanner,
    batches: Iterable[Any],
    config: Config,
    *,
    overflow: float,
    columns: int | None,
) -> Config:
    """Returns the config with all capacities, and `expected_overflow`.

    Args:
      planner: plans the batches.
      batches: lengths; or arrays of segment ids [B, columns].
      config: dataclass with the capacities; those that are None are found.
      overflow: wanted share of batches that do not fit.
      columns: of batches given by their lengths.
    Raises:
      TypeError: `batches` is one array of ids, or `columns` is given for an array of ids.
      ValueError: there is no batch, or `overflow` is not between 0 and 1.
    """
    op, capacities, needs = planner
    shape = getattr(batches, "shape", None)
    if shape is not None and len(shape) < 3:
        raise TypeError(
            f"{op}: batches is an array of shape {shape}; it needs to be a list of "
            "batches. Pass [segment_ids] for a single one, or lists of lengths."
        )
    if not 0 < overflow < 1:
        raise ValueError(f"{op}: overflow is {overflow}; it needs to be between 0 and 1.")
    is_free = [getattr(config, name) is None for name in capacities]
    free = [name for name, x in zip(capacities, is_free, strict=True) if x]
    none: dict[str, Any] = dict.fromkeys(free)
    open_config = _replaced(config, none)
    seen: list[Needs] = []
    for number, batch in enumerate(batches):
        is_ids = not isinstance(batch, list | tuple) and np.ndim(batch) == 2
        if is_ids and columns is not None:
            raise TypeError(
                f"{op}: batch {number} is an array of shape {np.shape(batch)}, which means segment "
                "ids, but columns goes with lengths. Pass lengths as lists, batch.tolist(); for "
                "segment ids omit columns."
            )
        given = {"segment_ids": batch} if is_ids else {"lengths": batch, "columns": columns}
        seen.append(needs(config=open_config, **given))
    if not seen:
        raise ValueError(
            f"{op}: batches is empty. Pass at least one batch, preferably a few hundred."
        )
    sizes_of_ranks = {need.num_tokens for need in seen}
    if len(sizes_of_ranks) > 1:
        warn_caller(
            f"{op}: a rank holds {min(sizes_of_ranks)} to {max(sizes_of_ranks)} tokens, so plans "
            "of these batches differ in shape. Pass batches of one shape; with lengths, columns=."
        )
    sizes: dict[str, Any] = {}
    rates = []
    of_batches = np.array([need.values for need in seen], np.int64).T[is_free]
    most = np.array([need.most for need in seen], np.int64).max(0)[is_free]
    for name, values, enough in zip(free, of_batches, most.tolist(), strict=True):
        rate = overflow / len(free)  # so that all together exceed it rarely enough
        step = 1024 if name.endswith("_capacity") else 8
        sizes[name] = min(math.ceil(quantile(values, rate) / step) * step, enough)
        rates.append(tail(values, sizes[name]) if sizes[name] < enough else 0.0)
    return _replaced(config, sizes | {"expected_overflow": float(sum(rates))})


def _replaced(config: Any, values: dict[str, Any]) -> Any:
    return dataclasses.replace(config, **values)


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
