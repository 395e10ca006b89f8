"""Packed documents on a fixed grid of blocks, their cost, and what ranks receive of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from jax_cp_dispatch._arrays import (
    divided,
    reduced,
    run_ends,
    running_max,
    running_maxima,
    running_sum,
    smallest,
    sum_by_key,
    sums_before,
)
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.pairs import traced_pairs_per_query


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """The blocks of a batch whose columns are sharded over ranks; static and hashable.

    Rank w holds columns [w * T, (w + 1) * T) of each batch row, cut into J blocks of `block`
    columns; the last one may be shorter. Global order is (batch row, rank, block), which equals the
    order of (batch row, position). Slots of a rank are ordered by (batch row, block).
    """

    batch: int
    num_ranks: int
    columns: int  # of one rank: T
    block: int

    @property
    def per_piece(self) -> int:
        """Blocks of one rank in one batch row: J."""
        return -(-self.columns // self.block)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.num_ranks, self.per_piece

    @property
    def num_blocks(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows of one rank."""
        return self.batch * self.columns

    @property
    def lengths(self) -> np.ndarray:
        """Rows of block j, int32 [J]."""
        start = self.block * np.arange(self.per_piece, dtype=np.int32)
        return np.minimum(self.columns - start, self.block).astype(np.int32)

    def first_columns(self) -> Int32[Array, "B W J"]:
        """Returns the column of its batch row at which each block starts."""
        rank = jnp.arange(self.num_ranks, dtype=jnp.int32)[:, None] * self.columns
        start = jnp.arange(self.per_piece, dtype=jnp.int32)[None] * self.block
        return jnp.broadcast_to(rank + start, self.shape)

    def block_of(self, column: Int32[Array, "B W J"]) -> Int32[Array, "B W J"]:
        """Returns the index, in global order, of the block that contains a column."""
        batch = jnp.arange(self.batch, dtype=jnp.int32)[:, None, None]
        rank, within = divided(column, self.columns)
        return (batch * self.num_ranks + rank) * self.per_piece + divided(within, self.block)[0]

    def split(self, x: Shaped[Array, "B T"], *, fill: int) -> Shaped[Array, "B W J block"]:
        """Cuts columns into blocks; pads short blocks with `fill`."""
        x = x.reshape(self.batch, self.num_ranks, self.columns)
        short = self.per_piece * self.block - self.columns
        x = jnp.pad(x, ((0, 0), (0, 0), (0, short)), constant_values=fill)
        return x.reshape(*self.shape, self.block)


def block_ranges(
    starts: Int32[Array, "B T"], grid: BlockGrid, seen: Int32[Array, "B T"] | None = None
) -> tuple[Int32[Array, "B W J"], Int32[Array, "B W J"], Int32[Array, ""]]:
    """Returns the first key and the cost of each block of queries.

    Args:
      starts: the first column that each query sees; -1 at padding.
      seen: the keys that each query sees; None: all from the first one to its own.
    Returns:
      first: the first column to which any query of the block attends; -1 without queries.
      cost: query-key pairs in units of 2**shift; their sum is below 2**30, so sums over blocks are
        exact in int32 in any order. `shift` is 0 below 2**27 pairs.
      shift: exponent of the unit.
    """
    none = np.int32(np.iinfo(np.int32).max)
    start = grid.split(starts, fill=-1)
    live = start >= 0
    column = (
        grid.first_columns()[..., None] + jnp.arange(grid.block, dtype=jnp.int32)[None, None, None]
    )
    # Each query's pairs are divided by 2**row_shift, so that a block's pairs fit int32. The
    # divisor is 1 except for huge grids.
    row_shift = max(0, (grid.block * starts.shape[1]).bit_length() - 30)
    pairs = column + 1 - start if seen is None else grid.split(seen, fill=0)
    pairs = jnp.where(live, pairs, 0) + (1 << row_shift) - 1 >> row_shift
    # One reduction of both compiles once.
    both = lambda a, b: (jnp.minimum(a[0], b[0]), a[1] + b[1])
    of_columns = jnp.where(live, start, none), pairs
    first, cost = lax.reduce(of_columns, (none, np.int32(0)), both, (3,))
    # `total` * 2**low is an upper bound of the sum. High and low bits are added separately. With so
    # many blocks that the low bits could overflow, their `drop` lowest bits are dropped.
    low = (grid.num_blocks - 1).bit_length()
    drop = max(0, 2 * low - 30)
    parts = cost >> low, (cost & (1 << low) - 1) >> drop
    high, rest = reduced(parts, jnp.add, 0, num_axes=3)
    total = high + (rest >> (low - drop)) + (1 << drop)
    shift = jnp.maximum(low + 32 - lax.clz(total) - 29, 0)
    cost = cost + (1 << shift >> 1) >> shift
    return jnp.where(first == none, -1, first), cost, shift + row_shift


