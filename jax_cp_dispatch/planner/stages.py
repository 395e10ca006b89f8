"""The two compiled stages of planning inside `jit`: blocks are assigned; then arrays are built.

Capacities are set between them, so that `PlanConfig.needs` can stop after the first stage. Below,
G counts blocks of the batch, X ranges of keys that move.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Integer

from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.balance import balance_blocks
from jax_cp_dispatch.planner.blocks import (
    BlockGrid,
    block_ranges,
    document_starts,
    running_sum,
)
from jax_cp_dispatch.planner.slots import by_sender, to_metadata
from jax_cp_dispatch.planner.transfers import Transfers


class Received(NamedTuple):
    """What ranks receive: a sequence of blocks of queries by rank, then in global order.

    Blocks without queries come last, with rank W. A block of queries needs keys from the first
    that a query of it sees. Those that its rank does not have from
    earlier blocks are a contiguous range of columns that ends with the block itself, because first
    keys never decrease in global order.
    """

    block: Int32[Array, " G"]  # in global order
    rank: Int32[Array, " G"]
    row: Int32[Array, " G"]  # where its rank receives its first query
    first_column: Int32[Array, " G"]  # of the range of keys
    kv_row: Int32[Array, " G"]  # where its rank receives the range


class Assignment(NamedTuple):
    """The assignment, before capacities are known."""

    starts: Int32[Array, "B T"]  # first column of each column's document; -1: padding
    received: Received
    queries: Transfers
    keys: Transfers
    begins_run: Bool[Array, "B W J block"]
    num_runs: Int32[Array, " G"]  # that begin in each block
    runs_before: Int32[Array, " G"]  # on its rank, by block
    needs: Int32[Array, " 5"]
    pairs_before: Float32[Array, " W"]
    pairs_after: Float32[Array, " W"]


class Capacities(NamedTuple):
    """Static sizes of a plan, in the order of `AttentionPlan.needs`."""

    q: int
    kv: int
    q_transfers: int
    kv_transfers: int
    pieces: int


class PlanArrays(NamedTuple):
    """The arrays of `AttentionPlan`, with its names."""

    q_metadata: Metadata
    kv_metadata: Metadata
    run_row: Int32[Array, "W P"]
    run_position: Int32[Array, "W P"]
    run_origin: Int32[Array, "W P"]
    num_rows: Int32[Array, " W"]
    needs: Int32[Array, "W 5"]


def q_bound(grid: BlockGrid) -> int:
    """Returns the maximum rows of queries of a rank, by the bound in `balance_blocks`."""
    return min(2 * grid.rows + grid.block, grid.world_size * grid.rows)


def kv_transfers_bound(grid: BlockGrid) -> int:
    """Returns the maximum ranges of keys that a rank sends.

    Each range ends with a block of queries. Of those that end on another rank than they begin, a
    rank receives at most one from each sender and batch row, because ranges do not overlap.
    """
    return grid.batch * (grid.per_piece + grid.world_size - 1)


@partial(jax.jit, static_argnames=("grid", "mask", "tolerance"))
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
    first_keys = _first_keys(mask, starts)
    first, cost, shift = block_ranges(first_keys, grid)
    length = jnp.broadcast_to(grid.lengths, grid.shape)
    live = first >= 0
    num_rows = jnp.where(live, length, 0)
    rank = balance_blocks(cost, num_rows, row_limit=q_bound(grid), tolerance=tolerance)
    rank = jnp.where(live, rank, grid.world_size).reshape(-1)

    received = _received(rank, first.reshape(-1), grid)
    queries, keys = _query_transfers(received, grid), _key_transfers(received, grid)
    begins = _run_begins(starts, rank, grid)
    num_runs = begins.sum(-1, dtype=jnp.int32).reshape(-1)
    before = _before_on_rank(num_runs[received.block], received.rank)
    runs_before = jnp.zeros_like(num_runs).at[received.block].set(before, unique_indices=True)

    ranks = jnp.arange(grid.world_size, dtype=jnp.int32)
    home = jnp.broadcast_to(ranks[:, None], grid.shape).reshape(-1)
    pairs = cost.reshape(-1)
    unit = jnp.ldexp(jnp.float32(1), shift)
    needs = (
        _per_rank(queries.target, queries.tokens, grid),
        _per_rank(keys.target, keys.tokens, grid),
        by_sender(queries, grid.world_size).counts,
        by_sender(keys, grid.world_size).counts,
        _per_rank(rank, num_runs, grid),
    )
    return Assignment(
        starts=starts,
        received=received,
        queries=queries,
        keys=keys,
        begins_run=begins,
        num_runs=num_runs,
        runs_before=runs_before,
        needs=jnp.stack([x.max() for x in needs]),
        pairs_before=_per_rank(home, pairs, grid).astype(jnp.float32) * unit,
        pairs_after=_per_rank(rank, pairs, grid).astype(jnp.float32) * unit,
    )


@partial(jax.jit, static_argnames=("grid", "capacities"))
def build(plan: Assignment, *, grid: BlockGrid, capacities: Capacities) -> PlanArrays:
    """Builds the arrays of an assignment; cuts off what exceeds the capacities."""
    block = plan.received.block
    # Without its runs, a block would attend to wrong keys. It is not sent, which the counts show.
    has_runs = (plan.runs_before + plan.num_runs <= capacities.pieces)[block]
    row, position, origin = _runs(plan, grid, capacities)
    return PlanArrays(
        q_metadata=to_metadata(
            plan.queries,
            world_size=grid.world_size,
            num_slots=capacities.q_transfers,
            is_sent=has_runs,
        ),
        kv_metadata=to_metadata(
            plan.keys, world_size=grid.world_size, num_slots=capacities.kv_transfers
        ),
        run_row=row,
        run_position=position,
        run_origin=origin,
        num_rows=_per_rank(plan.queries.target, plan.queries.tokens, grid),
        needs=jnp.broadcast_to(plan.needs, (grid.world_size, len(capacities))),
    )


def _first_keys(mask: Mask, starts: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns the first column that each column sees; -1 at padding."""
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    first = mask.clipped(num_tokens).k_start(column, starts)
    return starts if first is starts else jnp.where(starts >= 0, first, -1)


