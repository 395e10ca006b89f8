"""Metadata of transfers that are traced: one slot for each range that a rank sends.

Queries and keys are cut and numbered together: each sort, gather and running sum takes time to
compile, so there is one for both.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._arrays import divided
from jax_cp_dispatch._scans import repeated, sum_by_key, sums_before
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning.block_grid import BlockGrid, Capacities, Received, places


class TracedTransfers(NamedTuple):
    """Ranges of rows that move, of queries and then of keys, in the order of the targets' rows.

    Unused entries have no tokens, sender 2 W and target W.
    """

    sender: Int32[Array, " X"]  # the rank of queries, W + the rank of keys
    target: Int32[Array, " X"]
    source_row: Int32[Array, " X"]
    target_row: Int32[Array, " X"]
    tokens: Int32[Array, " X"]
    # Of the target, with those of these queries; 0 for keys. None: all runs fit.
    num_runs: Int32[Array, " X"] | None


class Slots(NamedTuple):
    """The slot of each transfer at its sender; adjacent transfers share a slot."""

    slot: Int32[Array, " X"]
    is_first: Bool[Array, " X"]  # of its slot
    counts: Int32[Array, "2 W"]  # slots of each sender


def list_traced(received: Received, grid: BlockGrid, size: int) -> TracedTransfers:
    """Returns ranges of queries and of keys, cut where they cross from one home to the next.

    Args:
      received: what ranks receive.
      grid: the blocks.
      size: number of entries, at least that of the ranges after the cuts.
    """
    world_size = grid.world_size
    batch, home, start, length = places(received.block, grid)
    is_used = received.rank < world_size
    num_runs = received.runs_before + received.num_runs
    queries = home * grid.columns + start, length, received.row, 0 * home, num_runs
    keys = received.first_column, received.num_keys, received.kv_row, 0 * home + world_size
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
    return TracedTransfers(
        sender=jnp.where(is_used, kind + home, 2 * world_size),
        target=jnp.where(is_used, target, world_size),
        source_row=to_source_row + first - start,
        target_row=first + to_row,
        tokens=jnp.where(is_used, jnp.minimum(end, start + grid.columns) - first, 0),
        num_runs=num_runs,
    )


def by_sender(transfers: TracedTransfers, world_size: int) -> Slots:
    """Numbers the slots of each sender in the order of the transfers."""
    sender, target, source_row, target_row, tokens, _ = transfers
    follows = (
        (sender[1:] == sender[:-1])
        & (target[1:] == target[:-1])
        & (source_row[1:] == source_row[:-1] + tokens[:-1])
        & (target_row[1:] == target_row[:-1] + tokens[:-1])
    )
    is_first = jnp.pad(~follows, (1, 0), constant_values=True) & (sender < 2 * world_size)
    first = is_first.astype(jnp.int32)
    (earlier,) = sums_before([first], sender, 2 * world_size)
    (counts,) = sum_by_key([first], sender, 2 * world_size)
    return Slots(earlier + first - 1, is_first, counts.reshape(2, world_size))


def to_metadata(
    transfers: TracedTransfers, slots: Slots, world_size: int, capacities: Capacities
) -> list[Metadata]:
    """Returns the metadata of queries and of keys; counts also contain what is in no slot.

    Without its runs, a block would attend to wrong keys. It is in no slot, which the counts show.
    """
    sender, target, source_row, target_row, tokens, num_runs = transfers
    has_runs = True if num_runs is None else num_runs <= capacities.pieces
    # Sums write all: a slot's first transfer gives it all but its length, to which each adds.
    first = (jnp.where(slots.is_first, x, 0) for x in (target + 1, target_row, source_row))
    values = [x.astype(jnp.uint32) for x in (tokens, *first)]
    metadata = []
    for kind, num_slots in enumerate((capacities.q_transfers, capacities.kv_transfers)):
        source = sender - kind * world_size
        is_used = (source >= 0) & (source < world_size)
        num_cells = world_size * num_slots
        has_cell = is_used & has_runs & (slots.slot < num_slots)
        cell = jnp.where(has_cell, source * num_slots + slots.slot, num_cells)
        by_slot = [x.reshape(world_size, num_slots) for x in sum_by_key(values, cell, num_cells)]
        seq_len, dst_rank, dst_offset, src_offset = by_slot
        # By receiver and sender; the last column has the sums over senders.
        width = world_size + 1
        pair = jnp.concatenate([target * width + source, target * width + world_size])
        pair = jnp.where(jnp.tile(is_used, 2), pair, world_size * width)
        (received,) = sum_by_key([jnp.tile(values[0], 2)], pair, world_size * width)
        received = received.reshape(world_size, width)
        metadata.append(
            Metadata(
                dst_rank=dst_rank.astype(jnp.int32) - 1,
                dst_offset=dst_offset,
                seq_len=seq_len,
                src_offset=src_offset,
                num_recv_tokens=received,
                num_seqs=jnp.minimum(slots.counts[kind], num_slots),
                num_total_recv_tokens=received[:, -1],
                world_size=world_size,
            )
        )
    return metadata
