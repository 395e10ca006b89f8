"""Builds the plan of the keys from the pieces that each rank holds."""

import dataclasses

import numpy as np

from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner.fingerprint_of_pieces import fingerprint_of_pieces
from jax_cp_dispatch.planner.home import pairs_of_ranks
from jax_cp_dispatch.planner.piece_table import PieceTable, Spans, lay_out
from jax_cp_dispatch.planner.placement.config import CAPACITIES, PlacementConfig
from jax_cp_dispatch.planner.placement.cuts import cut_pieces, cut_table
from jax_cp_dispatch.planner.placement.plan import PlacedPlan
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.row_ranges import row_ranges
from jax_cp_dispatch.planner.runs import runs_of_pieces
from jax_cp_dispatch.planner.static_size import static_size
from jax_cp_dispatch.planner.transfers import (
    list_transfers,
    metadata_of,
    num_sent,
    sums_of_ranks,
)


def plan_of_pieces(
    request: PlanRequest, held: PieceTable, in_order: Mask | None
) -> tuple[PlacedPlan, PlacementConfig]:
    """Builds the plan of one mask for pieces in their rows, which are the same for all masks.

    `in_order`: a mask with arrays, in placed order; None for others.
    """
    order = np.lexsort((held.start, held.document, held.rank))
    assigned = np.stack([held.rank, held.document, held.start, held.end], axis=1)[order]
    pieces, spans = lay_out(assigned, request.seen, held)
    return build_plan(request, pieces, spans, in_order)


def build_plan(
    request: PlanRequest, pieces: PieceTable, spans: Spans, in_order: Mask | None = None
) -> tuple[PlacedPlan, PlacementConfig]:
    """Builds the plan of a placement, as arrays of static size, and a config of what it needs.

    Of one rank, the plan is its part; the sizes and the needs are those of all ranks.
    """
    world_size, documents, held = request.world_size, request.documents, request.held
    transfers = list_transfers(pieces, spans)
    cut = cut_pieces(pieces, documents.lengths, world_size)
    needs = {
        "kv_capacity": sums_of_ranks(transfers.target, transfers.tokens, world_size),
        "max_transfers": num_sent(transfers, world_size),
        "max_pieces": np.bincount(pieces.rank, minlength=world_size),
        "max_cut_pieces": cut.held,
        "max_linked_pieces": cut.linked,
    }
    size = lambda name, what, step: static_size(
        "place_tokens", request.config, name, what, needs[name], step
    )
    num_slots = size("max_transfers", "would send {} ranges of keys", 8)
    num_runs = size("max_pieces", "would hold {} pieces", 8)
    kv_capacity = size("kv_capacity", "would receive {} rows", 1024)
    num_cuts = size("max_cut_pieces", "would hold {} pieces of cut documents", 4)
    what = "would share cut documents with {} pieces on other ranks"
    num_linked = size("max_linked_pieces", what, 4)
    needed = {name: max(int(x.max(initial=0)), 1) for name, x in needs.items()}
    of_rank = {"world_size": world_size, "rank": request.rank}
    rows = sums_of_ranks(pieces.rank, pieces.end - pieces.start, world_size)[held]
    plan = PlacedPlan(
        kv_metadata=metadata_of(transfers, num_slots=num_slots, **of_rank),
        **runs_of_pieces(
            pieces,
            needs["max_pieces"],
            num_runs=num_runs,
            num_rows=request.num_tokens,
            lengths=documents.lengths,
            rank=request.rank,
        ),
        cut_pieces=cut_table(cut, num_slots=num_cuts, num_linked=num_linked, rank=request.rank),
        num_rows=rows.astype(np.int32),
        pairs=pairs_of_ranks(request, pieces),
        largest_needs=np.tile(np.array([needed[x] for x in CAPACITIES], np.int32), (len(rows), 1)),
        fingerprint=fingerprint_of_pieces(request, pieces, pieces, in_order)[held].copy(),
        ranges=row_ranges(
            request, pieces, spans, num_queries=request.num_tokens, num_keys=kv_capacity
        ),
        num_tokens=request.num_tokens,
        batch=documents.batch,
        kv_capacity=kv_capacity,
        max_cut_pieces=num_cuts,
        mask=request.mask.kind,
    )
    return plan, dataclasses.replace(request.config, **needed)
