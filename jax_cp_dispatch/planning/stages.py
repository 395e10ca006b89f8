"""The two compiled stages of planning inside `jit`: blocks are assigned; then arrays are built.

Capacities are set between them, so that `needs_inside_jit` can stop after the first stage. Below,
G counts blocks of the batch, X ranges of keys that move.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jax_cp_dispatch._arrays import divided
from jax_cp_dispatch._scans import WINDOW, running_sum, sum_by_key, sums_before
from jax_cp_dispatch.masks import Mask, MaskRanges
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning.balance import balance_blocks
from jax_cp_dispatch.planning.block_grid import (
    BlockGrid,
    Capacities,
    Received,
    block_ranges,
    places,
)
from jax_cp_dispatch.planning.key_limit import KeyLimit
from jax_cp_dispatch.planning.seen_inside import seen_by_rows, seen_columns
from jax_cp_dispatch.planning.slots import (
    Slots,
    TracedTransfers,
    by_sender,
    list_traced,
    to_metadata,
)


class Assignment(NamedTuple):
    """The assignment, before capacities are known."""

    starts: Int32[Array, "B T"]  # first column of each column's document; -1: padding
    received: Received
    transfers: TracedTransfers
    slots: Slots
    begins_run: Bool[Array, "B W J block"]
    runs: Int32[Array, "B W J block"]  # that have begun in the block
    num_rows: Int32[Array, " W"]  # of queries that each rank receives
    needs: Int32[Array, " 5"]
    pairs_before: Float32[Array, " W"]
    pairs: Float32[Array, " W"]
    lengths: Int32[Array, "B T"] | None  # of each column's document, if keys depend on it
    ranges: MaskRanges | None  # what each column sees; None: it follows from runs


class PlanArrays(NamedTuple):
    """The arrays of `Plan`, with its names."""

    q_metadata: Metadata
    kv_metadata: Metadata
    run_row: Int32[Array, "W P"]
    run_position: Int32[Array, "W P"]
    run_origin: Int32[Array, "W P"]
    num_rows: Int32[Array, " W"]
    largest_needs: Int32[Array, "W 5"]
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


def num_transfers_bound(grid: BlockGrid) -> int:
    """Returns the maximum ranges of queries and keys of all ranks, after cuts at homes.

    One of each for each block, and cuts of keys: no more than between ranks for a causal mask.
    Rounded up, because sums of other sizes compile to more.
    """
    bound = grid.num_blocks + kv_transfers_bound(grid, is_causal=True) * grid.world_size
    return -(-bound // WINDOW) * WINDOW


@partial(jax.jit, static_argnames=("grid", "tolerance"))
def assign(
    starts: Int32[Array, "B T"], *, grid: BlockGrid, mask: Mask, tolerance: float
) -> Assignment:
    """Assigns each block to a rank, given `document_starts`; lists what moves."""
    seen = seen_columns(mask, starts)
    first, cost, shift = block_ranges(seen.first, grid, seen.pairs)
    last = None if seen.last is None else grid.split(seen.last, fill=0).max(-1)
    length = jnp.broadcast_to(grid.lengths, grid.shape)
    live = first >= 0
    num_rows = jnp.where(live, length, 0)
    keys = KeyLimit.of(grid, mask, first, last)
    rank = balance_blocks(cost, num_rows, row_limit=q_bound(grid), tolerance=tolerance, keys=keys)
    rank = jnp.where(live, rank, grid.world_size).reshape(-1)

    begins = _run_begins(starts, rank, grid)
    runs = running_sum(begins.astype(jnp.int32))
    num_runs = runs[..., -1]
    received, totals = _received(rank, (first, last), (num_runs, cost), grid)
    num_rows, num_keys, num_runs, pairs = totals
    transfers = list_traced(received, grid, num_transfers_bound(grid))
    slots = by_sender(transfers, grid.world_size)
    unit = jnp.ldexp(jnp.float32(1), shift)
    needs = jnp.stack([num_rows, num_keys, *slots.counts, num_runs])
    return Assignment(
        starts=starts,
        received=received,
        transfers=transfers,
        slots=slots,
        begins_run=begins,
        runs=runs,
        num_rows=num_rows,
        needs=needs.max(1),
        pairs_before=cost.sum((0, 2), dtype=jnp.int32).astype(jnp.float32) * unit,
        pairs=pairs.astype(jnp.float32) * unit,
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
    transfers = plan.transfers
    if capacities.pieces >= q_bound(grid):
        transfers = transfers._replace(num_runs=None)
    of_both = to_metadata(transfers, plan.slots, grid.world_size, capacities)
    q_metadata, kv_metadata = of_both
    row, position, origin, length = _runs(plan, grid, capacities)
    ranges = plan.ranges
    if ranges is not None:
        ranks = jnp.arange(grid.world_size, dtype=jnp.int32) if rank is None else rank[None]
        ranges = seen_by_rows(ranges, plan.received, grid, capacities, ranks)
    return PlanArrays(
        q_metadata=q_metadata,
        kv_metadata=kv_metadata,
        run_row=row,
        run_position=position,
        run_origin=origin,
        num_rows=plan.num_rows,
        largest_needs=jnp.broadcast_to(plan.needs, (grid.world_size, len(capacities))),
        run_length=length,
        ranges=ranges,
    )


def _received(
    rank: Int32[Array, " G"],
    keys: tuple[Int32[Array, "B W J"], Int32[Array, "B W J"] | None],
    counts: tuple[Int32[Array, "B W J"], Int32[Array, "B W J"]],
    grid: BlockGrid,
) -> tuple[Received, list[Int32[Array, " W"]]]:
    """Lists what ranks receive; also each rank's totals of queries, keys, runs and pairs.

    Args:
      rank: of each block.
      keys: the first of each block, and one past the last; None: the block's own.
      counts: runs that begin in each block, and its pairs in the unit of `block_ranges`.
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
    values = (length, num_keys, num_runs, pairs)
    row, kv_row, runs_before = sums_before(values[:3], rank, grid.world_size)
    totals = sum_by_key(values, rank, grid.world_size)
    received = Received(
        block=block,
        rank=rank,
        row=row,
        first_column=first_column,
        kv_row=kv_row,
        num_keys=num_keys,
        runs_before=runs_before,
        num_runs=num_runs,
    )
    return received, totals


