"""What queries see inside `jit`: columns of packed rows, for any mask, and received rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch._arrays import divided
from jax_cp_dispatch._scans import running_max, running_sum
from jax_cp_dispatch.documents.order import document_ends
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.pairs import traced_pairs_per_query
from jax_cp_dispatch.planning.block_grid import BlockGrid, Capacities, Received, places


class SeenColumns(NamedTuple):
    """Keys of each column, which never decrease in global order, and contain its own.

    Attributes:
      first: the first key of the column and of later ones; -1 at padding.
      last: one past the last key of the column and of earlier ones; None: its own key.
      pairs: keys that the query sees; None: all of these.
      lengths: tokens of its document; None: its keys do not depend on them.
      ranges: of a mask with arrays, what the column sees; empty at padding.
    """

    first: Int32[Array, "B T"]
    last: Int32[Array, "B T"] | None = None
    pairs: Int32[Array, "B T"] | None = None
    lengths: Int32[Array, "B T"] | None = None
    ranges: MaskRanges | None = None


def seen_columns(mask: Mask, starts: Int32[Array, "B T"]) -> SeenColumns:
    """Returns what the columns see.

    Args:
      mask: its arrays, if any, are `[B, T]`.
      starts: the first column of each column's document; -1 at padding.
    """
    if not isinstance(mask, StaticMask):
        return _of_arrays(mask, starts)
    first = _first_keys(mask, starts)
    if mask.is_causal:
        return SeenColumns(first)
    ends = document_ends(starts)
    last = _last_keys(mask, starts, ends)
    pairs = jnp.where(starts >= 0, last - first, 0)
    return SeenColumns(first, last, pairs, ends - starts)


def column_ranges(mask: StaticMask, starts: Int32[Array, "B T"]) -> MaskRanges:
    """Returns what each column sees; empty at padding."""
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    ends = None if mask.is_causal else document_ends(starts)
    ranges = mask.clipped(num_tokens).ranges(column, starts, ends)
    return jax.tree.map(lambda x: jnp.where(starts >= 0, x, 0), ranges)


def _first_keys(mask: StaticMask, starts: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns the first column that each column sees; -1 at padding."""
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    first = mask.clipped(num_tokens).k_start(column, starts)
    return starts if first is starts else jnp.where(starts >= 0, first, -1)


def _last_keys(
    mask: StaticMask, starts: Int32[Array, "B T"], ends: Int32[Array, "B T"]
) -> Int32[Array, "B T"]:
    """Returns one past the last column that each column sees; 0 at padding."""
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    return jnp.where(starts >= 0, mask.clipped(num_tokens).k_end(column, starts, ends), 0)


def _of_arrays(mask: Mask, starts: Int32[Array, "B T"]) -> SeenColumns:
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    live = starts >= 0
    ranges = mask.ranges(column, starts, document_ends(starts))
    inside = lambda x: jnp.where(live, jnp.clip(x, 0, num_tokens), 0).astype(jnp.int32)
    ranges = jax.tree.map(inside, ranges)
    sees = ranges.k_start < ranges.k_end
    first = jnp.where(sees, jnp.minimum(ranges.k_start, column), column)
    first = -running_max(-jnp.where(live, first, num_tokens)[:, ::-1])[:, ::-1]
    last = None
    if not mask.is_causal:
        last = jnp.where(sees, jnp.maximum(ranges.k_end, column + 1), column + 1)
        last = running_max(jnp.where(live, last, 0))
    pairs = traced_pairs_per_query(ranges, is_causal=mask.is_causal)
    return SeenColumns(jnp.where(live, first, -1), last, pairs, ranges=ranges)


def seen_by_rows(
    seen: MaskRanges,
    received: Received,
    grid: BlockGrid,
    capacities: Capacities,
    ranks: Int32[Array, " held"],
) -> MaskRanges:
    """Returns what the received rows of these ranks see, `[held, rows]`; empty for padding.

    Args:
      seen: what each column sees, `[B, T]`.
      received: what ranks receive.
      grid, capacities: sizes.
      ranks: all, in order, or one.
    """
    start, end = _query_rows(seen, received, grid, capacities.q, ranks)
    if seen.q_start is None:
        return MaskRanges(start, end)
    return MaskRanges(start, end, *_key_rows(seen, received, grid, capacities.kv, ranks))


