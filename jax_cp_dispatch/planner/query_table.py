"""`QueryTable`: what each query of packed documents sees, under a mask that data decides."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask, MaskRanges
from jax_cp_dispatch.masks.pairs import pairs_per_query


class QueryTable(NamedTuple):
    """Numbers of the tokens of all documents, one document after another, without padding.

    Keys and queries count from the start of their document.

    Attributes:
      ranges: the keys of each query, and the queries of each key.
      first: of each document, its first token.
      pairs_before: of all queries before each, and of all.
    """

    ranges: MaskRanges
    first: Int64[np.ndarray, " D"]
    pairs_before: Int64[np.ndarray, " N+1"]

    def pairs(
        self,
        document: Int[np.ndarray, " P"],
        start: Int[np.ndarray, " P"],
        end: Int[np.ndarray, " P"],
    ) -> Int64[np.ndarray, " P"]:
        """Counts the pairs of the queries [start, end) of documents."""
        first = self.first[document]
        return self.pairs_before[first + end] - self.pairs_before[first + start]

    def needed(self, document: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranges of keys that at least one of the queries [start, end) may see.

        Exact, except for keys in the ranges of some queries that may be seen by others only.
        """
        first = self.first[document]
        of_queries = slice(first + start, first + end)
        k_start, k_end = self.ranges.k_start[of_queries], self.ranges.k_end[of_queries]
        has_keys = k_start < k_end
        if not has_keys.any():
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        low, high = k_start[has_keys].min(), k_end[has_keys].max()
        steps = np.bincount(k_start[has_keys] - low, minlength=high - low + 1)
        steps -= np.bincount(k_end[has_keys] - low, minlength=high - low + 1)
        is_needed = np.cumsum(steps[:-1]) > 0
        if self.ranges.q_start is not None:
            of_keys = slice(first + low, first + high)
            is_needed &= self.ranges.q_start[of_keys] < end
            is_needed &= self.ranges.q_end[of_keys] > start
        edges = np.flatnonzero(np.diff(is_needed, prepend=False, append=False))
        return low + edges[::2], low + edges[1::2]

    def running_keys(
        self, lengths: Int[np.ndarray, " D"]
    ) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Returns the first key of each query and of later ones, one past the last of earlier ones.

        Of its document; so the keys of any queries [start, end) follow from two of these.
        """
        has_keys = self.ranges.k_start < self.ranges.k_end
        longest = int(lengths.max(initial=0)) + 1
        document = longest * np.repeat(np.arange(len(lengths)), lengths)
        none = np.repeat(lengths, lengths)
        first = np.where(has_keys, self.ranges.k_start, none) + document
        last = np.where(has_keys, self.ranges.k_end, 0) + document
        first = np.minimum.accumulate(first[::-1])[::-1]
        return first - document, np.maximum.accumulate(last) - document


def query_table(mask: Mask, documents: DocumentTable) -> QueryTable:
    """Returns the table of a mask whose arrays are known on the host."""
    lengths, shape = documents.lengths, (documents.batch, documents.columns)
    first, token = np.cumsum(lengths) - lengths, documents.tokens()
    *edges, live = documents.edges()
    start = edges[0].reshape(-1)[token]
    seen = mask.ranges(np.arange(documents.columns)[None], *edges)
    seen = MaskRanges(*(x if x is None else np.broadcast_to(x, shape) for x in seen))
    counted = seen._replace(k_end=np.where(live, seen.k_end, 0))
    pairs = pairs_per_query(counted).reshape(-1)[token]
    longest = np.repeat(lengths, lengths)
    clipped = lambda x: np.clip(x.reshape(-1)[token] - start, 0, longest).astype(np.int32)
    ranges = MaskRanges(*(x if x is None else clipped(x) for x in seen))
    return QueryTable(ranges, first, np.concatenate([[0], np.cumsum(pairs)]))
