"""The two compiled stages of planning: the assignment of blocks, then the arrays of the plan.

Capacities are set between them; outside `jit` from the counts of the first stage.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Integer

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.balance import balance_blocks
from jax_cp_dispatch.planner.blocks import (
    BlockGrid,
    block_ranges,
    document_starts,
    running_max,
    running_sum,
)


class Assignment(NamedTuple):
    """The assignment, before capacities are known. G counts blocks in global order."""

    starts: Int32[Array, "B T"]
    rank: Int32[Array, " G"]  # -1: nothing to compute
    first_column: Int32[Array, " G"]
    kv_offset: Int32[Array, "W G"]  # row of each key block at each rank that needs it, else -1
    q_tokens: Int32[Array, "W W"]  # received by rank i from rank j
    kv_tokens: Int32[Array, "W W"]
    destinations: Int32[Array, ""]
    pairs_before: Float32[Array, " W"]
    pairs_after: Float32[Array, " W"]


class Capacities(NamedTuple):
    """Static sizes of a plan: rows of the two receive buffers, and C of the KV metadata."""

    q: int
    kv: int
    destinations: int


class PlanArrays(NamedTuple):
    """The arrays of `AttentionPlan`, with its names."""

    q_metadata: Metadata
    kv_metadata: Metadata
    kv_start: Int32[Array, "W q_capacity"]
    kv_end: Int32[Array, "W q_capacity"]
    needs: Int32[Array, "W 3"]


def q_bound(grid: BlockGrid) -> int:
    """Returns the maximum rows of queries of a rank, by the bound in `balance_blocks`."""
    return min(2 * grid.rows + grid.block, grid.world_size * grid.rows)


@partial(jax.jit, static_argnames=("grid", "window"))
def assign(
    segment_ids: Integer[Array, "B T"],
    positions: Integer[Array, "B T"] | None,
    *,
    grid: BlockGrid,
    window: int | None,
) -> Assignment:
    """Assigns each block to a rank, and each key block to a row on every rank that needs it."""
    starts = document_starts(segment_ids, positions)
    if window is not None:  # from here on, a document starts at the start of its window
        num_tokens = starts.shape[1]
        first = jnp.arange(1, num_tokens + 1, dtype=jnp.int32)[None] - min(window, num_tokens)
        starts = jnp.where(starts >= 0, jnp.maximum(starts, first), -1)
    first, cost, shift = block_ranges(starts, grid)
    length = jnp.broadcast_to(grid.lengths, grid.shape)
    live = first >= 0
    rank = balance_blocks(cost, jnp.where(live, length, 0), row_limit=q_bound(grid))
    rank = jnp.where(live, rank, -1).reshape(-1)

    # A rank needs key block g if one of its query blocks at or after g starts no later than at g.
    block = jnp.arange(grid.num_blocks, dtype=jnp.int32)
    first_block = jnp.where(live, grid.block_of(first), grid.num_blocks).reshape(-1)
    ranks = jnp.arange(grid.world_size, dtype=jnp.int32)[:, None]
    earliest = jnp.where(rank[None] == ranks, first_block[None], grid.num_blocks)
    earliest = -running_max(-earliest[:, ::-1])[:, ::-1]
    needed = earliest <= block[None]
    rows = jnp.where(needed, length.reshape(1, -1), 0)
    kv_offset = jnp.where(needed, running_sum(rows) - rows, -1)

    home = jnp.broadcast_to(ranks, grid.shape).reshape(-1)
    unit = jnp.ldexp(jnp.float32(1), shift)
    per_rank = jnp.zeros(grid.world_size, jnp.int32)
    pairs = cost.reshape(-1)
    q_tokens = jnp.zeros((grid.world_size, grid.world_size), jnp.int32)
    return Assignment(
        starts=starts,
        rank=rank,
        first_column=first.reshape(-1),
        kv_offset=kv_offset,
        q_tokens=_add_at(q_tokens, (rank, home), length.reshape(-1)),
        kv_tokens=rows.reshape(-1, *grid.shape).sum((1, 3), dtype=jnp.int32),
        destinations=needed.sum(0, dtype=jnp.int32).max(),
        pairs_before=_add_at(per_rank, home, pairs).astype(jnp.float32) * unit,
        pairs_after=_add_at(per_rank, rank, pairs).astype(jnp.float32) * unit,
    )


@partial(jax.jit, static_argnames=("grid", "capacities"))
def build(plan: Assignment, *, grid: BlockGrid, capacities: Capacities) -> PlanArrays:
    """Builds the arrays of an assignment; cuts off what exceeds the capacities."""
    length = jnp.broadcast_to(grid.lengths, grid.shape).reshape(-1)
    # Blocks in the order of their receipt: by rank, then in global order.
    order = jnp.argsort(jnp.where(plan.rank < 0, grid.world_size, plan.rank), stable=True)
    before = jnp.cumsum(length[order], dtype=jnp.int32) - length[order]
    received = plan.q_tokens.sum(1, dtype=jnp.int32)
    q_offset = jnp.zeros_like(length).at[order].set(before, unique_indices=True)
    q_offset = q_offset - (jnp.cumsum(received, dtype=jnp.int32) - received)[plan.rank]
    q_offset = jnp.where(plan.rank < 0, 0, q_offset)
    kv_rank, kv_offset = _destinations(plan.kv_offset, capacities.destinations)
    kv_start, kv_end = _key_ranges(plan, q_offset, received, grid, capacities.q)
    needs = [received.max(), plan.kv_tokens.sum(1, dtype=jnp.int32).max(), plan.destinations]
    return PlanArrays(
        q_metadata=_metadata(plan.rank, q_offset, plan.q_tokens, grid),
        kv_metadata=_metadata(kv_rank, kv_offset, plan.kv_tokens, grid),
        kv_start=kv_start,
        kv_end=kv_end,
        needs=jnp.broadcast_to(jnp.stack(needs), (grid.world_size, len(needs))),
    )


def _destinations(
    offset: Int32[Array, "W G"], num: int
) -> tuple[Int32[Array, "G C"], Int32[Array, "G C"]]:
    """Returns, per block, the ranks with an offset, ascending, and these offsets."""
    exists = (offset >= 0).T
    num_ranks, num_blocks = offset.shape
    place = jnp.where(exists, jnp.cumsum(exists, axis=1, dtype=jnp.int32) - 1, num)
    place = jnp.arange(num_blocks, dtype=jnp.int32)[:, None], place

    def listed(values, fill):
        return jnp.full((num_blocks, num), fill, jnp.int32).at[place].set(values, mode="drop")

    return listed(jnp.arange(num_ranks, dtype=jnp.int32), -1), listed(offset.T, 0)


def _key_ranges(
    plan: Assignment,
    q_offset: Int32[Array, " G"],
    received: Int32[Array, " W"],
    grid: BlockGrid,
    q_capacity: int,
) -> tuple[Int32[Array, "W q_capacity"], Int32[Array, "W q_capacity"]]:
    """Returns the rows of each received query's keys.

    All key blocks of a query block are received, with consecutive columns in consecutive rows, so
    one shift per block maps columns to rows. The receive buffer is filled in cells of `grid.unit`
    rows, each of which comes from one block.
    """
    cells = -(-q_capacity // grid.unit)
    block_cell = q_offset // grid.unit
    ids = jnp.arange(grid.num_blocks, dtype=jnp.int32)
    rank = jnp.where(plan.rank < 0, grid.world_size, plan.rank)  # out of bounds: dropped
    block = jnp.zeros((grid.world_size, cells), jnp.int32)
    block = running_max(block.at[rank, block_cell].set(ids, mode="drop"))
    cell = jnp.arange(cells, dtype=jnp.int32)[None]
    exists = cell * grid.unit < received[:, None]

    within = jnp.where(exists, cell - block_cell[block], 0) * grid.unit
    column = grid.first_columns().reshape(-1)[block] + within
    batch = block // (grid.world_size * grid.per_piece)
    cells_per_row = grid.world_size * grid.columns // grid.unit
    start = plan.starts.reshape(-1, grid.unit)[batch * cells_per_row + column // grid.unit]
    end = column[..., None] + jnp.arange(1, grid.unit + 1, dtype=jnp.int32)[None, None]

    first = plan.first_column.reshape(grid.shape)
    first_block = grid.block_of(jnp.maximum(first, 0)).reshape(-1)
    to_row = plan.kv_offset[plan.rank, first_block]
    to_row -= grid.first_columns().reshape(-1)[first_block]
    live = exists[..., None] & (start >= 0)
    to_row = to_row[block][..., None]
    kv_start, kv_end = (
        jnp.where(live, x + to_row, 0).reshape(grid.world_size, -1)[:, :q_capacity]
        for x in (start, end)
    )
    return kv_start, kv_end


def _add_at(into: Int32[Array, "..."], index, values) -> Int32[Array, "..."]:
    """Scatter-add that drops entries without a rank (-1)."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    first = jnp.where(first < 0, into.shape[0], first)
    return into.at[(first, *rest)].add(values, mode="drop")


def _metadata(
    rank: Int32[Array, "G ..."],
    offset: Int32[Array, "G ..."],
    tokens: Int32[Array, "W W"],
    grid: BlockGrid,
) -> Metadata:
    total = tokens.sum(1, dtype=jnp.int32)
    slots = grid.batch * grid.per_piece
    return Metadata(
        dst_rank=grid.by_rank(rank),
        dst_offset=grid.by_rank(offset).astype(jnp.uint32),
        seq_len=jnp.broadcast_to(
            np.tile(grid.lengths, grid.batch).astype(np.uint32), (grid.world_size, slots)
        ),
        num_recv_tokens=jnp.concatenate([tokens, total[:, None]], axis=1).astype(jnp.uint32),
        num_seqs=jnp.full(grid.world_size, slots, jnp.int32),
        num_total_recv_tokens=total.astype(jnp.uint32),
        world_size=grid.world_size,
    )
