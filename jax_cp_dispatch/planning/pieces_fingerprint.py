"""The fingerprint of a plan made on the host, from the pieces of documents that ranks hold."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch.documents.fingerprint import (
    ID_STEP,
    POSITION_STEP,
    make_fingerprint,
    mask_checksums,
    plan_digest,
    run_checksums,
)
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planning.piece_table import PieceTable
from jax_cp_dispatch.planning.request import PlanRequest


def pieces_fingerprint(
    request: PlanRequest, computed: PieceTable, held: PieceTable, in_order: Mask | None = None
) -> Int32[np.ndarray, "W F"]:
    """Returns the fingerprint of a plan of all ranks.

    Positions of padding do not count.

    Args:
      request: with the segment ids and positions of the batch.
      computed: where each piece is computed.
      held: the order of the rows that ranks pass to attention.
      in_order: a mask of arrays, in this order.
    """
    documents, positions, world_size = request.documents, request.positions, request.world_size
    rank, row, length, document, start = _by_row(held)
    ids = run_checksums(
        *_with_padding(
            (rank, row, length, documents.ids[document]),
            documents.num_tokens // world_size,
            world_size,
        ),
        step=ID_STEP,
        num_ranks=world_size,
    )
    runs = rank, row, length, start
    if positions is not None:
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        rank, row, token = (
            np.repeat(x, length) for x in (rank, row, documents.first[document] + start)
        )
        value = np.asarray(positions).reshape(-1)[token + within]
        runs = rank, row + within, np.ones_like(row), value
    places = run_checksums(*runs, step=POSITION_STEP, num_ranks=world_size)
    own: list[Any] = [ids, places]
    if in_order is not None:
        own.append(mask_checksums(jax.tree.map(np.asarray, in_order), world_size))
    digest = plan_digest(request.config, request.mask.kind, *computed[:4])
    return make_fingerprint(own, digest)


def _by_row(pieces: PieceTable) -> tuple[Int[np.ndarray, " P"], ...]:
    """Returns rank, first row, length, document and start of each piece, by rank and row."""
    order = np.lexsort((pieces.row, pieces.rank))
    columns = pieces.rank, pieces.row, pieces.end - pieces.start, pieces.document, pieces.start
    rank, row, length, document, start = (x[order] for x in columns)
    return rank, row, length, document, start


def _with_padding(
    runs: tuple[Int[np.ndarray, " P"], ...], num_tokens: int, world_size: int
) -> list[Int[np.ndarray, " N"]]:
    """Returns rank, first row, length and id of these runs, and of the padding around them."""
    ends = np.arange(world_size), np.full(world_size, num_tokens), *np.zeros((2, world_size), int)
    rank, row, length, ids = (np.concatenate(x) for x in zip(runs, ends, strict=True))
    order = np.lexsort((row, rank))
    rank, row, length, ids = (x[order] for x in (rank, row, length, ids))
    before = np.zeros_like(row)
    before[1:] = np.where(rank[1:] == rank[:-1], (row + length)[:-1], 0)
    gaps = rank, before, row - before, np.zeros_like(ids)
    runs = rank, row, length, ids
    every = [np.stack(x, axis=1).reshape(-1) for x in zip(gaps, runs, strict=True)]
    return [x[every[2] > 0] for x in every]
