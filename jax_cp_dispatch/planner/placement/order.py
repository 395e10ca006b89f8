"""The order of placed tokens, as a permutation of the tokens of the batch."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner.piece_table import PieceTable
from jax_cp_dispatch.planner.request import PlanRequest


def values_of_ranges(
    start: Int[np.ndarray, " P"], value: Int[np.ndarray, " P"], tokens: Int[np.ndarray, " P"]
) -> Int[np.ndarray, " N"]:
    """Returns the values of consecutive indices, of ranges of indices, minus the first index."""
    order = np.argsort(start)
    return np.repeat((value - start)[order], tokens[order])


def by_columns(
    x: Shaped[Any, "places ..."], batch: int, num_held: int, num_groups: int = 1
) -> Shaped[Any, "B T ..."]:
    """Returns rows of ranks, one rank of a group after another, as columns of the batch rows."""
    rest = x.shape[1:]
    rows = x.shape[0] // max(batch * num_held, 1)
    x = x.reshape(num_groups, num_held, batch // num_groups, rows, *rest).swapaxes(1, 2)
    return x.reshape(batch, num_held * rows, *rest)


def pieces_ascend(pieces: PieceTable) -> bool:
    """Whether the pieces of a document on a rank are in order."""
    order = np.lexsort((pieces.row, pieces.document, pieces.rank))
    rank, document, start = (x[order] for x in (pieces.rank, pieces.document, pieces.start))
    same = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
    return not (same & (start[1:] < start[:-1])).any()


def in_placed_order(request: PlanRequest, moves: Sequence[np.ndarray]) -> Mask | None:
    """Returns a mask with arrays in placed order; None for others.

    `moves`: source, place and length of every range, of all ranks.
    """
    if not request.mask.has_arrays:
        return None
    source, place, tokens = moves
    token = values_of_ranges(place, source, tokens)
    token = token + np.arange(len(token))
    batch = request.documents.batch
    put = lambda x: by_columns(np.asarray(x).reshape(-1)[token], batch, request.world_size)
    return jax.tree.map(put, request.mask)