def _received(rank: Int32[Array, " G"], first: Int32[Array, " G"], grid: BlockGrid) -> Received:
    block = jnp.arange(grid.num_blocks, dtype=jnp.int32)
    rank, block = jax.lax.sort((rank, block), num_keys=1)
    first_block = grid.block_of(jnp.maximum(first, 0).reshape(grid.shape)).reshape(-1)[block]
    previous = jnp.pad(block[:-1], (1, 0))
    follows = jnp.pad(rank[1:] == rank[:-1], (1, 0))
    first_block = jnp.where(follows, jnp.maximum(first_block, previous + 1), first_block)
    column = grid.first_columns().reshape(-1)
    length = _lengths(grid)[block]
    num_keys = column[block] + length - column[first_block]
    return Received(
        block=block,
        rank=rank,
        row=_before_on_rank(length, rank),
        first_column=column[first_block],
        kv_row=_before_on_rank(num_keys, rank),
    )


def _query_transfers(received: Received, grid: BlockGrid) -> Transfers:
    batch, home, start = _places(received.block, grid)
    is_used = received.rank < grid.world_size
    return Transfers(
        source=jnp.where(is_used, home, grid.world_size),
        target=received.rank,
        source_row=batch * grid.columns + start,
        target_row=received.row,
        tokens=jnp.where(is_used, _lengths(grid)[received.block], 0),
    )


