"""The stamp of a placed plan, from the pieces of each rank."""

from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch._window import Window
from jax_cp_dispatch.planner.documents import Documents
from jax_cp_dispatch.planner.pieces import Pieces
from jax_cp_dispatch.planner.segment_ids import words
from jax_cp_dispatch.planner.stamp import ID_STEP, POSITION_STEP, checksums_of_runs, make_stamp
from jax_cp_dispatch.planner.transfers import sums_of_ranks


def stamp_of_pieces(
    documents: Documents,
    pieces: Pieces,
    positions: Int[Any, "B T"] | None,
    *,
    world_size: int,
    num_tokens: int,
    causal: bool,
    window: Window | None,
) -> Int32[np.ndarray, "W 3"]:
    """Returns the stamp of segment ids and positions in placed order.

    Positions that are not given count from 0 in each document. Those of padding do not count.
    """
    ids = checksums_of_runs(
        *_with_padding(pieces, words(documents.ids)[pieces.document], num_tokens, world_size),
        step=ID_STEP,
        num_ranks=world_size,
    )
    runs = pieces.rank, pieces.row, pieces.start
    if positions is not None:
        rank, row, token = _tokens(documents, pieces)
        runs = rank, row, words(np.asarray(positions)).reshape(-1)[token]
    places = checksums_of_runs(*runs, step=POSITION_STEP, num_ranks=world_size)
    return make_stamp(ids, places, causal=causal, window=window)


def _with_padding(pieces: Pieces, ids: Int32[np.ndarray, " P"], num_tokens: int, world_size: int):
    """Returns rank, first row and id of each piece, and of the padding that ends a rank."""
    used = sums_of_ranks(pieces.rank, pieces.end - pieces.start, world_size)
    padded = np.flatnonzero(used < num_tokens)
    rank = np.concatenate([pieces.rank, padded])
    order = np.argsort(rank, kind="stable")
    row = np.concatenate([pieces.row, used[padded]])
    ids = np.concatenate([ids, np.zeros(len(padded), np.int32)])
    return rank[order], row[order], ids[order]


def _tokens(documents: Documents, pieces: Pieces):
    """Returns rank, row and index in the batch of every token that is not padding."""
    length = pieces.end - pieces.start
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    first = documents.first[pieces.document] + pieces.start
    rank, row, first = (np.repeat(x, length) for x in (pieces.rank, pieces.row, first))
    return rank, row + within, first + within
