"""Builds the plan of the keys from the pieces that each rank holds."""

import dataclasses

import numpy as np
from jaxtyping import Int32

from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner.documents import Documents
from jax_cp_dispatch.planner.home import pairs_of_ranks
from jax_cp_dispatch.planner.pieces import Pieces, Spans
from jax_cp_dispatch.planner.placement.config import CAPACITIES, PlacementConfig
from jax_cp_dispatch.planner.placement.cuts import cut_pieces, cut_table
from jax_cp_dispatch.planner.placement.plan import PlacedPlan
from jax_cp_dispatch.planner.runs import runs_of_pieces
from jax_cp_dispatch.planner.sizes import static_size
from jax_cp_dispatch.planner.slices import slice_of_rank
from jax_cp_dispatch.planner.transfers import (
    list_transfers,
    metadata_of,
    num_sent,
    sums_of_ranks,
)


def build_plan(
    pieces: Pieces,
    spans: Spans,
    stamp: Int32[np.ndarray, "W 4"],
    documents: Documents,
    *,
    world_size: int,
    num_tokens: int,
    mask: Mask,
    config: PlacementConfig,
    rank: int | None,
) -> tuple[PlacedPlan, PlacementConfig]:
    """Builds the plan, the placement as arrays of static size, and a config of what it needs.

    With `rank`, the plan is the part of this rank. Its sizes, and the needs, are those of all
    ranks.
    """

    def size(name: str, what: str, needs: np.ndarray, least: int) -> int:
        given = getattr(config, name)
        return static_size("place_tokens", "PlacementConfig", name, what, needs, given, least)

    lengths = documents.lengths
    transfers = list_transfers(pieces, spans)
    sent = num_sent(transfers, world_size)
    num_slots = size("max_transfers", "would send {} ranges of keys", sent, 8)
    held = np.bincount(pieces.rank, minlength=world_size)
    num_runs = size("max_pieces", "would hold {} pieces", held, 8)
    cut = cut_pieces(pieces, lengths, world_size)
    num_cuts = size("max_cut_pieces", "would hold {} pieces of cut documents", cut.held, 4)
    what = "would share cut documents with {} pieces on other ranks"
    num_linked = size("max_linked_pieces", what, cut.linked, 4)
    received = sums_of_ranks(transfers.target, transfers.tokens, world_size)
    tokens = pieces.end - pieces.start
    kv_capacity = size("kv_capacity", "would receive {} rows", received, 1024)
    each = received, sent, held, cut.held, cut.linked
    needs = np.array([max(int(x.max(initial=0)), 1) for x in each], np.int32)
    pairs = pairs_of_ranks(pieces, lengths, mask, world_size)
    part, sizes = slice_of_rank(rank), {"num_runs": num_runs, "num_rows": num_tokens}
    metadata = metadata_of(transfers, world_size=world_size, num_slots=num_slots, rank=rank)
    plan = PlacedPlan(
        kv_metadata=metadata,
        **runs_of_pieces(pieces, held, **sizes, lengths=lengths, rank=rank),
        cut_pieces=cut_table(cut, num_slots=num_cuts, num_linked=num_linked, rank=rank),
        num_rows=sums_of_ranks(pieces.rank, tokens, world_size)[part].astype(np.int32),
        pairs=pairs[part].astype(np.float32),
        needs=np.tile(needs, (len(stamp[part]), 1)),
        stamp=stamp[part].copy(),
        num_tokens=num_tokens,
        batch=documents.batch,
        kv_capacity=kv_capacity,
        max_cut_pieces=num_cuts,
        mask=mask,
    )
    least = dict(zip(CAPACITIES, needs.tolist(), strict=True))
    return plan, dataclasses.replace(config, **least)