def _key_transfers(received: Received, grid: BlockGrid) -> Transfers:
    """Cuts the range of keys of each block where it crosses from one home to the next."""
    batch, home, start = _places(received.block, grid)
    end = home * grid.columns + start + _lengths(grid)[received.block]
    first_home = received.first_column // grid.columns
    is_used = received.rank < grid.world_size
    count = jnp.where(is_used, home - first_home + 1, 0)
    total = running_sum(count)
    size = kv_transfers_bound(grid) * grid.world_size
    begins = (
        jnp.zeros(size, jnp.int32).at[total - count].add(is_used.astype(jnp.int32), mode="drop")
    )
    of = jnp.maximum(running_sum(begins) - 1, 0)  # every used block has at least one
    place = jnp.arange(size, dtype=jnp.int32)
    source = first_home[of] + place - (total - count)[of]
    is_used = place < total[-1]
    first = jnp.maximum(received.first_column[of], source * grid.columns)
    last = jnp.minimum(end[of], (source + 1) * grid.columns)
    return Transfers(
        source=jnp.where(is_used, source, grid.world_size),
        target=jnp.where(is_used, received.rank[of], grid.world_size),
        source_row=batch[of] * grid.columns + first - source * grid.columns,
        target_row=received.kv_row[of] + first - received.first_column[of],
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
    """Returns row, position and origin of each rank's runs, `[W, P]`."""
    world_size, size = grid.world_size, capacities.pieces
    block, rank = plan.received.block, plan.received.rank

    def by_block(x):
        return jnp.zeros(grid.num_blocks, jnp.int32).at[block].set(x, unique_indices=True)

    # Column, counted over the batch, at which each run begins.
    index = plan.runs_before.reshape(grid.shape)[..., None] + running_sum(
        plan.begins_run.astype(jnp.int32)
    )
    index = jnp.where(plan.begins_run, index - 1, size)
    owner = jnp.broadcast_to(by_block(rank).reshape(grid.shape)[..., None], index.shape)
    place = jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    begins = jnp.full((world_size, size), -1, jnp.int32)
    begins = begins.at[owner.reshape(-1), index.reshape(-1)].set(place.reshape(-1), mode="drop")

    is_used = begins >= 0
    begins = jnp.maximum(begins, 0)
    of, within = begins // grid.block, begins % grid.block
    batch, home, first = _places(of, grid)
    column = home * grid.columns + first + within
    start = plan.starts.reshape(-1)[batch * plan.starts.shape[1] + column]
    row = by_block(plan.received.row)[of] + within
    to_row = by_block(plan.received.kv_row - plan.received.first_column)[of]
    is_query = is_used & (start >= 0)
    return (
        jnp.where(is_used, row, capacities.q),
        jnp.where(is_query, column - start, -1),
        jnp.where(is_query, start + to_row, 0),
    )


def _places(block: Int32[Array, "..."], grid: BlockGrid):
    """Returns batch row, home and first of its columns there, of blocks in global order."""
    piece, number = block // grid.per_piece, block % grid.per_piece
    return piece // grid.world_size, piece % grid.world_size, number * grid.block


def _lengths(grid: BlockGrid) -> Int32[Array, " G"]:
    return jnp.broadcast_to(grid.lengths, grid.shape).reshape(-1)


def _before_on_rank(x: Int32[Array, " G"], rank: Int32[Array, " G"]) -> Int32[Array, " G"]:
    """Returns the sum of earlier values of the same rank; ranks ascend."""
    # The sum over all ranks may exceed 32 bits, its differences do not.
    before = running_sum(x) - x
    begins = jnp.pad(rank[1:] != rank[:-1], (1, 0), constant_values=True)
    index = jnp.where(begins, rank, x.shape[0] + 1)  # out of bounds: dropped
    first = jnp.zeros(x.shape[0] + 1, jnp.int32).at[index].set(before, mode="drop")
    return before - first[rank]


def _per_rank(
    rank: Int32[Array, " N"], x: Int32[Array, " N"], grid: BlockGrid
) -> Int32[Array, " W"]:
    """Returns the sum of each rank; entries of rank W do not count."""
    return jnp.zeros(grid.world_size, jnp.int32).at[rank].add(x, mode="drop")
