"""`SeenKeys`: the pairs of pieces of documents, and the keys that they need, for any mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
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

        They count from the start of the document. The keys of any queries [start, end) follow from
        two of these.
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
    """Returns the table of a mask whose arrays, if any, are known on the host."""
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


class SeenKeys(NamedTuple):
    """What the queries of the documents of a batch see.

    Attributes:
      mask: which keys of its document a query sees.
      lengths: tokens of each document.
      table: of each query; None for a `StaticMask`, which has closed forms.
    """

    mask: Mask
    lengths: Int[np.ndarray, " D"]
    table: QueryTable | None

    def pairs(self, document: Any, start: Any, end: Any) -> Int[np.ndarray, " P"]:
        """Returns the query-key pairs of the queries [start, end) of documents."""
        if self.table is None:
            return self._numbers.pairs(start, end, self.lengths[document])
        return self.table.pairs(document, start, end)

    def keys_of(self, document: Any, start: Any, end: Any) -> tuple[Any, Any, Any]:
        """Returns the keys [start, end) that pieces [start, end) of documents need.

        First the piece of each range; by piece, then ascending. A piece may need several ranges.
        """
        piece, lengths = np.arange(len(document)), self.lengths[document]
        if self.table is None:
            return piece, *self._numbers.keys_of(start, end, lengths)
        is_cut = end - start < lengths
        whole = piece[~is_cut]
        found = [(whole, np.zeros_like(whole), lengths[whole])]
        for i in piece[is_cut].tolist():
            keys = self.table.needed(int(document[i]), int(start[i]), int(end[i]))
            found.append((np.full(len(keys[0]), i), *keys))
        pieces, starts, ends = (np.concatenate(x) for x in zip(*found, strict=True))
        order = np.argsort(pieces, kind="stable")
        return pieces[order], starts[order], ends[order]

    def most_keys(self) -> tuple[int, int]:
        """Returns the document with the query that sees most keys, and their number."""
        if self.table is None:
            document = int(self.lengths.argmax())
            return document, int(self._numbers.num_keys(int(self.lengths[document])))
        keys = np.diff(self.table.pairs_before)
        query = int(keys.argmax())
        return int(np.searchsorted(self.table.first, query, side="right")) - 1, int(keys[query])

    def describe_to(self, problem: Any, num_tokens: int) -> None:
        """Sets the mask of a problem of `csrc/planner` that has its lengths already.

        `num_tokens`: of the batch; no number of a mask needs to be larger.
        """
        if self.table is None:
            problem.pairs = self._numbers.clipped(num_tokens).pair_count
        else:
            problem.set_table(self.table.pairs_before, *self.table.running_keys(self.lengths))

    @property
    def _numbers(self) -> StaticMask:
        assert isinstance(self.mask, StaticMask)
        return self.mask


def seen_keys(mask: Mask, documents: DocumentTable) -> SeenKeys:
    """Returns what the queries of a batch see."""
    table = None if isinstance(mask, StaticMask) else query_table(mask, documents)
    return SeenKeys(mask, documents.lengths, table)


def describe_layers(
    problem: Any, seen: Sequence[SeenKeys], layers: Sequence[int], documents: DocumentTable
) -> None:
    """Sets several masks of a `PlacementProblem`, and how many layers use each."""
    if all(x.table is None for x in seen):
        masks = [x.mask for x in seen if isinstance(x.mask, StaticMask)]
        counts = (x.clipped(documents.num_tokens).pair_count for x in masks)
        problem.set_layers(list(zip(counts, layers, strict=True)))
        return
    tables = [query_table(x.mask, documents) if x.table is None else x.table for x in seen]
    pairs = sum(n * x.pairs_before for n, x in zip(layers, tables, strict=True))
    first, last = zip(*(x.running_keys(documents.lengths) for x in tables), strict=True)
    problem.set_table(pairs, np.min(first, axis=0), np.max(last, axis=0))
