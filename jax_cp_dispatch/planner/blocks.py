"""Packed documents on a fixed grid of blocks: the start of documents, the cost of blocks."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Integer, Shaped


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
        piece = batch * self.world_size + column // self.columns
        return piece * self.per_piece + column % self.columns // self.block

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


# Up to this many pairs, running sums and maxima compare all pairs.
_FEW_PAIRS = 2**20


def running_max(x: Int32[Array, "*lead n"]) -> Int32[Array, "*lead n"]:
    """Inclusive maximum along the last axis."""
    return _running(x, jnp.maximum, jnp.max, fill=np.iinfo(np.int32).min)


def running_sum(x: Int32[Array, "*lead n"]) -> Int32[Array, "*lead n"]:
    """Inclusive sum along the last axis."""
    return _running(x, jnp.add, partial(jnp.sum, dtype=jnp.int32), fill=0)


def running_sum_by_key(
    values: Sequence[Int32[Array, " n"]], key: Int32[Array, " n"], num_keys: int
) -> list[Int32[Array, " n"]]:
    """Inclusive sums of values, over the elements with the same key, in [0, num_keys]."""
    size = len(key)
    place = jnp.arange(size, dtype=jnp.int32)
    if size**2 <= _FEW_PAIRS:
        return _sums(values, (place[None] <= place[:, None]) & (key[None] == key[:, None]))
    key, place, *values = lax.sort((key, place, *values), num_keys=1)
    x = jnp.stack(values)
    # The sum over all keys may exceed 32 bits, its differences do not.
    total = running_sum(x)
    begins = jnp.pad(key[1:] != key[:-1], (1, 0), constant_values=True)
    first = jnp.where(begins, key, num_keys + 1)  # out of bounds: dropped
    before = jnp.zeros((len(x), num_keys + 1), jnp.int32).at[:, first].set(total - x, mode="drop")
    _, *sums = lax.sort((place, *(total - before[:, key])), num_keys=1)
    return sums


def sum_by_key(
    values: Sequence[Int32[Array, " n"]], key: Int32[Array, " n"], num_keys: int
) -> list[Int32[Array, " num_keys"]]:
    """Returns the sums of values of each key; a key of `num_keys` does not count."""
    if len(key) * num_keys <= _FEW_PAIRS:
        return _sums(values, key[None] == jnp.arange(num_keys, dtype=jnp.int32)[:, None])
    totals = jnp.zeros((len(values), num_keys), jnp.int32)
    return list(totals.at[:, key].add(jnp.stack(values), mode="drop"))


def _sums(values: Sequence[Int32[Array, " n"]], counts: Bool[Array, "m n"]) -> list[Array]:
    """Returns, for each value, the sums of what counts: together, as one pass that compiles once.

    XLA for CPU rewrites the reduction of a single array into several.
    """
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
    counted = tuple(jnp.where(counts, x[None], 0) for x in values)
    zeros = tuple(jnp.zeros((), jnp.int32) for _ in values)
    return list(lax.reduce(counted, zeros, add, (1,)))


def repeated(
    count: Int32[Array, " n"], size: int
) -> tuple[Int32[Array, " size"], Int32[Array, " n"], Int32[Array, ""]]:
    """Returns, for `size` places, which element each belongs to if it has `count` places.

    Returns:
      of: the element; any of them for places after the last.
      first: the first place of each element.
      total: the number of places of all.
    """
    total = running_sum(count)
    place = jnp.arange(size, dtype=jnp.int32)
    if size * len(count) <= _FEW_PAIRS:
        of = (total[None] <= place[:, None]).sum(1, dtype=jnp.int32)
        of = jnp.minimum(of, len(count) - 1)
    else:
        begins = jnp.zeros(size, jnp.int32).at[total].add(1, mode="drop")
        of = jnp.minimum(running_sum(begins), len(count) - 1)
    return of, total - count, total[-1]


def _running(x, combine, reduce, *, fill):
    size = x.shape[-1]
    if math.prod(x.shape) * size <= _FEW_PAIRS:  # one fused pass compiles fastest
        place = jnp.arange(size, dtype=jnp.int32)
        is_seen = jnp.broadcast_to(place[None] <= place[:, None], (*x.shape, size))
        x = jnp.where(is_seen, x[..., None, :], fill)
        return reduce(x, axis=-1, initial=fill)
    width = 128
    num_runs = -(-size // width)
    pad = [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, [*pad, (0, num_runs * width - size)], constant_values=fill)
    x = x.reshape(*x.shape[:-1], num_runs, width)
    before = _running(reduce(x, axis=-1)[..., :-1], combine, reduce, fill=fill)
    before = jnp.pad(before, [*pad, (1, 0)], constant_values=fill)
    if math.prod(x.shape) * width <= _FEW_PAIRS:
        x = combine(before[..., None], _running(x, combine, reduce, fill=fill))
        return x.reshape(*x.shape[:-2], num_runs * width)[..., :size]
    # Processes segments in parallel, each starting from the reduction of the earlier ones. For
    # 2**21 elements on a CPU this takes 7 ms; the strided passes of `lax.cummax` take 120 ms.

    def step(so_far, x):
        so_far = combine(so_far, x)
        return so_far, so_far

    x = jnp.moveaxis(lax.scan(step, before, jnp.moveaxis(x, -1, 0))[1], 0, -1)
    return x.reshape(*x.shape[:-2], num_runs * width)[..., :size]


def document_starts(
    segment_ids: Integer[Array, "B T"], positions: Integer[Array, "B T"] | None
) -> Int32[Array, "B T"]:
    """Returns the column at which each column's document starts; -1 at padding (segment <= 0)."""
    column = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    if positions is not None:
        new |= positions[:, 1:] <= positions[:, :-1]
    new = jnp.pad(new, ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(segment_ids > 0, running_max(jnp.where(new, column, 0)), -1)


def document_ends(starts: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns one past the last column of each column's document."""
    column = jnp.arange(starts.shape[1], dtype=jnp.int32)
    is_last = jnp.pad(starts[:, 1:] != starts[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = jnp.where(is_last, column, starts.shape[1])
    return 1 - jnp.flip(running_max(jnp.flip(-last, axis=1)), axis=1)


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
    none = np.iinfo(np.int32).max
    start = grid.split(starts, fill=-1)
    live = start >= 0
    first = jnp.where(live, start, none).min(-1)
    column = (
        grid.first_columns()[..., None] + jnp.arange(grid.block, dtype=jnp.int32)[None, None, None]
    )
    # Each query's pairs are divided by 2**row_shift, so that a block's pairs fit int32. The
    # divisor is 1 except for huge grids.
    row_shift = max(0, (grid.block * starts.shape[1]).bit_length() - 30)
    pairs = column + 1 - start if seen is None else grid.split(seen, fill=0)
    pairs = jnp.where(live, pairs, 0) + (1 << row_shift) - 1 >> row_shift
    cost = pairs.sum(-1, dtype=jnp.int32)
    # `total` * 2**low is an upper bound of the sum. High and low bits are added separately. With so
    # many blocks that the low bits could overflow, their `drop` lowest bits are dropped.
    low = (grid.num_blocks - 1).bit_length()
    drop = max(0, 2 * low - 30)
    rest = ((cost & (1 << low) - 1) >> drop).sum(dtype=jnp.int32) >> (low - drop)
    total = (cost >> low).sum(dtype=jnp.int32) + rest + (1 << drop)
    shift = jnp.maximum(low + 32 - lax.clz(total) - 29, 0)
    cost = cost + (1 << shift >> 1) >> shift
    return jnp.where(first == none, -1, first), cost, shift + row_shift


def places(block: Int32[Array, "..."], grid: BlockGrid):
    """Returns batch row, home, first of its columns there, and length of blocks in global order."""
    piece, number = divided(block, grid.per_piece)
    start = number * grid.block
    length = jnp.minimum(grid.columns - start, grid.block)
    return *divided(piece, grid.world_size), start, length


def divided(x: Int32[Array, "..."], divisor: int):
    """Quotient and remainder of numbers that are not negative; `//` would compile to more."""
    return lax.div(x, np.int32(divisor)), lax.rem(x, np.int32(divisor))
