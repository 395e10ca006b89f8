"""What ranks hold before anything moves: pieces of documents, their work, and checksums."""

import numpy as np
from jaxtyping import Int, Int32, Int64

from jax_cp_dispatch._window import Reach
from jax_cp_dispatch.cost.pairs import pairs_before, wasted_pairs
from jax_cp_dispatch.planner.documents import Documents
from jax_cp_dispatch.planner.pieces import Pieces
from jax_cp_dispatch.planner.stamp import ID_STEP, checksums_of_runs
from jax_cp_dispatch.planner.transfers import sums_of_ranks


def home_pieces(documents: Documents, world_size: int) -> Pieces:
    """Returns the pieces at home, by document; their `origin` is that of the home's own rows."""
    number, start, end, rank, row = _at_home(
        documents.first, documents.lengths, documents, world_size
    )
    return Pieces(rank, number, start, end, row, row - start)


def checksums_of_lengths(documents: Documents, world_size: int) -> Int32[np.ndarray, " W"]:
    """Returns the checksums of the segment ids, from the runs of each id and of padding."""
    ids = documents.ids
    gaps, gap_lengths = documents.padding()
    first = np.concatenate([documents.first, gaps])
    lengths = np.concatenate([documents.lengths, gap_lengths])
    ids = np.concatenate([ids, np.zeros(len(gaps), np.int32)])
    number, _, _, rank, row = _at_home(first, lengths, documents, world_size)
    order = np.lexsort((row, rank))
    return checksums_of_runs(
        rank[order], row[order], ids[number[order]], step=ID_STEP, num_ranks=world_size
    )


def _at_home(
    first: Int[np.ndarray, " N"],
    lengths: Int[np.ndarray, " N"],
    documents: Documents,
    world_size: int,
) -> tuple[Int[np.ndarray, " P"], ...]:
    """Cuts ranges of tokens of the batch where a rank's columns end.

    Returns:
      Of each part: the number of its range, its start and end there, its rank, its row.
    """
    columns = documents.columns // world_size
    first_cell = first // columns  # cells of one rank in one batch row, in the order of tokens
    counts = np.where(lengths > 0, (first + lengths - 1) // columns - first_cell + 1, 0)
    number = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    cell = first_cell[number] + within
    begin = cell * columns - first[number]
    start, end = np.maximum(begin, 0), np.minimum(begin + columns, lengths[number])
    batch, rank = np.divmod(cell, world_size)
    return number, start, end, rank, batch * columns + start - begin


def pairs_of_ranks(
    pieces: Pieces,
    lengths: Int[np.ndarray, " D"],
    within: Reach,
    world_size: int,
    tile: tuple[int, int] = (1, 1),
) -> Int64[np.ndarray, " W"]:
    """Returns the query-key pairs of each rank's pieces, with those that tiles compute in vain."""
    keys = lengths[pieces.document]
    pairs = pairs_before(pieces.end, keys, within) - pairs_before(pieces.start, keys, within)
    pairs = pairs + wasted_pairs(pieces.start, pieces.end, keys, within, tile)
    return sums_of_ranks(pieces.rank, pairs, world_size)
