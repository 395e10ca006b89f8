"""`plan_attention`: plans attention of packed documents, on the host or inside a program."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.documents.fingerprint import (
    ID_STEP,
    POSITION_STEP,
    checksums,
    checksums_of_mask,
    digest_of_plan,
    fingerprint_of_order,
    make_fingerprint,
    order_fault,
    refused_at_fault,
)
from jax_cp_dispatch.documents.on_host import check_mask_of_documents
from jax_cp_dispatch.documents.order import follows_rules, starts_in_order
from jax_cp_dispatch.documents.segment_ids import Ids, fold_to_int32, read_documents
from jax_cp_dispatch.documents.starts import document_ends
from jax_cp_dispatch.documents.table import Row, documents_of
from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.masks.read import check_mask_arrays, read_mask, read_mask_on_host
from jax_cp_dispatch.planner.attention_plan import AttentionPlan
from jax_cp_dispatch.planner.block_grid import BlockGrid
from jax_cp_dispatch.planner.capacities import check_shapes, static_capacities
from jax_cp_dispatch.planner.config import CAPACITIES, PlanConfig, check_config
from jax_cp_dispatch.planner.constraints import check_traced
from jax_cp_dispatch.planner.fallback import check_fallback
from jax_cp_dispatch.planner.on_host import plan_on_host
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.seen_columns import ranges_of_columns
from jax_cp_dispatch.planner.seen_keys import seen_keys
from jax_cp_dispatch.planner.slices import check_rank
from jax_cp_dispatch.planner.stages import assign, build

_OP = "plan_attention"


@jax.named_scope("cpd.plan")
def plan_attention(
    segment_ids: Shaped[Array | np.ndarray, "..."] | None = None,
    positions: Shaped[Array | np.ndarray, "..."] | None = None,
    *,
    world_size: int,
    lengths: Iterable[Row] | Row | None = None,
    columns: int | None = None,
    mask: Mask | str | None = None,
    config: PlanConfig = PlanConfig(),
    fallback: str | None = None,
    rank: int | None = None,
) -> AttentionPlan:
    """Plans attention over packed documents so that all ranks have nearly equal work.

    Segment 0 is padding, anywhere in a row. A document is a run of one segment id in one batch row;
    it also ends where `positions` does not increase.

    Call outside `jit` with lengths or concrete arrays, also in worker processes of a data loader:
    it then uses no device and does not initialize JAX. Or call inside `jit` or `shard_map` with
    traced arrays that every rank holds in full. Not differentiable.

    From lengths and concrete arrays, the plan moves few bytes, as `config` counts them, for a work
    of each rank of at most `1 + balance_tolerance` times the mean. Inputs are checked, and
    capacities default to what the plan needs, rounded up by at most 1/8 (or 8 blocks, or 8 ranges)
    so that similar batches share compiled programs. Constants inside `jit` count as concrete.

    Traced arrays are planned block by block. Negative segments are padding. An id with several runs
    in a batch row is not an error here, but attention with such a plan fails on all ranks.
    Capacities default to bounds that are always large enough: with T rows per rank, B batch rows
    and J blocks of a rank in one of them, `q_capacity` is 2 * T + block, `kv_capacity` is W * T,
    `max_q_transfers` is B * J, `max_kv_transfers` is B * (J + W - 1), or B * (J + 2 * (W - 1)) if
    queries see later keys, and `max_pieces` is `q_capacity`. If given capacities are too small,
    `AttentionPlan.fits` is false. The counts in the metadata then contain the true need, and
    `dispatch` fails on all ranks.

    Args:
      segment_ids: integers [B, columns] of any dtype; each rank holds an equal range of columns, in
        rank order.
      positions: integers of the same shape; None if segment ids alone separate the documents.
        Positions that you pass to attention are compared with these; None counts from 0.
      world_size: number of ranks W; must divide the columns.
      lengths: instead of segment ids: tokens of the documents, in order; one list per batch row, or
        one list for a single row. The rest of a row is padding.
      columns: with lengths only; tokens of a batch row, a multiple of W. None: the longest row,
        rounded up.
      mask: which keys a query sees, of `jax_cp_dispatch.masks`, with arrays `[B, columns]`. None:
        causal.
      config: block size, capacities, costs and balance tolerance.
      fallback: outside `jit`, "ring" returns, instead of an error for a batch that does not fit the
        config, a plan of the usual shapes that moves nothing. Its `fits` is false: use a ring for
        this batch. Needs all capacities. Inside `jit`, `fits` is false for such a plan anyway.
      rank: outside `jit`, returns the part of this rank alone, like `AttentionPlan.slice_of`, but
        without arrays of all ranks, whose counts of rows grow with W * W. It is the index on the
        mesh axis, not that of a process. None: all ranks.
    Returns:
      The plan for all ranks, the same in every process with the same inputs.
    Raises:
      TypeError: inputs are not integers, or `mask` is not a mask.
      ValueError: shapes do not match. With concrete inputs also: a segment id is negative, or
        occurs in separate runs of one batch row whose positions do not start again; a position
        exceeds 32 bits; or a capacity is too small and there is no fallback. Or the arrays of
        the mask have another shape.
    """
    mask = read_mask(_OP, mask)
    check_config(_OP, config)
    check_integer(_OP, "world_size", world_size)
    world_size = int(world_size)
    check_fallback(_OP, fallback, config, CAPACITIES)
    check_rank(_OP, rank, world_size)
    if segment_ids is not None and lengths is None:
        if isinstance(segment_ids, list | tuple):
            raise TypeError(
                f"{_OP}: segment_ids is of type {type(segment_ids).__name__}; it needs to be an "
                "array. Pass numpy.asarray(segment_ids), or document lengths as lengths=."
            )
        if columns is not None:
            raise ValueError(f"{_OP}: got columns without lengths. Omit columns.")
        grid = check_shapes(_OP, segment_ids, positions, world_size, config)
        check_mask_arrays(_OP, mask, segment_ids.shape)
        arrays = jax.tree.leaves((segment_ids, positions, mask))
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            check_traced(_OP, config)
            if rank is not None:
                raise ValueError(
                    f"{_OP}: rank is {rank} but the plan is made inside jit, by all ranks. Omit "
                    "rank, or plan outside jit."
                )
            return plan_inside(segment_ids, positions, grid=grid, mask=mask, config=config)
    documents = documents_of(
        _OP,
        world_size=world_size,
        lengths=lengths,
        segment_ids=segment_ids,
        positions=positions,
        columns=columns,
    )
    shape = documents.batch, documents.columns
    mask = read_mask_on_host(_OP, mask, shape)
    check_mask_of_documents(_OP, mask, documents)
    seen = seen_keys(mask, documents)
    request = PlanRequest(documents, positions, world_size, seen, config, rank)
    return plan_on_host(request, fallback=fallback)


@jax.named_scope("cpd.plan")
def plan_of_rank(
    packed: tuple[Mask, Ids, Ids | None], *, world_size: int, config: PlanConfig, rank: Any
) -> AttentionPlan:
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
) -> AttentionPlan:
    """Returns a plan of traced arrays.

    With `rank`, the index on the mesh axis, it is that of `plan_of_rank`.
    """
    world_size = grid.world_size
    capacities = static_capacities(grid, config, mask)
    starts, in_order = starts_in_order(*read_documents(_OP, segment_ids, positions))
    fault = order_fault(in_order, follows_rules(mask, starts, document_ends(starts)))
    assignment = assign(starts, grid=grid, mask=mask, tolerance=config.balance_tolerance)
    if rank is not None:  # the batch is that of this program
        if isinstance(mask, StaticMask):  # without runs, which would compile to more
            assignment = assignment._replace(ranges=ranges_of_columns(mask, starts))
        fingerprint = fingerprint_of_order(fault, rank)[None, :2]
    else:
        own = _own_checksums(segment_ids, positions, starts, mask, world_size)
        received = assignment.received
        digest = digest_of_plan(config, mask.kind, received.block, received.rank)
        fingerprint = refused_at_fault(make_fingerprint(own, digest), fault)
    return AttentionPlan(
        **build(assignment, grid=grid, capacities=capacities, rank=rank)._asdict(),
        pairs_before=assignment.pairs_before,
        pairs_after=assignment.pairs_after,
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
        places = jnp.arange(starts.shape[1], dtype=jnp.int32)[None] - starts
    else:
        places = fold_to_int32(positions)
    ids = checksums(fold_to_int32(segment_ids), world_size, step=ID_STEP)
    of_places = checksums(places, world_size, step=POSITION_STEP, counts=starts >= 0)
    own = [jnp.asarray(ids), jnp.asarray(of_places)]
    if mask.has_arrays:
        own.append(jnp.asarray(checksums_of_mask(mask, world_size)))
    return own
