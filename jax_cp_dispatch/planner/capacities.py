"""Capacities of a plan inside `jit`, and checks of the arrays from which a plan is made."""

import dataclasses

import jax
import jax.core

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch.documents.segment_ids import Ids, check_ids, read_documents
from jax_cp_dispatch.documents.starts import document_starts
from jax_cp_dispatch.documents.table import check_columns, require_host
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import check_mask_arrays, read_mask
from jax_cp_dispatch.planner.block_grid import BlockGrid
from jax_cp_dispatch.planner.config import CAPACITIES, PlanConfig, check_config
from jax_cp_dispatch.planner.received import Capacities
from jax_cp_dispatch.planner.stages import assign, kv_transfers_bound, q_bound


def static_capacities(grid: BlockGrid, config: PlanConfig, mask: Mask) -> Capacities:
    """Returns the configured capacities of a plan inside `jit`, by default always sufficient."""
    q = config.q_capacity or q_bound(grid)
    return Capacities(
        q=q,
        kv=config.kv_capacity or grid.world_size * grid.rows,
        q_transfers=config.max_q_transfers or grid.batch * grid.per_piece,
        kv_transfers=config.max_kv_transfers or kv_transfers_bound(grid, is_causal=mask.is_causal),
        pieces=config.max_pieces or q,
    )


def needs_inside_jit(
    segment_ids: Ids,
    positions: Ids | None = None,
    *,
    world_size: int,
    mask: Mask | str | None = None,
    config: PlanConfig = PlanConfig(),
) -> PlanConfig:
    """Returns the smallest capacities for the plan of one batch that is made inside `jit`.

    Call on the host with concrete arrays, for example in a data loader before a step that plans
    under `jit`: `config.fits(needs_inside_jit(segment_ids, ...))`. Balances the work, but creates
    no plan. For several batches, use the maximum of each capacity. A plan made outside `jit`
    assigns queries differently; its own needs are in `AttentionPlan.needs`.

    Args:
      segment_ids, positions, world_size, mask: see `plan_attention`.
      config: block size and balance tolerance.
    Returns:
      The config with its capacities replaced.
    Raises:
      TypeError, ValueError: as `plan_attention`, except for capacities.
    """
    op = "needs_inside_jit"
    mask = read_mask(op, mask)
    grid = check_shapes(op, segment_ids, positions, world_size, config)
    check_mask_arrays(op, mask, segment_ids.shape)
    require_host(op, segment_ids=segment_ids, positions=positions)
    segment_ids, positions = read_documents(op, segment_ids, positions)
    options = {"mask": mask, "tolerance": config.balance_tolerance}
    with jax.core.eval_context():
        starts = jax.jit(document_starts)(segment_ids, positions)
        needs = assign(starts, grid=grid, **options).needs
        values = [max(int(x), 1) for x in jax.device_get(needs)]
    return dataclasses.replace(config, **dict(zip(CAPACITIES, values, strict=True)))


def check_shapes(op: str, segment_ids, positions, world_size: int, config: PlanConfig) -> BlockGrid:
    """Checks types and shapes of a plan's arguments; returns the blocks of the batch."""
    check_config(op, config)
    check_positive(op, world_size=world_size)
    check_ids(op, segment_ids, positions)
    batch, columns = segment_ids.shape
    check_columns(op, columns, world_size)
    if batch * columns >= 2**31:
        raise ValueError(
            f"{op}: {batch} x {columns} rows exceed 32-bit row numbers. "
            "Plan fewer batch rows at a time."
        )
    columns //= world_size
    return BlockGrid(batch, world_size, columns, min(config.rows_per_block, columns))