def places(block: Int32[Array, "..."], grid: BlockGrid):
    """Returns batch row, home, first of its columns there, and length of blocks in global order."""
    piece, number = divided(block, grid.per_piece)
    start = number * grid.block
    length = jnp.minimum(grid.columns - start, grid.block)
    return *divided(piece, grid.num_ranks), start, length


class Received(NamedTuple):
    """What ranks receive: a sequence of blocks of queries by rank, then in global order.

    Blocks without queries come last, with rank W. A block of queries needs keys from the first
    that a query of it sees to the last. Those that its rank does not have from earlier blocks are a
    contiguous range of columns, because first and last keys never decrease in global order.
    """

    block: Int32[Array, " G"]  # in global order
    rank: Int32[Array, " G"]
    row: Int32[Array, " G"]  # where its rank receives its first query
    first_column: Int32[Array, " G"]  # of the range of keys
    kv_row: Int32[Array, " G"]  # where its rank receives the range
    num_keys: Int32[Array, " G"]  # of the range
    runs_before: Int32[Array, " G"]  # runs of earlier blocks of its rank
    num_runs: Int32[Array, " G"]  # that begin in the block


class Capacities(NamedTuple):
    """Static sizes of a plan, in the order of `Plan.largest_needs`."""

    q: int
    kv: int
    q_transfers: int
    kv_transfers: int
    pieces: int


# ---- The keys that a rank may need inside `jit`: a bound of the mask, which the assignment keeps.
#
# A block of queries needs whole blocks of keys, from the one with the first key that a query of it
# sees to the one with the last. Where a mask has a reach, their number is limited: see `kv_bound`.


