"""Counts query-key pairs of a document: the one count of the planner, of FLOPs and of costs.

`csrc/planner/pair_count.h` is the same closed form for the search of the planner.
"""

from typing import TypeAlias

import numpy as np
from jaxtyping import Int, Int64

from jax_cp_dispatch._window import Reach, Window, reach

Tokens: TypeAlias = int | np.integer | Int[np.ndarray, "..."]


def count_pairs(
    start: Tokens,
    end: Tokens,
    *,
    length: Tokens | None = None,
    causal: bool = True,
    window: Window | None = None,
) -> Int64[np.ndarray, "..."]:
    """Counts the query-key pairs of the queries [start, end) of a document.

    Args:
      start, end: positions in the document; integers, or arrays of them for several documents.
      length: tokens of the document; None for `end`, which is sufficient if causal.
      causal: a query attends to the keys up to its own position; otherwise to all keys of its
        document.
      window: with `causal`, the maximum number of keys per query, the last of which is its own.
        Without, a pair (left, right): the number of keys before and after it.
    Returns:
      The pairs that the mask admits, as int64.
    Raises:
      TypeError, ValueError: the window does not match `causal`.
    """
    within = reach("count_pairs", causal, window)
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    length = end if length is None else np.asarray(length, np.int64)
    pairs = pairs_before(end, length, within) - pairs_before(start, length, within)
    return np.asarray(pairs)


def pairs_before(
    queries: Int64[np.ndarray, "..."], keys: Int64[np.ndarray, "..."], within: Reach
) -> Int64[np.ndarray, "..."]:
    """Counts the pairs (q, k) of one document with q < queries, k < keys, and k in reach of q."""
    left, right = within
    seen = queries * keys if right is None else _up_to(right, queries, keys)
    return np.asarray(seen if left is None else seen - _up_to(-left - 1, queries, keys))


def wasted_pairs(
    start: Tokens, end: Tokens, length: Tokens, within: Reach, tile: tuple[int, int]
) -> Int64[np.ndarray, "..."]:
    """Counts the pairs outside the mask that tiles of the queries [start, end) compute.

    An average over the places of the tiles: half a tile of queries at the first and at the last
    query, half a tile of keys at both ends of a query's keys, and half a tile of queries along each
    diagonal edge of the mask. `tile` is (queries, keys).
    """
    queries, keys = (x - 1 for x in tile)
    start, end, length = (np.asarray(x, np.int64) for x in (start, end, length))
    left, right = within

    def num_keys(query):
        first = 0 if left is None else np.maximum(query - left, 0)
        return (length if right is None else np.minimum(query + right + 1, length)) - first

    of_query = 2 * keys + ((left is not None) + (right is not None)) * queries
    waste = (queries * (num_keys(start) + num_keys(end - 1)) + (end - start) * of_query) // 2
    return np.where(start < end, waste, 0)


def _up_to(ahead, q, k):
    """Pairs with query < q and key < k, and key <= query + ahead.

    A triangle that begins `ahead` queries earlier, minus its part before the first query.
    """
    return _triangle(q + ahead, k) - _triangle(ahead, k)


def _triangle(q, k):
    """Pairs with query < q and key < k, and key <= query: a triangle, then rows of k."""
    q = np.maximum(q, 0)
    both = np.minimum(q, k)
    return both * (both + 1) // 2 + (q - both) * both
