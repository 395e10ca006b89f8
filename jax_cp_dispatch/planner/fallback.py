"""The plan of a batch that does not fit: it has the same shapes, and nothing may follow it."""

from typing import Any

import numpy as np
from jaxtyping import Int32

from jax_cp_dispatch.documents.fingerprint import fingerprint_of_fallback
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.attention_plan import AttentionPlan
from jax_cp_dispatch.planner.config import CAPACITIES
from jax_cp_dispatch.planner.home import home_pieces, pairs_of_ranks
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.row_ranges import row_ranges_of_fallback

# Functions that find all capacities, by the function that takes the config.
_FIT = {"plan_attention": "fit_plan_config", "place_tokens": "fit_placement_config"}


def check_fallback(op: str, fallback: str | None, config: Any, capacities: tuple[str, ...]) -> None:
    """Requires a known fallback, and capacities that say which shapes its plan has."""
    if fallback is None:
        return
    if fallback != "ring":
        raise ValueError(f"{op}: fallback is {fallback!r}; it needs to be 'ring' or None.")
    missing = [name for name in capacities if getattr(config, name) is None]
    if missing:
        raise ValueError(
            f"{op}: fallback='ring' needs plans of equal shapes, but the config has no "
            f"{', '.join(missing)}. Pass a config with all capacities, for example from "
            f"{_FIT[op]}."
        )


def metadata_of_fallback(
    world_size: int, num_slots: int, need: int | np.integer, *, num_held: int
) -> Metadata:
    """Returns metadata of `num_held` ranks that announces the rows that the batch needs.

    So if attention uses it nevertheless, the error names them.
    """
    received = np.zeros((num_held, world_size + 1), np.uint32)
    received[:, [0, -1]] = need
    by_slot = (num_held, num_slots)
    return Metadata(
        dst_rank=np.full(by_slot, -1, np.int32),
        dst_offset=np.zeros(by_slot, np.uint32),
        seq_len=np.zeros(by_slot, np.uint32),
        src_offset=np.zeros(by_slot, np.uint32),
        num_recv_tokens=received,
        num_seqs=np.zeros(num_held, np.int32),
        num_total_recv_tokens=received[:, -1].copy(),
        world_size=world_size,
    )


def plan_of_fallback(request: PlanRequest, needs: Int32[np.ndarray, " 5"]) -> AttentionPlan:
    """Returns a plan with `fits` false, of the shapes of all plans with this config."""
    config, world_size = request.config, request.world_size
    q, kv, q_slots, kv_slots, num_runs = (getattr(config, name) or 1 for name in CAPACITIES)
    pairs = pairs_of_ranks(request, home_pieces(request.documents, world_size))
    num_held = len(pairs)
    by_run = (num_held, num_runs)
    return AttentionPlan(
        q_metadata=metadata_of_fallback(world_size, q_slots, needs[0], num_held=num_held),
        kv_metadata=metadata_of_fallback(world_size, kv_slots, needs[1], num_held=num_held),
        run_row=np.full(by_run, q, np.int32),
        run_position=np.zeros(by_run, np.int32),
        run_origin=np.zeros(by_run, np.int32),
        run_length=np.zeros(by_run, np.int32) if request.needs_lengths else None,
        ranges=row_ranges_of_fallback(request, num_held, num_queries=q, num_keys=kv),
        num_rows=np.full(num_held, -1, np.int32),
        pairs_before=pairs,
        pairs_after=pairs,
        largest_needs=np.tile(needs, (num_held, 1)),
        fingerprint=fingerprint_of_fallback(num_held, request.mask),
        num_tokens=request.num_tokens,
        batch=request.documents.batch,
        q_capacity=q,
        kv_capacity=kv,
        mask=request.mask.kind,
    )
