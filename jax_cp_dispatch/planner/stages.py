"""The two compiled stages of planning inside `jit`: blocks are assigned; then arrays are built.

Capacities are set between them, so that `PlanConfig.needs` can stop after the first stage. Below,
G counts blocks of the batch, X ranges of keys that move.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Integer

from jax_cp_dispatch.masks import Mask, MaskRanges
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.balance import balance_blocks
from jax_cp_dispatch.planner.blocks import (
    BlockGrid,
    block_ranges,
    divided,
    document_starts,
    places,
    repeated,
    running_sum,
    running_sum_by_key,
    sum_by_key,
)
from jax_cp_dispatch.planner.received import Capacities, Received
from jax_cp_dispatch.planner.rows_inside import rows_inside
from jax_cp_dispatch.planner.seen_columns import seen_columns
from jax_cp_dispatch.planner.slots import Sent, Slots, by_sender, to_metadata
from jax_cp_dispatch.planner.transfers import Transfers


class Assignment(NamedTuple):
    """The assignment, before capacities are known."""

    starts: Int32[Array, "B T"]  # first column of each column's document; -1: padding
    received: Received
    queries: Transfers
    keys: Transfers
    slots: tuple[Slots, ...]  # of queries, and of keys
    begins_run: Bool[Array, "B W J block"]
    num_rows: Int32[Array, " W"]  # of queries that each rank receives
    needs: Int32[Array, " 5"]
    pairs_before: Float32[Array, " W"]
    pairs_after: Float32[Array, " W"]
    lengths: Int32[Array, "B T"] | None  # of each column's document, if keys depend on it
    ranges: MaskRanges | None  # of a mask with arrays, what each column sees


class PlanArrays(NamedTuple):
    """The arrays of `AttentionPlan`, with its names."""

    q_metadata: Metadata
    kv_metadata: Metadata
    run_row: Int32[Array, "W P"]
    run_position: Int32[Array, "W P"]
    run_origin: Int32[Array, "W P"]
    num_rows: Int32[Array, " W"]
    needs: Int32[Array, "W 5"]
    run_length: Int32[Array, "W P"] | None
    ranges: MaskRanges | None


def q_bound(grid: BlockGrid) -> int:
    """Returns the maximum rows of queries of a rank, by the bound in `balance_blocks`."""
    return min(2 * grid.rows + grid.block, grid.world_size * grid.rows)


def kv_transfers_bound(grid: BlockGrid, *, is_causal: bool) -> int:
    """Returns the maximum ranges of keys that a rank sends, if every query sees its own key.

    If the mask is causal, each range ends with a block of queries. Of those that end on another
    rank than they begin, a rank receives at most one from each sender and batch row, because ranges
    do not overlap. Otherwise, it receives one more: blocks of queries before those of the sender
    see its first keys, which are one range.
    """
    others = grid.world_size - 1
    return grid.batch * (grid.per_piece + (others if is_causal else 2 * others))


@partial(jax.jit, static_argnames=("grid", "tolerance"))
def assign(
    segment_ids: Integer[Array, "B T"],
    positions: Integer[Array, "B T"] | None,
    *,
    grid: BlockGrid,
    mask: Mask,
    tolerance: float,
) -> Assignment:
    """Assigns each block to a rank; lists what moves."""
    starts = document_starts(segment_ids, positions)
    seen = seen_columns(mask, starts)
    first, cost, shift = block_ranges(seen.first, grid, seen.pairs)
    last = None if seen.last is None else grid.split(seen.last, fill=0).max(-1)
    length = jnp.broadcast_to(grid.lengths, grid.shape)
    live = first >= 0
    num_rows = jnp.where(live, length, 0)
    rank = balance_blocks(cost, num_rows, row_limit=q_bound(grid), tolerance=tolerance)
    rank = jnp.where(live, rank, grid.world_size).reshape(-1)

    begins = _run_begins(starts, rank, grid)
    num_runs = begins.sum(-1, dtype=jnp.int32)
    received = _received(rank, (first, last), (num_runs, cost), grid)
    queries, keys = _query_transfers(received, grid), _key_transfers(received, grid)
    slots = by_sender((queries, keys), grid.world_size)

    *_, length = places(received.block, grid)
    counted = (length, received.num_keys, received.num_runs, received.pairs)
    num_rows, num_keys, num_runs, pairs = sum_by_key(counted, received.rank, grid.world_size)
    unit = jnp.ldexp(jnp.float32(1), shift)
    needs = jnp.stack([num_rows, num_keys, *(x.counts for x in slots), num_runs])
    return Assignment(
        starts=starts,
        received=received,
        queries=queries,
        keys=keys,
        slots=slots,
        begins_run=begins,
        num_rows=num_rows,
        needs=needs.max(1),
        pairs_before=cost.sum((0, 2), dtype=jnp.int32).astype(jnp.float32) * unit,
        pairs_after=pairs.astype(jnp.float32) * unit,
        lengths=seen.lengths,
        ranges=seen.ranges,
    )


@partial(jax.jit, static_argnames=("grid", "capacities"))
def build(
    plan: Assignment, *, grid: BlockGrid, capacities: Capacities, rank: Any = None
) -> PlanArrays:
    """Builds the arrays of an assignment; cuts off what exceeds the capacities.

    With `rank`, `ranges` are those of this rank alone: their size grows with the tokens.
    """
    received = plan.received
    # Without its runs, a block would attend to wrong keys. It is not sent, which the counts show.
    has_runs = received.runs_before + received.num_runs <= capacities.pieces
    queries = Sent(plan.queries, plan.slots[0], has_runs, capacities.q_transfers)
    keys = Sent(plan.keys, plan.slots[1], None, capacities.kv_transfers)
    q_metadata, kv_metadata = to_metadata((queries, keys), grid.world_size)
    row, position, origin, length = _runs(plan, grid, capacities)
    return PlanArrays(
        q_metadata=q_metadata,
        kv_metadata=kv_metadata,
        run_row=row,
        run_position=position,
        run_origin=origin,
        num_rows=plan.num_rows,
        needs=jnp.broadcast_to(plan.needs, (grid.world_size, len(capacities))),
        run_length=length,
        ranges=None if plan.ranges is None else _ranges(plan, grid, capacities, rank),
    )


def _ranges(plan: Assignment, grid: BlockGrid, capacities: Capacities, rank: Any) -> MaskRanges:
    assert plan.ranges is not None
    ranks = jnp.arange(grid.world_size, dtype=jnp.int32) if rank is None else rank[None]
    return rows_inside(plan.ranges, plan.received, grid, capacities, ranks)


def _received(
    rank: Int32[Array, " G"],
    keys: tuple[Int32[Array, "B W J"], Int32[Array, "B W J"] | None],
    counts: tuple[Int32[Array, "B W J"], Int32[Array, "B W J"]],
    grid: BlockGrid,
) -> Received:
    """Lists what ranks receive.

    Args:
      rank: of each block.
      keys: the first of each block, and one past the last; None: the block's own.
      counts: runs that begin in each block, and its pairs.
      grid: the blocks.
    """
    # Sorts take what later steps need of each block along; gathers would compile separately.
    first, last = keys
    block = jnp.arange(grid.num_blocks, dtype=jnp.int32)
    values = [grid.block_of(jnp.maximum(first, 0)), *counts]
    if last is not None:
        values.append(grid.block_of(jnp.maximum(last - 1, 0)))
    values = (x.reshape(-1) for x in values)
    rank, block, first_block, num_runs, pairs, *lasts = lax.sort((rank, block, *values), num_keys=1)
    last_block = lasts[0] if lasts else block
    previous = jnp.pad(last_block[:-1], (1, 0))
    follows = jnp.pad(rank[1:] == rank[:-1], (1, 0))
    first_block = jnp.where(follows, jnp.maximum(first_block, previous + 1), first_block)
    _, home, start, length = places(last_block, grid)
    _, first_home, first_start, _ = places(first_block, grid)
    first_column = first_home * grid.columns + first_start
    end_column = home * grid.columns + start + length
    if lasts:
        *_, length = places(block, grid)
        first_column = jnp.where(first_block > last_block, end_column, first_column)
    num_keys = end_column - first_column
    values = (length, num_keys, num_runs)
    sums = running_sum_by_key(values, rank, grid.world_size)
    row, kv_row, runs_before = (x - y for x, y in zip(sums, values, strict=True))
    return Received(
        block=block,
        rank=rank,
        row=row,
        first_column=first_column,
        kv_row=kv_row,
        num_keys=num_keys,
        runs_before=runs_before,
        num_runs=num_runs,
        pairs=pairs,
        last_block=lasts[0] if lasts else None,
    )


def _query_transfers(received: Received, grid: BlockGrid) -> Transfers:
    batch, home, start, length = places(received.block, grid)
    is_used = received.rank < grid.world_size
    return Transfers(
        source=jnp.where(is_used, home, grid.world_size),
        target=received.rank,
        source_row=batch * grid.columns + start,
        target_row=received.row,
        tokens=jnp.where(is_used, length, 0),
    )


def _key_transfers(received: Received, grid: BlockGrid) -> Transfers:
    """Cuts the range of keys of each block where it crosses from one home to the next."""
    is_causal = received.last_block is None
    last_block = received.block if received.last_block is None else received.last_block
    batch, home, start, length = places(last_block, grid)
    end = home * grid.columns + start + length
    first_home, _ = divided(received.first_column, grid.columns)
    is_used = received.rank < grid.world_size
    if not is_causal:
        is_used &= received.num_keys > 0
    count = jnp.where(is_used, home - first_home + 1, 0)
    # Ranges of all ranks, cut where they cross: no more than one for each block, and those cuts.
    size = kv_transfers_bound(grid, is_causal=True) * grid.world_size
    of, first_place, total = repeated(count, size)
    place = jnp.arange(size, dtype=jnp.int32)
    is_used = place < total
    by_block = (first_home - first_place, received.first_column, end, received.rank, batch)
    by_block = jnp.stack([*by_block, received.kv_row - received.first_column], -1)
    source, first_column, end, rank, batch, to_row = by_block[of].T
    source = source + place
    first = jnp.maximum(first_column, source * grid.columns)
    last = jnp.minimum(end, (source + 1) * grid.columns)
    return Transfers(
        source=jnp.where(is_used, source, grid.world_size),
        target=jnp.where(is_used, rank, grid.world_size),
        source_row=batch * grid.columns + first - source * grid.columns,
        target_row=first + to_row,
        tokens=jnp.where(is_used, last - first, 0),
    )


def _run_begins(
    starts: Int32[Array, "B T"], rank: Int32[Array, " G"], grid: BlockGrid
) -> Bool[Array, "B W J block"]:
    """Whether a run begins: at another document, and where the block before is elsewhere."""
    new = jnp.pad(starts[:, 1:] != starts[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    new = grid.split(new, fill=False)
    elsewhere = jnp.pad(rank[1:] != rank[:-1], (1, 0), constant_values=True).reshape(grid.shape)
    return new.at[..., 0].set(new[..., 0] | elsewhere)


def _runs(plan: Assignment, grid: BlockGrid, capacities: Capacities):
    """Returns row, position, origin and length of each rank's runs, `[W, P]`."""
    world_size, size = grid.world_size, capacities.pieces
    received = plan.received
    values = (received.rank, received.runs_before, received.row)
    values = (*values, received.kv_row - received.first_column)
    # By block in global order.
    _, rank, before, row, to_row = lax.sort((received.block, *values), num_keys=1)

    # Column, counted over the batch, at which each run begins.
    index = before.reshape(grid.shape)[..., None] + running_sum(plan.begins_run.astype(jnp.int32))
    index = jnp.where(plan.begins_run, index - 1, size)
    owner = jnp.broadcast_to(rank.reshape(grid.shape)[..., None], index.shape)
    place = jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    begins = jnp.full((world_size, size), -1, jnp.int32)
    begins = begins.at[owner.reshape(-1), index.reshape(-1)].set(place.reshape(-1), mode="drop")

    is_used = begins >= 0
    begins = jnp.maximum(begins, 0)
    of, within = divided(begins, grid.block)
    batch, home, first, _ = places(of, grid)
    column = home * grid.columns + first + within
    starts = plan.starts.reshape(-1)
    token = batch * plan.starts.shape[1] + column
    start = starts[token]
    row, to_row = jnp.moveaxis(jnp.stack([row, to_row], -1)[of], -1, 0)
    row = row + within
    is_query = is_used & (start >= 0)
    return (
        jnp.where(is_used, row, capacities.q),
        jnp.where(is_query, column - start, -1),
        jnp.where(is_query, start + to_row, 0),
        None if plan.lengths is None else jnp.where(is_query, plan.lengths.reshape(-1)[token], 0),
    )
