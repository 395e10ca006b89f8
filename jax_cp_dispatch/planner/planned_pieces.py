"""Pieces of documents on ranks, read back from a plan: as planned, and before anything moves."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch._text import count
from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import StaticMask
from jax_cp_dispatch.metadata.describe import known
from jax_cp_dispatch.planner.home import home_pieces
from jax_cp_dispatch.planner.seen_rows import SeenRows
from jax_cp_dispatch.planner.transfers import sums_of_ranks


class PlannedPieces(NamedTuple):
    """Tokens [start, end) of documents, in consecutive rows of ranks; sorted by rank and row.

    Attributes:
      rank, row: the rank that computes them, and the row of the first there.
      start, end: positions in the document.
      length: tokens of the document.
      first: index in the batch, row by row, of the document's first token; -1 if not known.
    """

    rank: Int[np.ndarray, " P"]
    row: Int[np.ndarray, " P"]
    start: Int[np.ndarray, " P"]
    end: Int[np.ndarray, " P"]
    length: Int[np.ndarray, " P"]
    first: Int[np.ndarray, " P"]

    @property
    def in_batch(self) -> tuple[Int[np.ndarray, " P"], ...]:
        """The document's first token, and the start, the end and the length."""
        return self.first, self.start, self.end, self.length

    def pairs(self, mask: StaticMask | SeenRows) -> Int[np.ndarray, " P"]:
        """Returns the query-key pairs of each piece."""
        if isinstance(mask, SeenRows):
            return mask.pairs(self.rank, self.row, self.row + self.end - self.start)
        return mask.pairs(self.start, self.end, self.length)

    def keys(self, mask: StaticMask | SeenRows) -> Int[np.ndarray, " P"]:
        """Returns the number of keys to which at least one token of each piece attends."""
        if isinstance(mask, SeenRows):
            return mask.keys(self.rank, self.row, self.row + self.end - self.start)
        first, end = mask.keys_of(self.start, self.end, self.length)
        return end - first

    def per_rank(self, values: Int[np.ndarray, " P"], world_size: int) -> Int[np.ndarray, " W"]:
        """Returns the sum over the pieces of each rank."""
        return sums_of_ranks(self.rank, values, world_size)


class Home(NamedTuple):
    """The order of a batch `[batch, columns]`: each rank holds an equal part of the columns."""

    batch: int
    columns: int
    num_ranks: int

    def pieces(self, planned: PlannedPieces) -> PlannedPieces:
        """Returns the pieces of the same documents that each rank holds before anything moves."""
        first, index = np.unique(planned.first, return_index=True)
        length = planned.length[index]
        documents = DocumentTable(length, first, np.zeros_like(first), self.batch, self.columns)
        return pieces_at_home(documents, self.num_ranks)

    def place_of(self, first: int, length: int) -> str:
        """Names the columns of a document."""
        row, column = divmod(first, self.columns)
        return f"batch row {row}, columns {count(column)} to {count(column + length)}"

    def holders(self, first: int, start: int, end: int) -> tuple[int, int]:
        """Returns the first and the last rank that hold one of the tokens [start, end)."""
        column, size = first % self.columns, self.columns // self.num_ranks
        return (column + start) // size, (column + end - 1) // size


def pieces_at_home(documents: DocumentTable, num_ranks: int) -> PlannedPieces:
    """Returns the pieces that each rank holds before anything moves."""
    home = home_pieces(documents, num_ranks)
    order = np.lexsort((home.row, home.rank))
    rank, document, start, end, row = (x[order] for x in home[:5])
    length, first = documents.lengths[document], documents.first[document]
    return PlannedPieces(rank, row, start, end, length, first)


def pieces_of_plan(op: str, plan: Any, home: Home) -> PlannedPieces:
    """Returns what the ranks of an `AttentionPlan` compute.

    A run is a piece. The range of queries in which it arrives says where its tokens are at home.
    """
    rank, row, start, end, _ = _runs(op, plan)
    metadata = plan.q_metadata
    fields = (metadata.dst_rank, metadata.dst_offset, metadata.src_offset)
    target, offset, source_row = (known(op, x).astype(np.int64) for x in fields)
    sender, slot = np.nonzero((target >= 0) & (known(op, metadata.seq_len) > 0))
    stride = plan.q_capacity + 1
    arrival = (target * stride + offset)[sender, slot]
    order = np.argsort(arrival)
    at = order[np.searchsorted(arrival[order], rank * stride + row, side="right") - 1]
    held = source_row[sender, slot][at] + rank * stride + row - arrival[at]
    size = home.columns // home.num_ranks
    batch, column = np.divmod(held, size)
    first = batch * home.columns + sender[at] * size + column - start
    _, document = np.unique(first, return_inverse=True)
    length = np.zeros(document.max(initial=-1) + 1, np.int64)
    np.maximum.at(length, document, end)  # every token is computed once
    return PlannedPieces(rank, row, start, end, length[document], first)


def pieces_of_placed(op: str, plan: Any) -> PlannedPieces:
    """Returns what the ranks of a `PlacedPlan` compute; a plan alone does not know its batch."""
    rank, row, start, end, run = _runs(op, plan)
    length = known(op, plan.run_length).astype(np.int64)[rank, run]
    return PlannedPieces(rank, row, start, end, length, np.full_like(rank, -1))


def _runs(op: str, plan: Any) -> tuple[Int[np.ndarray, " R"], ...]:
    """Returns rank, first row, and start and end in the document of each run, and its number."""
    fields = (plan.run_row, plan.run_position, plan.num_rows)
    row, position, num_rows = (known(op, x).astype(np.int64) for x in fields)
    rank, run = np.nonzero(row < num_rows[:, None])
    first = row[rank, run]
    end = num_rows[rank]
    follows = np.flatnonzero(np.diff(rank) == 0)
    end[follows] = first[follows + 1]
    start = position[rank, run]
    real = start >= 0  # otherwise padding
    return tuple(x[real] for x in (rank, first, start, start + end - first, run))
