"""Packed documents on a fixed grid of blocks, their cost, and what ranks receive of them."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._arrays import divided
from jax_cp_dispatch._scans import reduced


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """The blocks of a batch whose columns are sharded over ranks; static and hashable.

    Rank w holds columns [w * T, (w + 1) * T) of each batch row, cut into J blocks of `block`
    columns; the last one may be shorter. Global order is (batch row, rank, block), which equals the
    order of (batch row, position). Slots of a rank are ordered by (batch row, block).
    """

    batch: int
    world_size: int
    columns: int  # of one rank: T
    block: int

    @property
    def per_piece(self) -> int:
        """Blocks of one rank in one batch row: J."""
        return -(-self.columns // self.block)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.world_size, self.per_piece

    @property
    def num_blocks(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows of one rank."""
        return self.batch * self.columns

    @property
    def unit(self) -> int:
        """Largest length that divides all block lengths, and therefore all start rows of blocks."""
        return math.gcd(self.block, self.columns)

    @property
    def lengths(self) -> np.ndarray:
        """Rows of block j, int32 [J]."""
        start = self.block * np.arange(self.per_piece, dtype=np.int32)
        return np.minimum(self.columns - start, self.block).astype(np.int32)

    def first_columns(self) -> Int32[Array, "B W J"]:
        """Returns the column of its batch row at which each block starts."""
        rank = jnp.arange(self.world_size, dtype=jnp.int32)[:, None] * self.columns
        start = jnp.arange(self.per_piece, dtype=jnp.int32)[None] * self.block
        return jnp.broadcast_to(rank + start, self.shape)

    def block_of(self, column: Int32[Array, "B W J"]) -> Int32[Array, "B W J"]:
        """Returns the index, in global order, of the block that contains a column."""
        batch = jnp.arange(self.batch, dtype=jnp.int32)[:, None, None]
        rank, within = divided(column, self.columns)
        return (batch * self.world_size + rank) * self.per_piece + divided(within, self.block)[0]

    def split(self, x: Shaped[Array, "B T"], *, fill: int) -> Shaped[Array, "B W J block"]:
        """Cuts columns into blocks; pads short blocks with `fill`."""
        x = x.reshape(self.batch, self.world_size, self.columns)
        short = self.per_piece * self.block - self.columns
        x = jnp.pad(x, ((0, 0), (0, 0), (0, short)), constant_values=fill)
        return x.reshape(*self.shape, self.block)

    def by_rank(self, x: Shaped[Array, "..."]) -> Shaped[Array, "W S *rest"]:
        """Reorders blocks in global order, [B * W * J, ...], into slots of ranks."""
        x = x.reshape(*self.shape, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(self.world_size, self.batch * self.per_piece, *x.shape[3:])


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
    return *divided(piece, grid.world_size), start, length


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
