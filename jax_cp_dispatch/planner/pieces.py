"""Pieces of documents on ranks: their rows, and the keys that they need."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.masks import StaticMask


class Pieces(NamedTuple):
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
    lengths: Int[np.ndarray, " D"],
    mask: StaticMask,
    held: Pieces | None = None,
) -> tuple[Pieces, Spans]:
    """Lays out pieces, given as sorted rows (rank, document, start, end), in rows of ranks.

    Cut documents come first on each rank. All its whole documents and the last cut one are then one
    range of its own rows, and one range of its received rows. `held` are the same pieces, laid out
    for another mask: they keep their rows.
    """
    rank, document, start, end = assigned.T
    earliest, latest = mask.keys_of(start, end, lengths[document])
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
    pieces = Pieces(rank, document, start, end, _before(end - start, rank), origin)
    return pieces, spans


def _before(size: Int[np.ndarray, " N"], rank: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Returns the sum of the sizes before each entry on its rank; entries are sorted by rank."""
    before = np.cumsum(size) - size
    first = np.searchsorted(rank, rank, side="left")
    return before - before[first]
