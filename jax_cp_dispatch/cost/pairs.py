"""Counts query-key pairs of a document: the one count of the planner, of FLOPs and of costs.

`csrc/planner/pair_count.h` is the same closed form for the search of the planner.
"""

from typing import TypeAlias

import numpy as np
from jaxtyping import Int, Int64

from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.masks.read import read_mask_of_numbers

Tokens: TypeAlias = int | np.integer | Int[np.ndarray, "..."]


def count_pairs(
    start: Tokens,
    end: Tokens,
    *,
    length: Tokens | None = None,
    mask: Mask | str | None = None,
) -> Int64[np.ndarray, "..."]:
    """Counts the query-key pairs of the queries [start, end) of a document.

    Args:
      start, end: positions in the document; integers, or arrays of them for several documents.
      length: tokens of the document; None for `end`, which is sufficient for a causal mask.
      mask: see `context_parallel_attention`; None is causal.
    Returns:
      The pairs that the mask admits, as int64.
    Raises:
      TypeError: `mask` is not a mask.
    """
    mask = read_mask_of_numbers("count_pairs", mask)
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    length = end if length is None else np.asarray(length, np.int64)
    return mask.pairs(start, end, length)


def wasted_pairs(
    start: Tokens, end: Tokens, length: Tokens, mask: StaticMask, tile: tuple[int, int]
) -> Int64[np.ndarray, "..."]:
    """Counts the pairs outside the mask that tiles of the queries [start, end) compute.

    An average over the places of the tiles: half a tile of queries at the first and at the last
    query, half a tile of keys at both ends of a query's keys, and half a tile of queries along each
    diagonal edge of the mask. `tile` is (queries, keys).
    """
    queries, keys = (x - 1 for x in tile)
    start, end, length = (np.asarray(x, np.int64) for x in (start, end, length))

    def num_keys(query):
        first, last = mask.keys_of(query, query + 1, length)
        return last - first

    of_query = 2 * keys + mask.num_diagonals * queries
    waste = (queries * (num_keys(start) + num_keys(end - 1)) + (end - start) * of_query) // 2
    return np.where(start < end, waste, 0)
