"""A way out for a batch that does not fit: nothing moves, and a plan of the same shapes says so."""

from typing import Any

import numpy as np
from jaxtyping import Int32

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.attention_plan import AttentionPlan
from jax_cp_dispatch.planner.config import CAPACITIES, PlanConfig
from jax_cp_dispatch.planner.documents import Documents
from jax_cp_dispatch.planner.home import home_pieces, pairs_of_ranks


def check_fallback(op: str, fallback: str | None, config: Any, capacities: tuple[str, ...]) -> None:
    """Requires a known fallback, and capacities that say which shapes its plan has."""
    if fallback is None:
        return
    if fallback != "ring":
        raise ValueError(f"{op}: fallback is {fallback!r}; it needs to be 'ring' or None.")
    missing = [name for name in capacities if getattr(config, name) is None]
    if missing:
        raise ValueError(
            f"{op}: fallback='ring' needs plans of equal shapes but {', '.join(missing)} is None. "
            f"Set all capacities in the config, for example by {type(config).__name__}.from_sample."
        )


def metadata_of_fallback(world_size: int, num_slots: int, capacity: int) -> Metadata:
    """Returns metadata that announces more rows than the capacity.

    So if attention uses it nevertheless, it fails on all ranks, like with any plan that does not
    fit.
    """
    received = np.zeros((world_size, world_size + 1), np.uint32)
    received[:, [0, -1]] = capacity + 1
    by_slot = (world_size, num_slots)
    return Metadata(
        dst_rank=np.full(by_slot, -1, np.int32),
        dst_offset=np.zeros(by_slot, np.uint32),
        seq_len=np.zeros(by_slot, np.uint32),
        src_offset=np.zeros(by_slot, np.uint32),
        num_recv_tokens=received,
        num_seqs=np.zeros(world_size, np.int32),
        num_total_recv_tokens=received[:, -1].copy(),
        world_size=world_size,
    )


def plan_of_fallback(
    documents: Documents,
    needs: Int32[np.ndarray, " 5"],
    *,
    world_size: int,
    window: int | None,
    config: PlanConfig,
) -> AttentionPlan:
    """Returns a plan with `fits` false, of the shapes of all plans with this config."""
    q, kv, q_slots, kv_slots, num_runs = (getattr(config, name) or 1 for name in CAPACITIES)
    pairs = pairs_of_ranks(home_pieces(documents, world_size), window, world_size)
    by_run = (world_size, num_runs)
    return AttentionPlan(
        q_metadata=metadata_of_fallback(world_size, q_slots, q),
        kv_metadata=metadata_of_fallback(world_size, kv_slots, kv),
        run_row=np.full(by_run, q, np.int32),
        run_position=np.zeros(by_run, np.int32),
        run_origin=np.zeros(by_run, np.int32),
        num_rows=np.full(world_size, -1, np.int32),
        pairs_before=pairs.astype(np.float32),
        pairs_after=pairs.astype(np.float32),
        needs=np.tile(needs, (world_size, 1)),
        stamp=np.zeros((world_size, 3), np.int32),
        num_tokens=documents.num_tokens // world_size,
        q_capacity=q,
        kv_capacity=kv,
        window=window,
    )
