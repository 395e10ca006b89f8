"""The interface of a mask: ranges of keys for the device, counts of pairs on the host."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64


class Mask(abc.ABC):
    """Which keys of its document a query sees; always the keys of one range.

        visible(q, k) = k_start(q) <= k < k_end(q)

    A mask is a frozen pytree. Its kind and its numbers are static, so masks with equal numbers
    share a compiled program. What data decides is arrays `[B, T]`, its only leaves: they are
    sharded and gathered like segment ids, and may be traced. A mask never crosses the ends of
    documents.
    """

    @property
    @abc.abstractmethod
    def is_causal(self) -> bool:
        """Whether every query sees its own key last."""

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
        """Returns the first key of each query.

        Queries, keys and documents have the same coordinates: columns of a batch row, received
        rows, or positions in the document. Arrays of NumPy give NumPy.

        Args:
          q: the queries.
          start: the first token of the document of each.
        """

    @abc.abstractmethod
    def k_end(self, q: Any, end: Any) -> Any:
        """Returns one past the last key of each query; `end`: one past the end of its document.

        A causal mask does not read `end`, which may be None then.
        """

    @abc.abstractmethod
    def pairs_before(self, queries: Any, keys: Any) -> Int64[np.ndarray, "..."]:
        """Counts the pairs (q, k) of one document with q < queries and k < keys."""

    def pairs(self, start: Any, end: Any, length: Any) -> Int64[np.ndarray, "..."]:
        """Counts the pairs of the queries [start, end) of a document of `length` tokens."""
        return np.asarray(self.pairs_before(end, length) - self.pairs_before(start, length))

    def keys_of(self, start: Any, end: Any, length: Any) -> tuple[Any, Any]:
        """Returns the range of keys that at least one of the queries [start, end) sees."""
        return self.k_start(start, np.zeros_like(start)), self.k_end(end - 1, length)

    def num_keys(self, length: Any) -> Any:
        """Returns the most keys that a query of a document of `length` tokens sees."""
        return length

    def clipped(self, num_tokens: int) -> Mask:
        """Returns the same mask for documents of at most `num_tokens` tokens, with 32-bit sums."""
        return self

    def simplified(self) -> Mask:
        """Returns the simplest equal mask, so that equal masks compare equal."""
        return self


def maximum(x: Any, y: Any) -> Any:
    """Returns the larger elements; of NumPy arrays by NumPy."""
    return (jnp if _is_traced(x, y) else np).maximum(x, y)


def minimum(x: Any, y: Any) -> Any:
    return (jnp if _is_traced(x, y) else np).minimum(x, y)


def triangle(q: Any, k: Any) -> Any:
    """Pairs with query < q and key < k, and key <= query: a triangle, then rows of k."""
    q = np.maximum(q, 0)
    both = np.minimum(q, k)
    return both * (both + 1) // 2 + (q - both) * both


def _is_traced(*arrays: Any) -> bool:
    return any(isinstance(x, jax.Array) for x in arrays)
