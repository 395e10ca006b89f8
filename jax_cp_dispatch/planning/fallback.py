"""The plan of a batch that does not fit: it has the same shapes, and nothing may follow it."""

import numpy as np
from jaxtyping import Int32

from jax_cp_dispatch.documents.fingerprint import fallback_fingerprint
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning.config import ALL_CAPACITIES, CAPACITIES, PLACED_CAPACITIES
from jax_cp_dispatch.planning.cuts import no_cuts
from jax_cp_dispatch.planning.piece_table import home_pieces
from jax_cp_dispatch.planning.plan import Plan
from jax_cp_dispatch.planning.request import PlanRequest
from jax_cp_dispatch.planning.runs import fallback_row_ranges


def fallback_plan(request: PlanRequest, needs: Int32[np.ndarray, " 5"], *, is_placed: bool) -> Plan:
    """Returns a plan with `fits` false, of the shapes of all plans with this config.

    `needs`: of the plan with the best balance, as in `Plan.largest_needs`.
    """
    world_size = request.world_size
    sizes = {name: getattr(request.config, name) or 1 for name in ALL_CAPACITIES}
    needed = dict(zip(PLACED_CAPACITIES if is_placed else CAPACITIES, needs, strict=True))
    q = request.num_tokens if is_placed else sizes["q_capacity"]
    kv, num_cuts = sizes["kv_capacity"], sizes["max_cut_pieces"]
    pairs = request.pairs(home_pieces(request.documents, world_size))
    num_held = len(pairs)
    by_run = (num_held, sizes["max_pieces"])

    def metadata(kind: str) -> Metadata:
        need = needed[f"{kind}_capacity"]
        return _announce(world_size, num_held, sizes[f"max_{kind}_transfers"], need)

    return Plan(
        q_metadata=None if is_placed else metadata("q"),
        kv_metadata=metadata("kv"),
        run_row=np.full(by_run, q, np.int32),
        run_position=np.zeros(by_run, np.int32),
        run_origin=np.zeros(by_run, np.int32),
        run_length=np.zeros(by_run, np.int32) if is_placed or request.needs_lengths else None,
        cut_pieces=no_cuts(num_held, num_cuts + sizes["max_linked_pieces"]) if is_placed else None,
        ranges=fallback_row_ranges(request, num_held, num_queries=q, num_keys=kv),
        num_rows=np.full(num_held, -1, np.int32),
        pairs_before=pairs,
        pairs=pairs,
        largest_needs=np.tile(needs, (num_held, 1)),
        fingerprint=fallback_fingerprint(num_held, request.mask),
        num_tokens=request.num_tokens,
        batch=request.documents.batch,
        q_capacity=q,
        kv_capacity=kv,
        max_cut_pieces=num_cuts if is_placed else 0,
        mask=request.mask.kind,
    )


def _announce(world_size: int, num_held: int, num_slots: int, need: int | np.integer) -> Metadata:
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
