"""What ranks hold before anything moves: pieces of documents, and their work."""

import numpy as np
from jaxtyping import Float32

from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.planner.piece_table import PieceTable
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.transfers import sums_of_ranks


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


def pairs_of_ranks(request: PlanRequest, pieces: PieceTable) -> Float32[np.ndarray, " held"]:
    """Returns the query-key pairs of each rank's pieces."""
    pairs = request.seen.pairs(pieces.document, pieces.start, pieces.end)
    pairs = sums_of_ranks(pieces.rank, pairs, request.world_size)
    return pairs[request.held].astype(np.float32)
