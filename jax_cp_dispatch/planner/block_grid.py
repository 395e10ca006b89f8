"""Packed documents on a fixed grid of blocks: the start of documents, the cost of blocks."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
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


# Up to this many pairs, running sums and maxima compare all pairs.
_FEW_PAIRS = 2**20
# XLA for CPU compiles the reduction of a longer axis of one array in several steps.
WINDOW = 32


def running_max(x: Int32[Array, "*lead n"]) -> Int32[Array, "*lead n"]:
    """Inclusive maximum along the last axis."""
    return running_maxima([x])[0]


def running_maxima(xs: Sequence[Int32[Array, "*lead n"]]) -> Sequence[Int32[Array, "*lead n"]]:
    """Inclusive maxima along the last axis, of arrays of one shape: as one pass."""
    return _running(tuple(xs), jnp.maximum, fill=np.iinfo(np.int32).min)


def running_sum(x: Int32[Array, "*lead n"]) -> Int32[Array, "*lead n"]:
    """Inclusive sum along the last axis."""
    return _running((x,), jnp.add, fill=0)[0]


def sums_before(
    values: Sequence[Int32[Array, " n"]], key: Int32[Array, " n"], num_keys: int
) -> list[Int32[Array, " n"]]:
    """Sums values over the earlier elements with the same key, in [0, num_keys]."""
    size = len(key)
    place = jnp.arange(size, dtype=jnp.int32)
    if size**2 <= _FEW_PAIRS:
        return _sums(values, (place[None] < place[:, None]) & (key[None] == key[:, None]))
    key, place, *values = lax.sort((key, place, *values), num_keys=1)
    x = jnp.stack(values)
    # The sum over all keys may exceed 32 bits, its differences do not.
    total = running_sum(x) - x
    begins = jnp.pad(key[1:] != key[:-1], (1, 0), constant_values=True)
    first = jnp.where(begins, key, num_keys + 1)  # out of bounds: dropped
    before = jnp.zeros((len(x), num_keys + 1), jnp.int32).at[:, first].set(total, mode="drop")
    _, *sums = lax.sort((place, *(total - before[:, key])), num_keys=1)
    return sums


def sum_by_key(
    values: Sequence[Integer[Array, " n"]], key: Int32[Array, " n"], num_keys: int
) -> list[Integer[Array, " num_keys"]]:
    """Returns the sums of values of each key; a key of `num_keys` does not count."""
    if len(key) * num_keys <= _FEW_PAIRS:
        return _sums(values, key[None] == jnp.arange(num_keys, dtype=jnp.int32)[:, None])
    totals = jnp.zeros((len(values), num_keys), values[0].dtype)
    return list(totals.at[:, key].add(jnp.stack(values), mode="drop"))


def _sums(values: Sequence[Integer[Array, " n"]], counts: Bool[Array, "m n"]) -> list[Array]:
    """Returns the sums of what counts of each value."""
    counts = _in_windows(counts, fill=False)
    counted = [jnp.where(counts, _in_windows(x, fill=0)[None], 0) for x in values]
    return list(_reduced(counted, jnp.add, 0, num_axes=2))


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
        ends = _in_windows(total, fill=np.iinfo(np.int32).max)
        is_over = (ends[None] <= place[:, None, None]).astype(jnp.int32)
        of = jnp.minimum(_reduced([is_over], jnp.add, 0, num_axes=2)[0], len(count) - 1)
    else:
        begins = jnp.zeros(size, jnp.int32).at[total].add(1, mode="drop")
        of = jnp.minimum(running_sum(begins), len(count) - 1)
    return of, total - count, total[-1]


def _running(xs, combine, *, fill, exclusive=False):
    size = xs[0].shape[-1]
    xs = tuple(_in_windows(x, fill=fill) for x in xs)
    shape = xs[0].shape
    lead, num_windows = shape[:-2], shape[-2]
    if math.prod(shape) * size <= _FEW_PAIRS:  # one fused pass compiles fastest
        place = jnp.arange(num_windows * WINDOW, dtype=jnp.int32).reshape(shape[-2:])
        last = jnp.arange(size, dtype=jnp.int32)[:, None, None] - int(exclusive)
        is_seen = jnp.broadcast_to(place[None] <= last, (*lead, size, *place.shape))
        seen = tuple(jnp.where(is_seen, x[..., None, :, :], fill) for x in xs)
        return _reduced(seen, combine, fill, num_axes=2)
    of_windows = _reduced(xs, combine, fill, num_axes=1)
    before = _running(of_windows, combine, fill=fill, exclusive=True)
    if math.prod(shape) * WINDOW <= _FEW_PAIRS:
        within = _running(xs, combine, fill=fill)
        xs = tuple(combine(b[..., None], x) for b, x in zip(before, within, strict=True))
    else:
        # Processes windows in parallel, each starting from the reduction of the earlier ones. For
        # 2**21 elements on a CPU this takes 7 ms; the strided passes of `lax.cummax` take 120 ms.

        def step(so_far, x):
            so_far = jax.tree.map(combine, so_far, x)
            return so_far, so_far

        columns = tuple(jnp.moveaxis(x, -1, 0) for x in xs)
        xs = tuple(jnp.moveaxis(x, 0, -1) for x in lax.scan(step, before, columns)[1])
    xs = tuple(x.reshape(*lead, num_windows * WINDOW)[..., :size] for x in xs)
    if not exclusive:
        return xs
    pad = [*(len(lead) * [(0, 0)]), (1, 0)]
    return tuple(jnp.pad(x[..., :-1], pad, constant_values=fill) for x in xs)


def _reduced(xs: Sequence[Array], combine: Callable[..., Any], fill: int, *, num_axes: int):
    """Reduces the last axes of arrays of one shape together: as one pass that compiles once."""
    combined = lambda a, b: tuple(map(combine, a, b))
    axes = tuple(range(xs[0].ndim - num_axes, xs[0].ndim))
    return tuple(lax.reduce(tuple(xs), tuple(x.dtype.type(fill) for x in xs), combined, axes))


def smallest(*xs: Int32[Array, " n"]) -> list[tuple[Int32[Array, ""], Int32[Array, ""]]]:
    """Returns the smallest element of each array, and its first index: as one pass."""
    place = jnp.arange(len(xs[0]), dtype=jnp.int32)

    def smaller(a, b):
        pairs = zip(a[::2], a[1::2], b[::2], b[1::2], strict=True)
        picked = []
        for x, i, y, j in pairs:
            is_first = (x < y) | (x == y) & (i < j)
            picked += [jnp.where(is_first, x, y), jnp.where(is_first, i, j)]
        return tuple(picked)

    largest = np.int32(np.iinfo(np.int32).max)
    operands = tuple(y for x in xs for y in (x, place))
    found = lax.reduce(operands, len(operands) * (largest,), smaller, (0,))
    return list(zip(found[::2], found[1::2], strict=True))


def are_all(x: Bool[Array, "..."]) -> Bool[Array, ""]:
    """`jnp.all`; XLA for CPU would compile it in several steps."""
    if not x.size:
        return jnp.bool_(True)
    ((value, index),) = smallest(x.reshape(-1).astype(jnp.int32))
    return (value > 0) & (index >= 0)  # without the index, it would become that reduction


def _in_windows(x: Shaped[Array, "*lead n"], *, fill: Any) -> Shaped[Array, "*lead m window"]:
    num_windows = -(-x.shape[-1] // WINDOW)
    pad = [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, [*pad, (0, num_windows * WINDOW - x.shape[-1])], constant_values=fill)
    return x.reshape(*x.shape[:-1], num_windows, WINDOW)


def document_starts(
    segment_ids: Integer[Array, "B T"], positions: Integer[Array, "B T"] | None
) -> Int32[Array, "B T"]:
    """Returns the column at which each column's document starts; -1 at padding (segment <= 0)."""
    starts = running_max(columns_of_begins(segment_ids, positions))
    return jnp.where(segment_ids > 0, starts, -1)


