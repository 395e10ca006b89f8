"""`StaticMask`: a mask of numbers alone, with closed forms of its ranges and pairs."""

from __future__ import annotations

import abc
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Int64

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.masks.mask import Mask, MaskRanges


class StaticMask(Mask):
    """A mask that is known before the batch: each query sees one range of keys.

    A mask is a frozen dataclass and a static pytree: its structure is the mask itself. It is not
    registered by `register_dataclass`, because jaxlib (0.10.2 to 0.12.0.1) treats the structures
    of two such classes as equal if their fields are. Their hashes differ, so `jax.jit` confuses
    them in about one process of a hundred, and then runs the program of another mask.
    """

    @property
    @abc.abstractmethod
    def pair_count(self) -> tuple[int, int, int]:
        """The fields of `PairCount` in `csrc/planner`: left, right (-1: no limit) and chunk."""

    @property
    def num_diagonals(self) -> int:
        """The diagonal edges of the mask, which cross tiles of pairs."""
        return sum(x >= 0 for x in self.pair_count[:2])

    @abc.abstractmethod
    def k_start(self, q: Any, start: Any) -> Any:
        """Returns the first key of each query; it never decreases along a document.

        Queries, keys and documents have the same coordinates: columns of a batch row, received
        rows, or positions in the document. Arrays of NumPy give NumPy.

        Args:
          q: the queries.
          start: the first token of the document of each.
        """

    @abc.abstractmethod
    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        """Returns one past the last key of each query; it never decreases along a document.

        Args:
          q, start: as in `k_start`.
          end: one past the end of the document. A causal mask does not read it; it may be None.
        """

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(self.k_start(column, start), self.k_end(column, start, end))

    @abc.abstractmethod
    def pairs_before(self, queries: Any, keys: Any) -> Int64[np.ndarray, "..."]:
        """Counts the pairs (q, k) of one document with q < queries and k < keys."""

    def pairs(self, start: Any, end: Any, length: Any) -> Int64[np.ndarray, "..."]:
        """Counts the pairs of the queries [start, end) of a document of `length` tokens."""
        return np.asarray(self.pairs_before(end, length) - self.pairs_before(start, length))

    def keys_of(self, start: Any, end: Any, length: Any) -> tuple[Any, Any]:
        """Returns the range of keys that at least one of the queries [start, end) sees."""
        zero = np.zeros_like(start)
        return self.k_start(start, zero), self.k_end(end - 1, zero, length)

    def clipped(self, num_tokens: int) -> StaticMask:
        return self

    def simplified(self) -> Mask:
        return self


def triangle(q: Any, k: Any) -> Any:
    """Pairs with query < q and key < k, and key <= query: a triangle, then rows of k."""
    q = np.maximum(q, 0)
    both = np.minimum(q, k)
    return both * (both + 1) // 2 + (q - both) * both


def check_tokens(mask: Any, name: str, value: Any, *, minimum: int) -> None:
    """Requires an integer of at least `least`, and sets it as one of Python."""
    op = type(mask).__name__
    check_integer(op, name, value)
    if value < minimum:
        raise ValueError(f"{op}: {name} is {value}; it needs to be at least {minimum}.")
    object.__setattr__(mask, name, int(value))


def no_limit_if_large(value: int | None) -> int | None:
    """Returns None for numbers that no document reaches: positions have 32 bits."""
    return None if value is None or value >= 2**31 else value


def remainder(x: Any, size: int) -> Any:
    """Returns x % size of numbers that are not negative, on the device in one operation."""
    if isinstance(x, jax.Array):
        return lax.rem(x, jax.numpy.asarray(size, x.dtype))
    return x % size
