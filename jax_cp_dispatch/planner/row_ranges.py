"""What received rows see, under a mask that data decides: ranges of the rows of a rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.planner.piece_table import PieceTable, Spans
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.seen_keys import QueryTable

# Of the keys of a fallback, which nothing may follow: all queries.
_ALL = np.iinfo(np.int32).max


class _Rows(NamedTuple):
    """Parts [start, end) of documents in the rows of one rank, by document and start."""

    document: Int[np.ndarray, " X"]
    start: Int[np.ndarray, " X"]
    end: Int[np.ndarray, " X"]
    row: Int[np.ndarray, " X"]

    @classmethod
    def of(cls, parts: PieceTable | Spans, rank: int) -> _Rows:
        here = np.flatnonzero(parts.rank == rank)
        order = here[np.lexsort((parts.start[here], parts.document[here]))]
        return cls(*(x[order] for x in (parts.document, parts.start, parts.end, parts.row)))

    def tokens(self, table: QueryTable) -> tuple[np.ndarray, ...]:
        """Returns document, row and number in the table of each token."""
        size = self.end - self.start
        within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        of_parts = self.document, self.row, table.first[self.document] + self.start
        document, row, token = (np.repeat(x, size) for x in of_parts)
        return document, row + within, token + within

    def rows_before(self, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns the row of the first token of the document from a position on.

        Or one past the last, if there is none. Parts of a document are adjacent rows, in order.
        """
        longest = int(max(self.end.max(initial=0), position.max(initial=0))) + 1
        keys = self.document * longest + self.start
        before = np.searchsorted(keys, document * longest + position, side="right") - 1
        after = np.minimum(before + 1, len(keys) - 1)
        before = np.maximum(before, 0)
        is_before = self.document[before] == document
        is_before &= self.start[before] <= position
        size = self.end[before] - self.start[before]
        row = self.row[before] + np.minimum(position - self.start[before], size)
        return np.where(is_before, row, self.row[after])


def row_ranges(
    request: PlanRequest, pieces: PieceTable, spans: Spans, *, num_queries: int, num_keys: int
) -> MaskRanges | None:
    """Returns what the received queries and keys of each rank see, in its rows; `[held, rows]`.

    None for a mask of numbers: its ranges follow from the runs of a plan.

    Args:
      request: what the plan is made of.
      pieces: the queries of each rank. Those of a document need to be in order.
      spans: its keys, by `lay_out`.
      num_queries, num_keys: rows of a rank.
    """
    table = request.seen.table
    if table is None:
        return None
    ranks = range(request.world_size)[request.held]
    sizes = (num_queries, num_queries, num_keys, num_keys)
    ranges = MaskRanges(*(
        None if x is None else np.zeros((len(ranks), size), np.int32)
        for x, size in zip(table.ranges, sizes, strict=True)
    ))  # fmt: skip
    for held, rank in enumerate(ranks):
        queries, keys = _Rows.of(pieces, rank), _Rows.of(spans, rank)
        if not len(keys.row):
            continue
        document, row, token = queries.tokens(table)
        start, end = (x[token] for x in table.ranges[:2])
        seen = [keys.rows_before(document, x) for x in (start, end)]
        sees = (start < end) & (seen[0] < seen[1])
        for of_rank, x in zip(ranges[:2], seen, strict=True):
            of_rank[held, row] = np.where(sees, x, 0)
        if ranges.q_start is None:
            continue
        document, row, token = keys.tokens(table)
        for of_rank, x in zip(ranges[2:], table.ranges[2:], strict=True):
            of_rank[held, row] = queries.rows_before(document, x[token])
    return ranges


def fallback_row_ranges(
    request: PlanRequest, num_held: int, *, num_queries: int, num_keys: int
) -> MaskRanges | None:
    """Returns ranges of a plan that nothing may follow: all rows attend to row 0."""
    if request.seen.table is None:
        return None
    fill = lambda rows, x: np.full((num_held, rows), x, np.int32)
    of_queries = fill(num_queries, 0), fill(num_queries, 1)
    if not request.mask.has_query_ranges:
        return MaskRanges(*of_queries)
    return MaskRanges(*of_queries, fill(num_keys, 0), fill(num_keys, _ALL))


def local_rows(ranges: MaskRanges, rank: Any) -> MaskRanges:
    """Returns the ranges of one rank, of all ranks or of its slice; NumPy gives NumPy."""

    def of_rank(x):
        if jnp.ndim(x) < 2:
            return x
        at = 0 if jnp.shape(x)[0] == 1 else rank
        on_host = isinstance(x, np.ndarray) and not isinstance(at, jax.Array)
        return (x if on_host else jnp.asarray(x))[at]

    return jax.tree.map(of_rank, ranges)