def columns_of_begins(
    segment_ids: Integer[Array, "B T"], positions: Integer[Array, "B T"] | None
) -> Int32[Array, "B T"]:
    """Returns the column of each column at which a document or padding begins; 0 elsewhere."""
    column = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    if positions is not None:
        new |= positions[:, 1:] <= positions[:, :-1]
    new = jnp.pad(new, ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(new, column, 0)


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
    high, rest = _reduced(parts, jnp.add, 0, num_axes=3)
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


def divided(x: Integer[Array, "..."], divisor: int):
    """Int32 quotient and remainder of numbers in [0, 2**31); signed division compiles to more."""
    x = x.astype(jnp.uint32)
    quotient, remainder = lax.div(x, np.uint32(divisor)), lax.rem(x, np.uint32(divisor))
    return quotient.astype(jnp.int32), remainder.astype(jnp.int32)


def known_inside(
    x: Shaped[Array | np.ndarray, "..."],
    index: Integer[Array | np.ndarray, "..."] | int,
    *,
    axis: int = 0,
) -> Shaped[Array, "..."]:
    """Returns `jnp.take` of indices in [0, size); others would compile to more."""
    x, place = jnp.asarray(x), jnp.asarray(index).astype(jnp.uint32)
    if place.ndim == 0:
        return lax.dynamic_index_in_dim(x, place, axis, False, allow_negative_indices=False)
    return x.at[(slice(None),) * axis + (place,)].get(mode="promise_in_bounds")
