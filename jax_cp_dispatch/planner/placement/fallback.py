"""A placement for a batch that does not fit: tokens stay where they are."""

import numpy as np
from jaxtyping import Int32

from jax_cp_dispatch.documents.fingerprint import fingerprint_of_fallback
from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.planner.fallback import metadata_of_fallback
from jax_cp_dispatch.planner.home import home_pieces, pairs_of_ranks
from jax_cp_dispatch.planner.placement.cuts import no_cuts
from jax_cp_dispatch.planner.placement.plan import PlacedPlan
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.row_ranges import row_ranges_of_fallback


def plan_of_fallback(request: PlanRequest, needs: Int32[np.ndarray, " 5"]) -> PlacedPlan:
    """Returns a plan with `fits` false, of the shapes of all plans with this config.

    `needs` are those of the placement with the best balance.
    """
    config, world_size = request.config, request.world_size
    pairs = pairs_of_ranks(request, home_pieces(request.documents, world_size))
    num_held, num_slots = len(pairs), config.max_transfers or 1
    by_run = (num_held, config.max_pieces or 1)
    num_cuts = config.max_cut_pieces or 1
    return PlacedPlan(
        kv_metadata=metadata_of_fallback(world_size, num_slots, needs[0], num_held=num_held),
        run_row=np.full(by_run, request.num_tokens, np.int32),
        run_position=np.zeros(by_run, np.int32),
        run_origin=np.zeros(by_run, np.int32),
        run_length=np.zeros(by_run, np.int32),
        cut_pieces=no_cuts(num_held, num_cuts + (config.max_linked_pieces or 1)),
        num_rows=np.full(num_held, -1, np.int32),
        pairs=pairs,
        largest_needs=np.tile(needs, (num_held, 1)),
        fingerprint=fingerprint_of_fallback(num_held, request.mask),
        ranges=row_ranges_of_fallback(
            request, num_held, num_queries=request.num_tokens, num_keys=config.kv_capacity or 1
        ),
        num_tokens=request.num_tokens,
        batch=request.documents.batch,
        kv_capacity=config.kv_capacity or 1,
        max_cut_pieces=num_cuts,
        mask=request.mask.kind,
    )


def moves_of_fallback(documents: DocumentTable, world_size: int) -> tuple[np.ndarray, ...]:
    """Returns source, place and length of every range if all tokens stay in their columns."""
    rows = documents.columns // world_size
    rank, batch = np.divmod(np.arange(world_size * documents.batch), documents.batch)
    source = batch * documents.columns + rank * rows
    return source, np.arange(len(source)) * rows, np.full(len(source), rows)
