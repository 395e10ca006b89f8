"""A way out for a batch that does not fit: tokens stay, and a plan of the same shapes says so."""

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.documents import Documents
from jax_cp_dispatch.planner.pieces import num_pairs
from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.plan import PlacedPlan
from jax_cp_dispatch.planner.transfers import sums_of_ranks

_OP = "place_tokens"


def check_fallback(fallback: str | None, config: PlacementConfig) -> None:
    """Requires a known fallback, and capacities that say which shapes its plan has."""
    if fallback is None:
        return
    if fallback != "ring":
        raise ValueError(f"{_OP}: fallback is {fallback!r}; it needs to be 'ring' or None.")
    names = ("kv_capacity", "max_transfers", "max_pieces")
    missing = [name for name in names if getattr(config, name) is None]
    if missing:
        raise ValueError(
            f"{_OP}: fallback='ring' needs plans of equal shapes but {', '.join(missing)} is None. "
            "Set all capacities in the config, for example by PlacementConfig.from_sample."
        )


def plan_of_fallback(
    documents: Documents, *, world_size: int, window: int | None, config: PlacementConfig
) -> PlacedPlan:
    """Returns a plan with `fits` false, of the shapes of all plans with this config.

    Its metadata announces more rows than the capacity. So if `placed_attention` uses it
    nevertheless, it fails on all ranks, like with any plan that does not fit.
    """
    num_slots, num_runs = config.max_transfers or 1, config.max_pieces or 1
    capacity = config.kv_capacity or 1
    received = np.zeros((world_size, world_size + 1), np.uint32)
    received[:, [0, -1]] = capacity + 1
    by_slot = (world_size, num_slots)
    metadata = Metadata(
        dst_rank=np.full(by_slot, -1, np.int32),
        dst_offset=np.zeros(by_slot, np.uint32),
        seq_len=np.zeros(by_slot, np.uint32),
        src_offset=np.zeros(by_slot, np.uint32),
        num_recv_tokens=received,
        num_seqs=np.zeros(world_size, np.int32),
        num_total_recv_tokens=received[:, -1].copy(),
        world_size=world_size,
    )
    num_tokens = documents.num_tokens // world_size
    by_run = (world_size, num_runs)
    return PlacedPlan(
        kv_metadata=metadata,
        run_row=np.full(by_run, num_tokens, np.int32),
        run_position=np.zeros(by_run, np.int32),
        run_origin=np.zeros(by_run, np.int32),
        num_rows=np.full(world_size, -1, np.int32),
        pairs=_pairs_of_columns(documents, world_size, window).astype(np.float32),
        stamp=np.zeros((world_size, 3), np.int32),
        num_tokens=num_tokens,
        kv_capacity=capacity,
        window=window,
    )


def moves_of_fallback(documents: Documents, world_size: int) -> tuple[np.ndarray, ...]:
    """Returns source, place and length of every range if all tokens stay in their columns."""
    rows = documents.columns // world_size
    rank, batch = np.divmod(np.arange(world_size * documents.batch), documents.batch)
    source = batch * documents.columns + rank * rows
    return source, np.arange(len(source)) * rows, np.full(len(source), rows)


def _pairs_of_columns(
    documents: Documents, world_size: int, window: int | None
) -> Int[np.ndarray, " W"]:
    """Returns the pairs of each rank's columns."""
    rows = documents.columns // world_size
    last = documents.first + documents.lengths
    cuts = np.arange(0, documents.num_tokens, rows)
    bounds = np.union1d(np.concatenate([documents.first, last]), cuts)
    start, end = bounds[:-1], bounds[1:]
    document = np.searchsorted(documents.first, start, side="right") - 1
    is_used = (document >= 0) & (start < last[document])
    start, end, document = start[is_used], end[is_used], document[is_used]
    first = documents.first[document]
    pairs = num_pairs(end - first, window) - num_pairs(start - first, window)
    return sums_of_ranks(start % documents.columns // rows, pairs, world_size)
