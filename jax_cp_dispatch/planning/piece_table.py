"""`PieceTable`: pieces of documents on ranks, at home and laid out in rows, and their keys."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.planning.seen_keys import SeenKeys


class PieceTable(NamedTuple):
    """Tokens [start, end) of documents, in the order of the ranks' rows; `row` is local to a rank.

    `origin` is the received row where the document starts, or would start.
    """

    rank: Int[np.ndarray, " P"]
    document: Int[np.ndarray, " P"]
    start: Int[np.ndarray, " P"]
    end: Int[np.ndarray, " P"]
    row: Int[np.ndarray, " P"]
    origin: Int[np.ndarray, " P"]


class Spans(NamedTuple):
    """Contiguous keys [start, end) of a document on a rank, in received order."""

    rank: Int[np.ndarray, " G"]
    document: Int[np.ndarray, " G"]
    start: Int[np.ndarray, " G"]
    end: Int[np.ndarray, " G"]
    row: Int[np.ndarray, " G"]


def lay_out(
    assigned: Int[np.ndarray, "P 4"],
    seen: SeenKeys,
    held: PieceTable | None = None,
) -> tuple[PieceTable, Spans]:
    """Lays out pieces, given as sorted rows (rank, document, start, end), in rows of ranks.

    Cut documents come first on each rank. All its whole documents and the last cut one are then one
    range of its own rows, and one range of its received rows. `held` are the same pieces, laid out
    for another mask: they keep their rows.
    """
    if seen.table is not None:
        return _lay_out_documents(assigned, seen, held)
    rank, document, start, end = assigned.T
    _, earliest, latest = seen.keys_of(document, start, end)
    # Adjacent keys of two pieces of a document form one span.
    new = np.ones(len(assigned), bool)
    new[1:] = (np.diff(rank) != 0) | (np.diff(document) != 0) | (earliest[1:] > latest[:-1])
    first = np.flatnonzero(new)
    span = np.cumsum(new) - 1
    span_end = latest[np.append(first[1:], len(new)) - 1] if len(new) else latest
    size = span_end - earliest[first]
    own = np.add.reduceat(end - start, first) if len(new) else size

    order = np.lexsort((np.arange(len(first)), size == own, rank[first]))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    row = np.empty_like(size)
    row[order] = _before(size[order], rank[first][order])
    columns = (rank[first], document[first], earliest[first], span_end, row)
    spans = Spans._make(x[order] for x in columns)

    piece_order = np.argsort(place[span], kind="stable")
    if held is not None:
        piece_order = np.argsort(np.lexsort((held.start, held.document, held.rank)))
    rank, document, start, end = assigned[piece_order].T
    origin = (row - earliest[first])[span][piece_order]
    pieces = PieceTable(rank, document, start, end, _before(end - start, rank), origin)
    return pieces, spans


def _lay_out_documents(
    assigned: Int[np.ndarray, "P 4"], seen: SeenKeys, held: PieceTable | None
) -> tuple[PieceTable, Spans]:
    """`lay_out` if a query may see keys of several spans: those of a document are adjacent rows.

    Keys between them, which no query of the rank sees, are not sent. `origin` has no meaning.
    """
    rank, document, start, end = assigned.T
    new = np.ones(len(assigned), bool)
    new[1:] = (np.diff(rank) != 0) | (np.diff(document) != 0)
    group, first = np.cumsum(new) - 1, np.flatnonzero(new)  # a document on a rank
    of_group = rank[first], document[first]

    keys = seen.keys_of(document, start, end)
    shift = (int(seen.lengths.max(initial=0)) + 1) * group[keys.piece]
    order = np.argsort(shift + keys.start, kind="stable")
    begin, stop = (shift + keys.start)[order], np.maximum.accumulate((shift + keys.end)[order])
    is_first = np.ones(len(begin), bool)
    is_first[1:] = begin[1:] > stop[:-1]
    at = np.flatnonzero(is_first)
    span_start, span_group = keys.start[order][at], group[keys.piece][order][at]
    span_end = (stop - shift[order])[np.append(at[1:], len(stop)) - 1] if len(at) else span_start

    size, own = np.zeros((2, len(first)), np.int64)
    np.add.at(size, span_group, span_end - span_start)
    np.add.at(own, group, end - start)
    place = np.empty(len(first), np.int64)
    place[np.lexsort((np.arange(len(first)), size == own, of_group[0]))] = np.arange(len(first))
    order = np.argsort(place[span_group], kind="stable")
    columns = (*(x[span_group] for x in of_group), span_start, span_end)
    rows = _before((span_end - span_start)[order], of_group[0][span_group][order])
    spans = Spans._make((*(x[order] for x in columns), rows))

    piece_order = np.argsort(place[group], kind="stable")
    if held is not None:
        piece_order = np.argsort(np.lexsort((held.start, held.document, held.rank)))
    rank, document, start, end = assigned[piece_order].T
    row = _before(end - start, rank)
    return PieceTable(rank, document, start, end, row, np.zeros_like(row)), spans


def home_pieces(documents: DocumentTable, world_size: int) -> PieceTable:
    """Returns the pieces at home, by document; their `origin` is that of the home's own rows."""
    first, lengths = documents.first, documents.lengths
    columns = documents.columns // world_size
    first_cell = first // columns  # cells of one rank in one batch row, in the order of tokens
    counts = np.where(lengths > 0, (first + lengths - 1) // columns - first_cell + 1, 0)
    number = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    cell = first_cell[number] + within
    begin = cell * columns - first[number]
    start, end = np.maximum(begin, 0), np.minimum(begin + columns, lengths[number])
    batch, rank = np.divmod(cell, world_size)
    row = batch * columns + start - begin
    return PieceTable(rank, number, start, end, row, row - start)


def _before(size: Int[np.ndarray, " N"], rank: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Returns the sum of the sizes before each entry on its rank; entries are sorted by rank."""
    before = np.cumsum(size) - size
    first = np.searchsorted(rank, rank, side="left")
    return before - before[first]