def _query_rows(
    seen: MaskRanges,
    received: Received,
    grid: BlockGrid,
    size: int,
    ranks: Int32[Array, " held"],
) -> list[Any]:
    """Returns the keys of each received query.

    The keys of a block of queries are adjacent rows: those that earlier blocks of its rank brought,
    and those that it brings.
    """
    num_blocks = grid.num_blocks
    of_blocks = received.rank, received.row, received.kv_row - received.first_column
    table = jnp.zeros((num_blocks, 3), jnp.int32).at[received.block].set(jnp.stack(of_blocks, -1))
    rank, row, to_row = jnp.moveaxis(table, -1, 0)[..., None]
    held = rank - ranks[0]  # its place among these ranks
    is_held = (held >= 0) & (held < len(ranks))
    within = jnp.arange(grid.block, dtype=jnp.int32)[None]
    sees = _by_block(seen.k_start < seen.k_end, grid, fill=False)
    place = jnp.where(is_held & sees & (row + within < size), held * size + row + within, -1)
    place = jnp.where(place < 0, len(ranks) * size, place).reshape(-1)  # out of bounds: dropped
    rows = jnp.zeros(len(ranks) * size, jnp.int32)
    return [
        rows.at[place]
        .set((_by_block(x, grid, fill=0) + to_row).reshape(-1), mode="drop")
        .reshape(len(ranks), size)
        for x in (seen.k_start, seen.k_end)
    ]


def _key_rows(
    seen: MaskRanges,
    received: Received,
    grid: BlockGrid,
    size: int,
    ranks: Int32[Array, " held"],
) -> list[Any]:
    """Returns the queries of each received key."""
    here = received.rank[None] == ranks[:, None]
    # The entry of `received` that brings each row: the last one that begins before it.
    brings = here & (received.num_keys > 0)[None]
    num_held, num_entries = here.shape
    entry = jnp.broadcast_to(jnp.arange(num_entries, dtype=jnp.int32), here.shape)
    begin = jnp.where(brings, received.kv_row[None], size)
    held = jnp.arange(num_held, dtype=jnp.int32)[:, None]
    of = jnp.zeros((num_held, size), jnp.int32).at[held, begin].max(entry, mode="drop")
    of = running_max(of)
    batch, *_ = places(received.block, grid)
    first, kv_row, num_keys, batch = jnp.stack(
        [received.first_column, received.kv_row, received.num_keys, batch], -1
    )[of].transpose(2, 0, 1)
    row = jnp.arange(size, dtype=jnp.int32)[None] - kv_row
    total = jnp.where(brings, (received.kv_row + received.num_keys)[None], 0).max(1, keepdims=True)
    is_key = (row + kv_row < total) & (row < num_keys)
    num_tokens = grid.world_size * grid.columns
    token = batch * num_tokens + jnp.where(is_key, first + row, 0)

    # Rows of queries that a rank receives of the blocks before each block, and of all.
    table = jnp.zeros(grid.num_blocks, jnp.int32).at[received.block].set(received.rank)
    *_, length = places(jnp.arange(grid.num_blocks, dtype=jnp.int32), grid)
    is_here = table[None] == ranks[:, None]
    before = jnp.pad(running_sum(jnp.where(is_here, length[None], 0)), ((0, 0), (1, 0)))
    is_here = jnp.pad(is_here, ((0, 0), (0, 1)))

    def rows_before(x):
        position = batch * num_tokens + x.reshape(-1)[token]
        piece, column = divided(position, grid.columns)
        number, within = divided(column, grid.block)
        block = piece * grid.per_piece + number
        return before[held, block] + jnp.where(is_here[held, block], within, 0)

    return [jnp.where(is_key, rows_before(x), 0) for x in (seen.q_start, seen.q_end)]


def _by_block(x: Array, grid: BlockGrid, *, fill: Any) -> Array:
    """Returns the columns of each block, `[G, block]`."""
    return grid.split(x, fill=fill).reshape(grid.num_blocks, grid.block)
