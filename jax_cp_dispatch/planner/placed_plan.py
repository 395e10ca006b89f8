"""Plans the keys of placed tokens, from the pieces that each rank holds."""

import dataclasses

import numpy as np

from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner.config import PLACED_CAPACITIES, PlanConfig
from jax_cp_dispatch.planner.cuts import cut_pieces, cut_table
from jax_cp_dispatch.planner.limits import static_size
from jax_cp_dispatch.planner.piece_table import PieceTable, home_pieces, lay_out
from jax_cp_dispatch.planner.pieces_fingerprint import pieces_fingerprint
from jax_cp_dispatch.planner.plan import Plan
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.row_ranges import row_ranges
from jax_cp_dispatch.planner.runs import list_runs
from jax_cp_dispatch.planner.transfers import (
    list_transfers,
    make_metadata,
    num_sent,
    sums_of_ranks,
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
        "kv_capacity": sums_of_ranks(transfers.target, transfers.tokens, world_size),
        "max_kv_transfers": num_sent(transfers, world_size),
        "max_pieces": np.bincount(pieces.rank, minlength=world_size),
        "max_cut_pieces": cut.held,
        "max_linked_pieces": cut.linked,
    }
    size = lambda name, what, step: static_size(
        "place_tokens", request.config, name, what, needs[name], step
    )
    num_slots = size("max_kv_transfers", "would send {} ranges of keys", 8)
    num_runs = size("max_pieces", "would hold {} pieces", 8)
    kv_capacity = size("kv_capacity", "would receive {} rows", 1024)
    num_cuts = size("max_cut_pieces", "would hold {} pieces of cut documents", 4)
    what = "would share cut documents with {} pieces on other ranks"
    num_linked = size("max_linked_pieces", what, 4)
    needed = {name: max(int(x.max(initial=0)), 1) for name, x in needs.items()}
    largest = np.array([needed[x] for x in PLACED_CAPACITIES], np.int32)
    of_rank = {"world_size": world_size, "rank": request.rank}
    rows = sums_of_ranks(pieces.rank, pieces.end - pieces.start, world_size)[here]
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