def kv_bound(grid: BlockGrid, mask: Mask) -> int:
    """Returns rows of keys that suffice for every rank, whatever the documents.

    As many as the blocks of one rank need if no two of them share a key; at most all keys. `assign`
    keeps the bound, because a rank's own queries always do: in each batch row they need its own
    keys, and what is beyond those of its first and its last block, no more than these alone need.
    """
    everything = grid.num_ranks * grid.rows
    before, after = mask.reach
    if before is None or after is None:
        return everything
    of_block = grid.block
    for reach in (before, after):  # the most rows of the blocks with so many keys beside a block
        if grid.columns % grid.block == 0:
            of_block += -(-reach // grid.block) * grid.block
        elif reach:
            of_block += reach + grid.block - 1  # blocks of unequal length
    return min(grid.batch * grid.per_piece * of_block, everything)


class KeyLimit(NamedTuple):
    """The keys of each block in global order, [G], in rows of the batch; and the limit.

    Neither begin nor end of the keys decreases. Padding needs none.
    """

    begin: Int32[Array, " G"]
    end: Int32[Array, " G"]
    is_used: Bool[Array, " G"]
    piece: Int32[Array, " G"]  # which rank's part of which batch row the block is of
    limit: int

    @classmethod
    def of(
        cls, grid: BlockGrid, mask: Mask, first: Int32[Array, "B W J"], last: Any
    ) -> KeyLimit | None:
        """Returns those of blocks with these keys; None if no assignment exceeds the limit.

        `first`: the first column that each block sees, -1 if it has no queries; `last`: one past
        the last; None: up to its own.
        """
        limit = kv_bound(grid, mask)
        if limit >= grid.num_ranks * grid.rows:
            return None
        block = jnp.arange(grid.num_blocks, dtype=jnp.int32)
        ends = block if last is None else grid.block_of(jnp.maximum(last - 1, 0)).reshape(-1)
        begin, _ = _rows(grid.block_of(jnp.maximum(first, 0)).reshape(-1), grid)
        _, end = _rows(ends, grid)
        piece, _ = divided(block, grid.per_piece)
        return cls(begin, end, first.reshape(-1) >= 0, piece, limit)

    @property
    def alone(self) -> Int32[Array, " G"]:
        """Returns the keys of each block if it shares none."""
        return jnp.where(self.is_used, self.end - self.begin, 0)

    def taken(
        self, given: Bool[Array, " G"], receiver: Int32[Array, " G"], num_ranks: int
    ) -> tuple[Bool[Array, " G"], Int32[Array, " W"]]:
        """Returns which given blocks their receivers take, and the keys that ranks then need.

        Ranks also need the keys of all queries that were theirs, whether these stay or not.
        Receivers never decrease, so the blocks of one are adjacent; it takes the first ones.
        """
        _, home = divided(self.piece, num_ranks)
        (held,) = sum_by_key([self._added(self.is_used, self.piece)], home, num_ranks)
        added = self._added(given, receiver)
        key = jnp.where(given, receiver, num_ranks)
        (before,) = sums_before([added], key, num_ranks)
        taken = given & (before + added <= self.limit - jnp.append(held, 0)[key])
        return taken, held + sum_by_key([jnp.where(taken, added, 0)], key, num_ranks)[0]

    def _added(self, counts: Bool[Array, " G"], owner: Int32[Array, " G"]) -> Int32[Array, " G"]:
        """Returns the keys of each block that the one before of the same owner does not need.

        The owners of the blocks that count never decrease.
        """
        seen = [jnp.where(counts, x, -1) for x in (self.end, owner)]
        end, before = (jnp.pad(x[:-1], (1, 0), constant_values=-1) for x in running_maxima(seen))
        begin = jnp.where(before == owner, jnp.maximum(self.begin, end), self.begin)
        return jnp.where(counts, self.end - begin, 0)


def _rows(block: Int32[Array, " G"], grid: BlockGrid) -> tuple[jax.Array, jax.Array]:
    """Returns the first row of blocks in the batch, and one past the last."""
    batch, home, start, length = places(block, grid)
    row = (batch * grid.num_ranks + home) * grid.columns + start
    return row, row + length


# ---- Assigns blocks to ranks: the replaceable decision of a plan.

# The repair stops after this many moves.
_MOVES_PER_RANK = 4


def balance_blocks(
    cost: Int32[Array, "B W J"],
    num_rows: Int32[Array, "B W J"],
    *,
    row_limit: int,
    tolerance: float,
    keys: KeyLimit | None = None,
) -> Int32[Array, "B W J"]:
    """Assigns blocks to ranks so that all ranks have nearly equal cost and few rows move.

    Every rank keeps its own blocks up to the mean cost. A rank above the mean gives away its blocks
    with the highest cost per row. These fill the ranks below the mean in global order, so that
    neighbouring blocks, which share keys, go to one rank. Finally, single blocks move from the most
    to the least loaded rank until the largest cost is within the tolerance.

    Before the last step, a rank has at most `2 T + block` rows, where T is the number of rows per
    rank. Proof: A giving rank keeps at least the mean M on at most T rows. It gives away its most
    expensive rows, so these cost at least M/T each. A receiving rank keeps at most T rows and
    receives a cost of at most M, that is at most T rows, plus the other halves of the two blocks at
    the ends of its share. The last step respects `row_limit`.

    With a limit of keys, blocks that exceed it stay at home, which costs balance. Beside the keys
    of all its own queries, a rank has room for those that it gets.

    Returns the rank that computes each block. All sums are of integers, so equal inputs give equal
    assignments. The sum of `cost` is below 2**30; `num_rows` move with a block, 0 if there is
    nothing to compute; the largest cost may exceed the mean by the fraction `tolerance`. Without
    `keys`, there is no limit of them. Not differentiable.
    """
    num_batch, num_ranks, num_blocks = cost.shape
    grouped = lambda x: x.swapaxes(0, 1).reshape(num_ranks, num_batch * num_blocks)  # by rank
    home = jnp.broadcast_to(jnp.arange(num_ranks, dtype=jnp.int32)[:, None], cost.shape)
    load = cost.sum((0, 2), dtype=jnp.int32)
    mean, _ = divided(load.sum(dtype=jnp.int32) + num_ranks - 1, num_ranks)

    # Each rank gives its blocks with the highest cost per row, up to its surplus.
    per_row = grouped(cost).astype(jnp.float32)
    per_row /= jnp.maximum(grouped(num_rows), 1).astype(jnp.float32)
    block = lax.broadcasted_iota(jnp.int32, per_row.shape, 1)
    _, ordered_cost, order = lax.sort((-per_row, grouped(cost), block), dimension=1, num_keys=1)
    surplus = jnp.maximum(load - mean, 0)
    given = (running_sum(ordered_cost) <= surplus[:, None]) & (ordered_cost > 0)
    _, given = lax.sort((order, given), dimension=1, num_keys=1)
    given = given.reshape(num_ranks, num_batch, num_blocks).swapaxes(0, 1)

    # It goes to the rank in whose share of the concatenated deficits its middle lies.
    flat = jnp.where(given, cost, 0).reshape(-1)
    middle = running_sum(flat) - flat + flat // 2
    ends = running_sum(jnp.maximum(mean - load, 0))
    # `jnp.searchsorted` cannot be traced inside a partly manual `shard_map` in JAX 0.10.
    poured = (ends[None] <= middle[:, None]).sum(1, dtype=jnp.int32).reshape(cost.shape)
    target = mean + (mean.astype(jnp.float32) * tolerance).astype(jnp.int32)
    limits, of_keys, held_keys = [row_limit], [], []
    if keys is not None:
        taken, held = keys.taken(given.reshape(-1), poured.reshape(-1), num_ranks)
        given = taken.reshape(given.shape)
        # A rank that gives a block may keep its keys.
        limits, of_keys, held_keys = [row_limit, keys.limit], [keys.alone], [held]
    assigned = jnp.where(given, poured, home).reshape(-1)
    of_blocks = cost.reshape(-1), num_rows.reshape(-1)
    held = jnp.stack([*sum_by_key(of_blocks, assigned, num_ranks), *held_keys])
    sizes = jnp.stack([*of_blocks, *of_keys])
    return _repair(assigned, sizes, held, limits, mean, target).reshape(cost.shape)


def _repair(
    assigned: Int32[Array, " G"],
    sizes: Int32[Array, "sizes G"],
    held: Int32[Array, "sizes W"],
    limits: Sequence[Any],
    mean: Int32[Array, ""],
    target: Int32[Array, ""],
) -> Int32[Array, " G"]:
    """Moves single blocks from the most to the least loaded rank while this reduces the maximum.

    `sizes` are cost and rows of each block, and its keys if they are limited; `held` the same of
    each rank, which may keep the keys of blocks that it gives.
    """
    cost, num_ranks = sizes[0], held.shape[1]
    ranks = jnp.arange(num_ranks, dtype=jnp.int32)
    blocks = jnp.arange(len(cost), dtype=jnp.int32)

    def move(state):
        assigned, held, moves_left = state
        load, *others = held
        (heaviest, giver), (lightest, taker) = smallest(-load, load)
        heaviest = -heaviest
        fits = assigned == giver
        for of_rank, of_block, limit in zip(others, sizes[1:], limits, strict=True):
            fits &= of_rank[taker] + of_block <= limit
        # The larger of the two loads after the move; values below the mean gain nothing, and
        # blocks without cost change nothing.
        after = jnp.maximum(jnp.maximum(heaviest - cost, lightest + cost), mean)
        ((after, block),) = smallest(jnp.where(fits, after, heaviest))
        helps = after < heaviest
        # Comparisons of all elements; `at[]` would compile to more.
        sign = (ranks == taker).astype(jnp.int32) - (ranks == giver).astype(jnp.int32)
        sign = jnp.where(helps, sign, 0)
        signs = jnp.stack([sign, sign, *(jnp.maximum(sign, 0) for _ in others[1:])])
        return [
            jnp.where(helps & (blocks == block), taker, assigned),
            held + signs * sizes[:, block, None],
            jnp.where(helps, moves_left - 1, 0),
        ]

    state = vary_alike([assigned, held, jnp.int32(_MOVES_PER_RANK * num_ranks)])
    goes_on = lambda state: (state[2] > 0) & (state[1][0].max() > target)
    return lax.while_loop(goes_on, move, state)[0]


# ---- What queries see inside `jit`: columns of packed rows, for any mask, and received rows.


class SeenColumns(NamedTuple):
    """Keys of each column, which never decrease in global order, and contain its own."""

    first: Int32[Array, "B T"]  # the first key of the column and of later ones; -1 at padding
    # One past the last key of the column and of earlier ones; None: its own key
    last: Int32[Array, "B T"] | None = None
    pairs: Int32[Array, "B T"] | None = None  # keys that the query sees; None: all of these
    # Tokens of its document; None: its keys do not depend on them
    lengths: Int32[Array, "B T"] | None = None
    # Of a mask with arrays, what the column sees; empty at padding
    ranges: MaskRanges | None = None


def seen_columns(mask: Mask, starts: Int32[Array, "B T"]) -> SeenColumns:
    """Returns what columns see, whose documents begin at the columns `starts` (-1 at padding)."""
    ranges, live = column_ranges(mask, starts), starts >= 0
    if isinstance(mask, StaticMask):
        first = jnp.where(live, ranges.k_start, -1)
        if mask.is_causal:
            return SeenColumns(first)
        pairs = ranges.k_end - ranges.k_start
        return SeenColumns(first, ranges.k_end, pairs, run_ends(starts) - starts)
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    ranges = jax.tree.map(lambda x: jnp.clip(x, 0, num_tokens).astype(jnp.int32), ranges)
    sees = ranges.k_start < ranges.k_end
    first = jnp.where(sees, jnp.minimum(ranges.k_start, column), column)
    first = -running_max(-jnp.where(live, first, num_tokens)[:, ::-1])[:, ::-1]
    last = None
    if not mask.is_causal:
        last = jnp.where(sees, jnp.maximum(ranges.k_end, column + 1), column + 1)
        last = running_max(jnp.where(live, last, 0))
    pairs = traced_pairs_per_query(ranges, is_causal=mask.is_causal)
    return SeenColumns(jnp.where(live, first, -1), last, pairs, ranges=ranges)


def column_ranges(mask: Mask, starts: Int32[Array, "B T"]) -> MaskRanges:
    """Returns what each column sees; empty at padding."""
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    has_ends = not (mask.is_causal and isinstance(mask, StaticMask))
    ends = run_ends(starts) if has_ends else None
    ranges = mask.clipped(num_tokens).ranges(column, starts, ends)
    return jax.tree.map(lambda x: jnp.where(starts >= 0, x, 0), ranges)


def seen_by_rows(
    seen: MaskRanges,
    received: Received,
    grid: BlockGrid,
    capacities: Capacities,
    ranks: Int32[Array, " held"],
) -> MaskRanges:
    """Returns what the received rows of these ranks see, `[held, rows]`; empty for padding.

    `seen` is what each column sees, `[B, T]`. `ranks` are all, in order, or one.
    """
    # The keys of a block of queries are adjacent rows: those that earlier blocks of its rank
    # brought, and those that it brings.
    num_blocks, size = grid.num_blocks, capacities.q
    of_blocks = received.rank, received.row, received.kv_row - received.first_column
    table = jnp.zeros((num_blocks, 3), jnp.int32).at[received.block].set(jnp.stack(of_blocks, -1))
    rank, row, to_row = jnp.moveaxis(table, -1, 0)[..., None]
    held = rank - ranks[0]  # its place among these ranks
    is_held = (held >= 0) & (held < len(ranks))
    within = jnp.arange(grid.block, dtype=jnp.int32)[None]
    by_block = lambda x, fill: grid.split(x, fill=fill).reshape(num_blocks, grid.block)
    sees = by_block(seen.k_start < seen.k_end, False)
    place = jnp.where(is_held & sees & (row + within < size), held * size + row + within, -1)
    place = jnp.where(place < 0, len(ranks) * size, place).reshape(-1)  # out of bounds: dropped
    rows = jnp.zeros(len(ranks) * size, jnp.int32)
    start, end = (
        rows.at[place]
        .set((by_block(x, 0) + to_row).reshape(-1), mode="drop")
        .reshape(len(ranks), size)
        for x in (seen.k_start, seen.k_end)
    )
    if seen.q_start is None:
        return MaskRanges(start, end)
    return MaskRanges(start, end, *_key_rows(seen, received, grid, capacities.kv, ranks))


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
    num_tokens = grid.num_ranks * grid.columns
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