def _run_begins(
    starts: Int32[Array, "B T"], rank: Int32[Array, " G"], grid: BlockGrid
) -> Bool[Array, "B W J block"]:
    """Whether a run begins: at another document, and where the block before is elsewhere."""
    new = jnp.pad(starts[:, 1:] != starts[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    new = grid.split(new, fill=False)
    elsewhere = jnp.pad(rank[1:] != rank[:-1], (1, 0), constant_values=True).reshape(grid.shape)
    is_first = jnp.arange(grid.block, dtype=jnp.int32)[None, None, None] == 0
    return new | elsewhere[..., None] & is_first


def _runs(plan: Assignment, grid: BlockGrid, capacities: Capacities):
    """Returns row, position, origin and length of each rank's runs, `[W, P]`."""
    world_size, size = grid.world_size, capacities.pieces
    received = plan.received
    # By block in global order.
    values = received.rank, received.runs_before, received.row
    values = (*values, received.kv_row, received.first_column)
    _, rank, before, row, kv_row, column = lax.sort((received.block, *values), num_keys=1)
    to_row = kv_row - column

    # Column, counted over the batch, at which each run begins.
    index = before.reshape(grid.shape)[..., None] + plan.runs
    is_held = plan.begins_run & (index <= size) & (rank < world_size).reshape(grid.shape)[..., None]
    index = rank.reshape(grid.shape)[..., None] * size + index - 1
    index = jnp.where(is_held, index, world_size * size)  # out of bounds: dropped
    begins = jnp.full(world_size * size, -1, jnp.int32)
    place = jnp.arange(index.size, dtype=jnp.int32)
    begins = begins.at[index.reshape(-1).astype(jnp.uint32)].set(place, mode="drop")
    begins = begins.reshape(world_size, size)

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
