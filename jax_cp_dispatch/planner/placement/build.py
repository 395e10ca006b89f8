"""Builds the plan of the keys from the pieces that each rank holds."""

import numpy as np
from jaxtyping import Int32

from jax_cp_dispatch.planner.pieces import Pieces, Spans, num_pairs
from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.plan import PlacedPlan
from jax_cp_dispatch.planner.runs import runs_of_pieces
from jax_cp_dispatch.planner.sizes import static_size
from jax_cp_dispatch.planner.transfers import (
    list_transfers,
    metadata_of,
    num_sent,
    sums_of_ranks,
)


def build_plan(
    pieces: Pieces,
    spans: Spans,
    stamp: Int32[np.ndarray, "W 3"],
    *,
    world_size: int,
    num_tokens: int,
    window: int | None,
    config: PlacementConfig,
) -> PlacedPlan:
    """Builds the plan: the placement as arrays of static size."""

    def size(name: str, what: str, needs: np.ndarray, least: int) -> int:
        given = getattr(config, name)
        return static_size("place_tokens", "PlacementConfig", name, what, needs, given, least)

    transfers = list_transfers(pieces, spans)
    sent = num_sent(transfers, world_size)
    num_slots = size("max_transfers", "would send {} ranges of keys", sent, 8)
    held = np.bincount(pieces.rank, minlength=world_size)
    num_runs = size("max_pieces", "would hold {} pieces", held, 8)
    received = sums_of_ranks(transfers.target, transfers.tokens, world_size)
    tokens = pieces.end - pieces.start
    pairs = num_pairs(pieces.end, window) - num_pairs(pieces.start, window)
    return PlacedPlan(
        kv_metadata=metadata_of(transfers, world_size=world_size, num_slots=num_slots),
        **runs_of_pieces(pieces, held, num_runs=num_runs, num_rows=num_tokens),
        num_rows=sums_of_ranks(pieces.rank, tokens, world_size).astype(np.int32),
        pairs=sums_of_ranks(pieces.rank, pairs, world_size).astype(np.float32),
        stamp=stamp,
        num_tokens=num_tokens,
        kv_capacity=size("kv_capacity", "would receive {} rows", received, 1024),
        window=window,
    )
