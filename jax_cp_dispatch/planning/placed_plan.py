"""The plan and the order of placed tokens, from the pieces that each rank holds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planning.config import PLACED_CAPACITIES, PlanConfig
from jax_cp_dispatch.planning.cuts import cut_pieces, cut_table
from jax_cp_dispatch.planning.piece_table import PieceTable, home_pieces, lay_out
from jax_cp_dispatch.planning.pieces_fingerprint import pieces_fingerprint
from jax_cp_dispatch.planning.plan import Plan
from jax_cp_dispatch.planning.request import PlanRequest, static_size
from jax_cp_dispatch.planning.runs import list_runs, row_ranges
from jax_cp_dispatch.planning.transfers import (
    list_transfers,
    make_metadata,
    num_sent,
    rank_sums,
)


def plan_placed(
    request: PlanRequest, held: PieceTable, in_order: Mask | None
) -> tuple[Plan, PlanConfig]:
    """Returns the plan of one mask for pieces in their rows, which are the same for all masks.

    Of one rank, the plan is its part. Also returns a config of what all ranks need. `in_order` is a
    mask with arrays, in placed order; None for others.
    """
    order = np.lexsort((held.start, held.document, held.rank))
    assigned = np.stack([held.rank, held.document, held.start, held.end], axis=1)[order]
    pieces, spans = lay_out(assigned, request.seen, held)
    world_size, documents, here = request.world_size, request.documents, request.held
    transfers = list_transfers(pieces, spans)
    cut = cut_pieces(pieces, documents.lengths, world_size)
    needs = {
        "kv_capacity": rank_sums(transfers.target, transfers.tokens, world_size),
        "max_kv_transfers": num_sent(transfers, world_size),
        "max_pieces": np.bincount(pieces.rank, minlength=world_size),
        "max_cut_pieces": cut.held,
        "max_linked_pieces": cut.linked,
    }
    size = lambda name, what, step, most=None: static_size(
        "place_tokens", request.config, name, what, needs[name], step, most
    )
    num_slots = size("max_kv_transfers", "would send {} ranges of keys", 8)
    num_runs = size("max_pieces", "would hold {} pieces", 8)
    all_tokens = world_size * request.num_tokens
    kv_capacity = size("kv_capacity", "would receive {} rows", 1024, all_tokens)
    num_cuts = size("max_cut_pieces", "would hold {} pieces of cut documents", 4)
    what = "would share cut documents with {} pieces on other ranks"
    num_linked = size("max_linked_pieces", what, 4)
    needed = {name: max(int(x.max(initial=0)), 1) for name, x in needs.items()}
    largest = np.array([needed[x] for x in PLACED_CAPACITIES], np.int32)
    of_rank = {"world_size": world_size, "rank": request.rank}
    rows = rank_sums(pieces.rank, pieces.end - pieces.start, world_size)[here]
    plan = Plan(
        kv_metadata=make_metadata(transfers, num_slots=num_slots, **of_rank),
        **list_runs(
            pieces,
            needs["max_pieces"],
            num_runs=num_runs,
            num_rows=request.num_tokens,
            lengths=documents.lengths,
            rank=request.rank,
        ),
        cut_pieces=cut_table(cut, num_slots=num_cuts, num_linked=num_linked, rank=request.rank),
        num_rows=rows.astype(np.int32),
        pairs_before=request.pairs(home_pieces(documents, world_size)),
        pairs=request.pairs(pieces),
        largest_needs=np.tile(largest, (len(rows), 1)),
        fingerprint=pieces_fingerprint(request, pieces, pieces, in_order)[here].copy(),
        ranges=row_ranges(
            request, pieces, spans, num_queries=request.num_tokens, num_keys=kv_capacity
        ),
        num_tokens=request.num_tokens,
        batch=documents.batch,
        q_capacity=request.num_tokens,
        kv_capacity=kv_capacity,
        max_cut_pieces=num_cuts,
        mask=request.mask.kind,
    )
    return plan, dataclasses.replace(request.config, **needed)


def expand_ranges(
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


def put_mask_in_order(request: PlanRequest, moves: Sequence[np.ndarray]) -> Mask | None:
    """Returns a mask with arrays in placed order; None for others.

    `moves`: source, place and length of every range, of all ranks.
    """
    if not request.mask.has_arrays:
        return None
    source, place, tokens = moves
    token = expand_ranges(place, source, tokens)
    token = token + np.arange(len(token))
    batch = request.documents.batch
    put = lambda x: by_columns(np.asarray(x).reshape(-1)[token], batch, request.world_size)
    return jax.tree.map(put, request.mask)


def list_moves(request: PlanRequest, pieces: PieceTable) -> list[np.ndarray]:
    """Returns source, place and length of every range, by place; padding comes last per rank."""
    documents, world_size, num_tokens = request.documents, request.world_size, request.num_tokens
    tokens = pieces.end - pieces.start
    source = documents.first[pieces.document] + pieces.start
    place = pieces.rank * num_tokens + pieces.row
    used = np.zeros(world_size, np.int64)
    np.add.at(used, pieces.rank, tokens)
    free_first = np.arange(world_size) * num_tokens + used
    padding = _match(*documents.padding(), free_first, num_tokens - used)
    moves = [np.concatenate(x) for x in zip((source, place, tokens), padding, strict=True)]
    order = np.argsort(moves[1])
    return [x[order] for x in moves]


def no_moves(documents: DocumentTable, world_size: int) -> tuple[np.ndarray, ...]:
    """Returns source, place and length of every range if all tokens stay in their columns."""
    rows = documents.columns // world_size
    rank, batch = np.divmod(np.arange(world_size * documents.batch), documents.batch)
    source = batch * documents.columns + rank * rows
    return source, np.arange(len(source)) * rows, np.full(len(source), rows)


def _match(source, source_tokens, place, place_tokens):
    """Splits two lists of ranges with equal sums into ranges of equal length on both sides."""
    source_ends, place_ends = np.cumsum(source_tokens), np.cumsum(place_tokens)
    ends = np.union1d(source_ends, place_ends)
    ends = ends[ends > 0]
    starts = np.concatenate([[0], ends])[:-1].astype(np.int64)
    i = np.searchsorted(source_ends, starts, side="right")
    j = np.searchsorted(place_ends, starts, side="right")
    first = [
        of[k] + starts - (ends_of[k] - tokens_of[k])
        for of, ends_of, tokens_of, k in (
            (source, source_ends, source_tokens, i),
            (place, place_ends, place_tokens, j),
        )
    ]
    return first[0], first[1], ends - starts
