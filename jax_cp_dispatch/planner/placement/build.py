"""Builds the plan of the keys from the pieces that each rank holds."""

import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch._window import Window, reach
from jax_cp_dispatch.planner.home import pairs_of_ranks
from jax_cp_dispatch.planner.pieces import Pieces, Spans
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
    lengths: Int[np.ndarray, " D"],
    *,
    world_size: int,
    num_tokens: int,
    causal: bool,
    window: Window | None,
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
    pairs = pairs_of_ranks(pieces, lengths, reach("place_tokens", causal, window), world_size)
    return PlacedPlan(
        kv_metadata=metadata_of(transfers, world_size=world_size, num_slots=num_slots),
        **runs_of_pieces(pieces, held, num_runs=num_runs, num_rows=num_tokens, lengths=lengths),
        num_rows=sums_of_ranks(pieces.rank, tokens, world_size).astype(np.int32),
        pairs=pairs.astype(np.float32),
        stamp=stamp,
        num_tokens=num_tokens,
        kv_capacity=size("kv_capacity", "would receive {} rows", received, 1024),
        causal=causal,
        window=window,
    )
