"""Plans attention inside `jit`: two compiled stages, and static capacities."""

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch.documents.fingerprint import (
    ID_STEP,
    checksums,
    make_fingerprint,
    mask_checksums,
    order_fault,
    order_fingerprint,
    place_checksums,
    plan_digest,
    refused_at_fault,
)
from jax_cp_dispatch.documents.order import (
    document_ends,
    document_starts,
    follows_rules,
    starts_in_order,
)
from jax_cp_dispatch.documents.segment_ids import Ids, check_ids, number_ids, read_documents
from jax_cp_dispatch.documents.table import check_columns, require_host
from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.masks.read import check_mask_arrays, read_mask
from jax_cp_dispatch.planning.block_grid import BlockGrid, Capacities
from jax_cp_dispatch.planning.config import CAPACITIES, PlanConfig, check_config, check_traced
from jax_cp_dispatch.planning.key_limit import kv_bound
from jax_cp_dispatch.planning.plan import Plan
from jax_cp_dispatch.planning.seen_inside import column_ranges
from jax_cp_dispatch.planning.stages import assign, build, kv_transfers_bound, q_bound

_OP = "plan_attention"


@jax.named_scope("cpd.plan")
def rank_plan(
    packed: tuple[Mask, Ids, Ids | None], *, world_size: int, config: PlanConfig, rank: Any
) -> Plan:
    """`plan_attention` inside the program that follows it.

    It has `ranges` for every mask, of this rank alone: for all ranks, they would be as many times
    as large. The fingerprint has no checksums of the batch.

    Args:
      packed: mask, segment ids and positions of all ranks, traced.
      rank: the index on the mesh axis.
    """
    mask, segment_ids, positions = packed
    grid = check_shapes(_OP, segment_ids, positions, world_size, config)
    check_mask_arrays(_OP, mask, segment_ids.shape)
    check_traced(_OP, config)
    options = {"grid": grid, "mask": mask, "config": config, "rank": rank}
    return plan_inside(segment_ids, positions, **options)


def plan_inside(
    segment_ids: Ids,
    positions: Ids | None,
    *,
    grid: BlockGrid,
    mask: Mask,
    config: PlanConfig,
    rank: Any = None,
) -> Plan:
    """Returns a plan of traced arrays.

    With `rank`, the index on the mesh axis, it is that of `rank_plan`.
    """
    world_size = grid.world_size
    capacities = static_capacities(grid, config, mask)
    segment_ids, positions = read_documents(_OP, segment_ids, positions)
    starts, in_order = starts_in_order(segment_ids, positions)
    fault = order_fault(in_order, follows_rules(mask, starts, document_ends(starts)))
    assignment = assign(starts, grid=grid, mask=mask, tolerance=config.balance_tolerance)
    if rank is not None:  # the batch is that of this program
        if isinstance(mask, StaticMask):  # without runs, which would compile to more
            assignment = assignment._replace(ranges=column_ranges(mask, starts))
        fingerprint = order_fingerprint(fault, rank)[None, :2]
    else:
        own = _own_checksums(segment_ids, positions, starts, mask, world_size)
        received = assignment.received
        digest = plan_digest(config, mask.kind, received.block, received.rank)
        fingerprint = refused_at_fault(make_fingerprint(own, digest), fault)
    return Plan(
        **build(assignment, grid=grid, capacities=capacities, rank=rank)._asdict(),
        pairs_before=assignment.pairs_before,
        pairs=assignment.pairs,
        fingerprint=fingerprint,
        num_tokens=grid.rows,
        batch=grid.batch,
        q_capacity=capacities.q,
        kv_capacity=capacities.kv,
        mask=mask.kind,
    )


def _own_checksums(
    segment_ids: Ids,
    positions: Ids | None,
    starts: Int32[Array, "B T"],
    mask: Mask,
    world_size: int,
) -> list[Int32[Array, " W"]]:
    """Returns the ranks' checksums; positions that are not given count from 0 in each document."""
    if positions is None:
        positions = jnp.arange(starts.shape[1], dtype=jnp.int32)[None] - starts
    ids = checksums(number_ids(segment_ids), world_size, step=ID_STEP)
    of_places = place_checksums(jnp.asarray(positions), world_size, counts=starts >= 0)
    own = [jnp.asarray(ids), jnp.asarray(of_places)]
    if mask.has_arrays:
        own.append(jnp.asarray(mask_checksums(mask, world_size)))
    return own


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
    assigns queries differently; its own needs are in `Plan.needs`.

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


def static_capacities(grid: BlockGrid, config: PlanConfig, mask: Mask) -> Capacities:
    """Returns the configured capacities of a plan inside `jit`, by default always sufficient."""
    q = config.q_capacity or q_bound(grid)
    return Capacities(
        q=q,
        kv=config.kv_capacity or kv_bound(grid, mask),
        q_transfers=config.max_q_transfers or grid.batch * grid.per_piece,
        kv_transfers=config.max_kv_transfers or kv_transfers_bound(grid, is_causal=mask.is_causal),
        pieces=config.max_pieces or q,
    )


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
