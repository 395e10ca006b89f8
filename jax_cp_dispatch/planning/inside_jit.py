"""Plans attention inside `jit`: two compiled stages, and static capacities."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jax_cp_dispatch._arguments import check_positive, check_type
from jax_cp_dispatch._arrays import (
    WINDOW,
    divided,
    repeated,
    run_begins,
    run_ends,
    running_sum,
    sum_by_key,
    sums_before,
)
from jax_cp_dispatch.documents.fingerprint import (
    ID_STEP,
    checksums,
    make_fingerprint,
    mask_checksums,
    order_error_code,
    order_fingerprint,
    place_checksums,
    plan_digest,
    refused_at_fault,
)
from jax_cp_dispatch.documents.segment_ids import (
    Ids,
    check_ids,
    document_starts,
    normalize_segment_ids,
    number_ids,
    starts_in_order,
)
from jax_cp_dispatch.documents.table import check_columns, require_host
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.read import check_mask_arrays, read_mask
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning.blocks import (
    BlockGrid,
    Capacities,
    KeyLimit,
    Received,
    balance_blocks,
    block_ranges,
    column_ranges,
    kv_bound,
    places,
    seen_by_rows,
    seen_columns,
)
from jax_cp_dispatch.planning.config import CAPACITIES, PlanConfig
from jax_cp_dispatch.planning.plan import Plan
from jax_cp_dispatch.planning.request import Transfers

# ---- What moves: queries and keys are cut and numbered together.
#
# Each sort, gather and running sum takes time to compile, so there is one for both.


def list_traced(received: Received, grid: BlockGrid) -> tuple[Transfers, Int32[Array, " X"]]:
    """Returns ranges of queries and of keys, cut where they cross from one home to the next.

    Also, for each range of queries, the runs of its target up to those of these queries; 0 for
    keys.
    """
    num_ranks = grid.num_ranks
    # One range of each for each block, and cuts of keys: no more than between ranks for a causal
    # mask. Rounded up, because sums of other sizes compile to more.
    size = grid.num_blocks + kv_transfers_bound(grid, is_causal=True) * num_ranks
    size = -(-size // WINDOW) * WINDOW
    batch, home, start, length = places(received.block, grid)
    is_used = received.rank < num_ranks
    num_runs = received.runs_before + received.num_runs
    queries = home * grid.columns + start, length, received.row, 0 * home, num_runs
    keys = received.first_column, received.num_keys, received.kv_row, 0 * home + num_ranks
    # Elementwise operations are part of what follows; a concatenation would compile separately.
    is_query = np.array([[True], [False]])
    both = lambda x, y: jnp.where(is_query, x, y).reshape(-1)
    ranges = [both(x, y) for x, y in zip(queries, (*keys, 0 * home), strict=True)]
    first_column, num_tokens, row, kind, num_runs = ranges
    is_used, target, batch = (jnp.tile(x, 2) for x in (is_used, received.rank, batch))
    end = first_column + num_tokens
    is_used &= num_tokens > 0
    first_home, _ = divided(first_column, grid.columns)
    last_home, _ = divided(jnp.maximum(end - 1, 0), grid.columns)
    of, first_place, total = repeated(jnp.where(is_used, last_home - first_home + 1, 0), size)

    place = jnp.arange(size, dtype=jnp.int32)
    columns = first_home - first_place, first_column, end, row - first_column
    table = jnp.stack([*columns, batch * grid.columns, kind, target, num_runs], -1)
    rows = table[of]
    home, first_column, end, to_row, to_source_row, kind, target, num_runs = (
        rows[:, i] for i in range(rows.shape[1])
    )
    home += place
    is_used = place < total
    start = home * grid.columns
    first = jnp.maximum(first_column, start)
    transfers = Transfers(
        source=jnp.where(is_used, kind + home, 2 * num_ranks),
        target=jnp.where(is_used, target, num_ranks),
        source_row=to_source_row + first - start,
        target_row=first + to_row,
        tokens=jnp.where(is_used, jnp.minimum(end, start + grid.columns) - first, 0),
    )
    return transfers, num_runs


# ---- The two compiled stages of planning inside `jit`: blocks are assigned; then arrays are built.
#
# Capacities are set between them, so that `needs_inside_jit` can stop after the first stage. Below,
# G counts blocks of the batch, X ranges of keys that move.


class Assignment(NamedTuple):
    """The assignment, before capacities are known."""

    starts: Int32[Array, "B T"]  # first column of each column's document; -1: padding
    received: Received
    transfers: Transfers
    num_runs: Int32[Array, " X"]  # see `list_traced`
    # Of each transfer at its sender; adjacent transfers share a slot.
    slot: Int32[Array, " X"]
    begins_slot: Bool[Array, " X"]
    num_slots: Int32[Array, "2 W"]  # of each sender
    begins_run: Bool[Array, "B W J block"]
    runs: Int32[Array, "B W J block"]  # that have begun in the block
    num_rows: Int32[Array, " W"]  # of queries that each rank receives
    needs: Int32[Array, " 5"]
    pairs_before: Float32[Array, " W"]
    pairs: Float32[Array, " W"]
    lengths: Int32[Array, "B T"] | None  # of each column's document, if keys depend on it
    ranges: MaskRanges | None  # what each column sees; None: it follows from runs


def q_bound(grid: BlockGrid) -> int:
    """Returns the maximum rows of queries of a rank, by the bound in `balance_blocks`."""
    return min(2 * grid.rows + grid.block, grid.num_ranks * grid.rows)


def kv_transfers_bound(grid: BlockGrid, *, is_causal: bool) -> int:
    """Returns the maximum ranges of keys that a rank sends, if every query sees its own key.

    If the mask is causal, each range ends with a block of queries. Among those that end on another
    rank than they begin, a rank receives at most one from each sender and batch row, because ranges
    do not overlap. Otherwise, it receives one more: blocks of queries before those of the sender
    see its first keys, which are one range.
    """
    others = grid.num_ranks - 1
    return grid.batch * (grid.per_piece + (others if is_causal else 2 * others))


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
    rank = jnp.where(live, rank, grid.num_ranks).reshape(-1)

    # A run begins at another document, and where the block before is elsewhere.
    new: Any = run_begins(starts)
    elsewhere = jnp.pad(rank[1:] != rank[:-1], (1, 0), constant_values=True).reshape(grid.shape)
    is_first = jnp.arange(grid.block, dtype=jnp.int32)[None, None, None] == 0
    begins = grid.split(new, fill=False) | elsewhere[..., None] & is_first
    runs = running_sum(begins.astype(jnp.int32))
    received, totals = _received(rank, (first, last), (runs[..., -1], cost), grid)
    num_rows, num_keys, num_runs, pairs = totals

    # Slots of each sender are numbered in the order of the transfers.
    transfers, runs_of_transfers = list_traced(received, grid)
    sender, target, source_row, target_row, tokens = transfers
    follows = (
        (sender[1:] == sender[:-1])
        & (target[1:] == target[:-1])
        & (source_row[1:] == source_row[:-1] + tokens[:-1])
        & (target_row[1:] == target_row[:-1] + tokens[:-1])
    )
    num_senders = 2 * grid.num_ranks
    begins_slot = jnp.pad(~follows, (1, 0), constant_values=True) & (sender < num_senders)
    begun = begins_slot.astype(jnp.int32)
    (earlier,) = sums_before([begun], sender, num_senders)
    (num_slots,) = sum_by_key([begun], sender, num_senders)
    num_slots = num_slots.reshape(2, grid.num_ranks)
    unit = jnp.ldexp(jnp.float32(1), shift)
    needs = jnp.stack([num_rows, num_keys, *num_slots, num_runs])
    return Assignment(
        starts=starts,
        received=received,
        transfers=transfers,
        num_runs=runs_of_transfers,
        slot=earlier + begun - 1,
        begins_slot=begins_slot,
        num_slots=num_slots,
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
) -> dict[str, Any]:
    """Builds the arrays of an assignment, by the names of `Plan`; cuts off what exceeds capacities.

    With `rank`, `ranges` are those of this rank alone: their size grows with the tokens.
    """
    q_metadata, kv_metadata = _to_metadata(plan, grid, capacities)
    row, position, origin, length = _runs(plan, grid, capacities)
    ranges = plan.ranges
    if ranges is not None:
        ranks = jnp.arange(grid.num_ranks, dtype=jnp.int32) if rank is None else rank[None]
        ranges = seen_by_rows(ranges, plan.received, grid, capacities, ranks)
    return {
        "q_metadata": q_metadata,
        "kv_metadata": kv_metadata,
        "run_row": row,
        "run_position": position,
        "run_origin": origin,
        "run_length": length,
        "num_rows": plan.num_rows,
        "pairs_before": plan.pairs_before,
        "pairs": plan.pairs,
        "largest_needs": jnp.broadcast_to(plan.needs, (grid.num_ranks, len(capacities))),
        "ranges": ranges,
    }


def _received(
    rank: Int32[Array, " G"],
    keys: tuple[Int32[Array, "B W J"], Int32[Array, "B W J"] | None],
    counts: tuple[Int32[Array, "B W J"], Int32[Array, "B W J"]],
    grid: BlockGrid,
) -> tuple[Received, list[Int32[Array, " W"]]]:
    """Lists what ranks receive; also each rank's totals of queries, keys, runs and pairs.

    `keys` are the first of each block, and one past the last (None: the block's own); `counts` are
    the runs that begin in each block, and its pairs in the unit of `block_ranges`.
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
    row, kv_row, runs_before = sums_before(values[:3], rank, grid.num_ranks)
    totals = sum_by_key(values, rank, grid.num_ranks)
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


def _to_metadata(plan: Assignment, grid: BlockGrid, capacities: Capacities) -> list[Metadata]:
    """Returns the metadata of queries and of keys; counts also contain what is in no slot.

    Without its runs, a block would attend to wrong keys. It is in no slot, which the counts show.
    """
    sender, target, source_row, target_row, tokens = plan.transfers
    num_ranks = grid.num_ranks
    has_runs: Any = True
    if capacities.pieces < q_bound(grid):
        has_runs = plan.num_runs <= capacities.pieces
    # Sums write all: a slot's first transfer gives it all but its length, to which each adds.
    first = (jnp.where(plan.begins_slot, x, 0) for x in (target + 1, target_row, source_row))
    values = [x.astype(jnp.uint32) for x in (tokens, *first)]
    metadata = []
    for kind, num_slots in enumerate((capacities.q_transfers, capacities.kv_transfers)):
        source = sender - kind * num_ranks
        is_used = (source >= 0) & (source < num_ranks)
        num_cells = num_ranks * num_slots
        has_cell = is_used & has_runs & (plan.slot < num_slots)
        cell = jnp.where(has_cell, source * num_slots + plan.slot, num_cells)
        by_slot = [x.reshape(num_ranks, num_slots) for x in sum_by_key(values, cell, num_cells)]
        seq_len, dst_rank, dst_offset, src_offset = by_slot
        # By receiver and sender; the last column has the sums over senders.
        width = num_ranks + 1
        pair = jnp.concatenate([target * width + source, target * width + num_ranks])
        pair = jnp.where(jnp.tile(is_used, 2), pair, num_ranks * width)
        (received,) = sum_by_key([jnp.tile(values[0], 2)], pair, num_ranks * width)
        received = received.reshape(num_ranks, width)
        metadata.append(
            Metadata(
                dst_rank=dst_rank.astype(jnp.int32) - 1,
                dst_offset=dst_offset,
                seq_len=seq_len,
                src_offset=src_offset,
                num_recv_tokens=received,
                num_seqs=jnp.minimum(plan.num_slots[kind], num_slots),
                num_total_recv_tokens=received[:, -1],
                world_size=num_ranks,
            )
        )
    return metadata


def _runs(plan: Assignment, grid: BlockGrid, capacities: Capacities):
    """Returns row, position, origin and length of each rank's runs, `[W, P]`."""
    num_ranks, size = grid.num_ranks, capacities.pieces
    received = plan.received
    # By block in global order.
    values = received.rank, received.runs_before, received.row
    values = (*values, received.kv_row, received.first_column)
    _, rank, before, row, kv_row, column = lax.sort((received.block, *values), num_keys=1)
    to_row = kv_row - column

    # Column, counted over the batch, at which each run begins.
    index = before.reshape(grid.shape)[..., None] + plan.runs
    is_held = plan.begins_run & (index <= size) & (rank < num_ranks).reshape(grid.shape)[..., None]
    index = rank.reshape(grid.shape)[..., None] * size + index - 1
    index = jnp.where(is_held, index, num_ranks * size)  # out of bounds: dropped
    begins = jnp.full(num_ranks * size, -1, jnp.int32)
    place = jnp.arange(index.size, dtype=jnp.int32)
    begins = begins.at[index.reshape(-1).astype(jnp.uint32)].set(place, mode="drop")
    begins = begins.reshape(num_ranks, size)

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


_OP = "plan_attention"


@jax.named_scope("cpd.plan")
def plan_inside(
    segment_ids: Ids,
    positions: Ids | None,
    *,
    num_ranks: int,
    mask: Mask,
    config: PlanConfig,
    rank: Any = None,
) -> Plan:
    """Returns a plan of traced arrays.

    With `rank`, the index on the mesh axis, it is for the program that follows. It then has
    `ranges` for every mask, of this rank alone: for all ranks, they would be as many times as
    large. The fingerprint has no checksums of the batch.
    """
    grid = check_shapes(_OP, segment_ids, positions, num_ranks, config)
    check_mask_arrays(_OP, mask, segment_ids.shape)
    names = ("rank_speeds", "ranks_per_node", "hardware")
    given = [name for name in names if getattr(config, name) is not None]
    if given:
        raise ValueError(
            f"{_OP}: plans made inside jit do not support {', '.join(given)} of PlanConfig. Plan "
            "outside jit, for example in the data loader, or use their defaults."
        )
    q = config.q_capacity or q_bound(grid)
    capacities = Capacities(
        q=q,
        kv=config.kv_capacity or kv_bound(grid, mask),
        q_transfers=config.max_q_transfers or grid.batch * grid.per_piece,
        kv_transfers=config.max_kv_transfers or kv_transfers_bound(grid, is_causal=mask.is_causal),
        pieces=config.max_pieces or q,
    )
    segment_ids, positions = normalize_segment_ids(_OP, segment_ids, positions)
    starts, in_order = starts_in_order(segment_ids, positions)
    fault = order_error_code(in_order, mask, starts, run_ends(starts))
    assignment = assign(starts, grid=grid, mask=mask, tolerance=config.balance_tolerance)
    if rank is not None:  # the batch is that of this program
        if isinstance(mask, StaticMask):  # without runs, which would compile to more
            assignment = assignment._replace(ranges=column_ranges(mask, starts))
        fingerprint = order_fingerprint(fault, rank)[None, :2]
    else:
        if positions is None:
            positions = jnp.arange(starts.shape[1], dtype=jnp.int32)[None] - starts
        own = [
            jnp.asarray(checksums(number_ids(segment_ids), num_ranks, step=ID_STEP)),
            jnp.asarray(place_checksums(jnp.asarray(positions), num_ranks, counts=starts >= 0)),
        ]
        if mask.has_arrays:
            own.append(jnp.asarray(mask_checksums(mask, num_ranks)))
        received = assignment.received
        digest = plan_digest(config, mask.kind, received.block, received.rank)
        fingerprint = refused_at_fault(make_fingerprint(own, digest), fault)
    return Plan(
        **build(assignment, grid=grid, capacities=capacities, rank=rank),
        fingerprint=fingerprint,
        num_tokens=grid.rows,
        batch=grid.batch,
        q_capacity=capacities.q,
        kv_capacity=capacities.kv,
        mask=mask.kind,
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
    segment_ids, positions = normalize_segment_ids(op, segment_ids, positions)
    options = {"mask": mask, "tolerance": config.balance_tolerance}
    with jax.core.eval_context():
        starts = jax.jit(document_starts)(segment_ids, positions)
        needs = assign(starts, grid=grid, **options).needs
        values = [max(int(x), 1) for x in jax.device_get(needs)]
    return dataclasses.replace(config, **dict(zip(CAPACITIES, values, strict=True)))


def check_shapes(op: str, segment_ids, positions, world_size: int, config: PlanConfig) -> BlockGrid:
    """Checks types and shapes of a plan's arguments; returns the blocks of the batch."""
    check_type(op, "config", config, PlanConfig, "Omit it for the default.")
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
