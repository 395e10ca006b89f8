"""The cut pieces of a placement: which piece of a document comes before which, on which rank.

Layers beside attention need them: see `jax_cp_dispatch.sequence`. A rank needs all pieces of the
documents of which it holds a piece, and no others.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch.planning.piece_table import PieceTable
from jax_cp_dispatch.planning.transfers import number_on_rank, rank_slice

# document, tokens before it, its tokens, first row, tokens after it, rank, number among the rank's
# cut pieces, number among the document's pieces, and the row where its rank receives what the
# pieces before it send.
NUM_COLUMNS = 9


class CutPieces(NamedTuple):
    """The pieces that are not whole documents, by document and place in it.

    Attributes:
      columns: see above.
      held: cut pieces of each rank.
      linked: pieces on other ranks of the documents of each rank's cut pieces.
    """

    columns: Int[np.ndarray, "C 9"]
    held: Int[np.ndarray, " W"]
    linked: Int[np.ndarray, " W"]


def cut_pieces(pieces: PieceTable, lengths: Int[np.ndarray, " D"], world_size: int) -> CutPieces:
    """Finds the cut pieces and counts what each rank has to know of them."""
    cut = np.flatnonzero(pieces.end - pieces.start < lengths[pieces.document])
    held = np.bincount(pieces.rank[cut], minlength=world_size)
    slot = number_on_rank(pieces.rank[cut], held)  # pieces are sorted by rank
    by_document = np.lexsort((pieces.start[cut], pieces.document[cut]))
    cut, slot = cut[by_document], slot[by_document]
    start, end, document, rank = (
        x[cut] for x in (pieces.start, pieces.end, pieces.document, pieces.rank)
    )
    order = number_on_rank(np.unique(document, return_inverse=True)[1], _counts(document))
    # Of each document on each rank: the pieces before its last one there, and on other ranks.
    longest = int(document.max(initial=0)) + 1
    shared, index, here = np.unique(
        rank * longest + document, return_inverse=True, return_counts=True
    )
    maps = np.zeros(len(shared), np.int64)
    np.maximum.at(maps, index, order)
    holder = shared // longest
    first = np.cumsum(maps) - maps
    base = first - first[np.searchsorted(holder, holder)]
    total = _counts(document)[np.searchsorted(np.unique(document), shared % longest)]
    linked = np.zeros(world_size, np.int64)
    np.add.at(linked, holder, total - here)
    rest = lengths[document] - end
    columns = document, start, end - start, pieces.row[cut], rest, rank, slot, order, base[index]
    return CutPieces(np.stack(columns, 1), held, linked)


def _counts(document: Int[np.ndarray, " C"]) -> Int[np.ndarray, " D"]:
    return np.unique(document, return_counts=True)[1]


def cut_table(
    cut: CutPieces, *, num_slots: int, num_linked: int, rank: int | None
) -> Int32[np.ndarray, "held X 9"]:
    """Returns what each rank, or `rank` alone, has to know; -1 in unused entries.

    First its own cut pieces, then those on other ranks of the same documents.
    """
    world_size, columns = len(cut.held), cut.columns
    table = np.full((world_size, num_slots + num_linked, NUM_COLUMNS), -1, np.int32)
    table = table[rank_slice(rank)].copy()
    document, holder = columns[:, 0], columns[:, 5]
    first = np.searchsorted(document, document)
    last = np.searchsorted(document, document, side="right")
    for own, rows in zip(range(world_size) if rank is None else [rank], table, strict=True):
        mine = np.flatnonzero(holder == own)
        rows[columns[mine, 6]] = columns[mine]
        spans = {(int(first[i]), int(last[i])) for i in mine}
        others = [i for a, b in sorted(spans) for i in range(a, b) if holder[i] != own]
        rows[num_slots : num_slots + len(others)] = columns[others]
    return table


def no_cuts(num_held: int, num_entries: int) -> Int32[np.ndarray, "held X 9"]:
    """Returns the table of a placement that cuts nothing."""
    return np.full((num_held, num_entries, NUM_COLUMNS), -1, np.int32)


def describe_cuts(table: Int32[np.ndarray, "W X 9"], num_tokens: int) -> list[str]:
    """Returns lines on what layers beside attention move and compute; `num_tokens` of a rank."""
    rank = np.arange(len(table))[:, None]
    own = table[(table[..., 5] == rank) & (table[..., 0] >= 0)]
    own = own[np.lexsort((own[:, 7], own[:, 0]))]
    document, start, length, rest, holder = own[:, [0, 1, 2, 4, 5]].T
    follows = np.zeros(len(own), bool)
    follows[1:] = (document[1:] == document[:-1]) & (holder[1:] != holder[:-1])
    states = maps = 0
    for i in np.flatnonzero(rest > 0):
        later = (document == document[i]) & (start > start[i]) & (holder != holder[i])
        receivers = len(np.unique(holder[later]))
        states, maps = states + receivers * (start[i] == 0), maps + receivers * (start[i] > 0)
    middle = int(length[(start > 0) & (rest > 0)].sum())
    share = 100 * middle / max(len(table) * num_tokens, 1)
    documents = len(np.unique(document))
    return [
        f"  cuts      {documents} documents in {len(own)} pieces; a convolution of W taps moves "
        f"{int(follows.sum())} x (W - 1) rows",
        f"            a recurrence moves {states} states and {maps} maps; {share:.1f} % of the "
        "tokens are in middle pieces",
    ]
