"""Array operations that XLA compiles to few, and the dtypes of sums."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Integer, Shaped

from jax_cp_dispatch._arguments import HostOrDevice


def where_or_zero(mask: Bool[Array, "..."], x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns `x` where the mask of its first axes is true, else zero."""
    return chosen(mask, x, lax.full_like(x, 0))


def only_if_right(is_right: Bool[Array, ""], outputs: Any) -> Any:
    """Returns outputs, or NaN (zeros of integers): XLA's collectives raise no error."""
    wrong = lambda x: jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    return jax.tree.map(lambda x: jnp.where(is_right, x, jnp.asarray(wrong(x), x.dtype)), outputs)


def chosen(
    mask: Bool[Array, "..."], x: Shaped[Array, "..."], other: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """Returns `x` where the mask of its first axes is true, else `other`."""
    axes, sharding = tuple(range(mask.ndim)), jax.typeof(x).sharding
    return lax.select(lax.broadcast_in_dim(mask, x.shape, axes, out_sharding=sharding), x, other)


def in_chunks(x: Shaped[Array, "n ..."], size: int) -> Shaped[Array, "chunks size ..."]:
    """Returns rows in chunks, with rows of zeros after the last one."""
    x = jnp.pad(x, ((0, -len(x) % size), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(-1, size, *x.shape[1:])


class At(NamedTuple):
    """Places in arrays: their indices in some axes, which are in bounds."""

    places: Int32[Array, "P axes"]
    axes: tuple[int, ...]

    def take(self, x: Shaped[Array, "..."]) -> Shaped[Array, "P ..."]:
        """Returns what is there. (`x[...]` is several operations more.)"""
        offset = tuple(range(1, 1 + x.ndim - len(self.axes)))
        numbers = lax.GatherDimensionNumbers(offset, self.axes, self.axes)
        sizes = tuple(1 if i in self.axes else n for i, n in enumerate(x.shape))
        return lax.gather(x, self.places, numbers, sizes, mode="promise_in_bounds")

    def add(self, x: Shaped[Array, "..."], y: Shaped[Array, "P ..."]) -> Shaped[Array, "..."]:
        window = tuple(range(1, 1 + x.ndim - len(self.axes)))
        numbers = lax.ScatterDimensionNumbers(window, self.axes, self.axes)
        return lax.scatter_add(x, self.places, y, numbers, mode="promise_in_bounds")


def divided(x: Integer[Array, "..."], divisor: int):
    """Int32 quotient and remainder of numbers in [0, 2**31); signed division compiles to more."""
    x = x.astype(jnp.uint32)
    quotient, remainder = lax.div(x, np.uint32(divisor)), lax.rem(x, np.uint32(divisor))
    return quotient.astype(jnp.int32), remainder.astype(jnp.int32)


def take_in_bounds(
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


def sum_dtype(*dtypes: Any) -> np.dtype:
    """Returns the dtype of sums: float64 if any of these types is float64, else float32.

    Of complex numbers, that of two such floats.
    """
    given = [np.dtype(dtype) for dtype in dtypes]
    is_double = any(dtype in (np.float64, np.complex128) for dtype in given)
    if any(dtype.kind == "c" for dtype in given):
        return np.dtype(np.complex128 if is_double else np.complex64)
    return np.dtype(np.float64 if is_double else np.float32)


# ---- Running sums and maxima, and sums by key, which XLA compiles to few operations.

# Up to this many pairs, running sums and maxima compare all pairs.
_FEW_PAIRS = 2**20
# XLA for CPU compiles the reduction of a longer axis of one array in several steps.
WINDOW = 32


def running_max(x: Int32[HostOrDevice, "*lead n"]) -> Any:
    """Inclusive maximum along the last axis; of NumPy arrays by NumPy."""
    if isinstance(x, np.ndarray):
        return np.maximum.accumulate(x, axis=-1)
    return _running((x,), jnp.maximum, fill=np.iinfo(np.int32).min)[0]


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
    counts = _in_windows(counts, fill=False)
    counted = [jnp.where(counts, _in_windows(x, fill=0)[None], 0) for x in values]
    return list(reduced(counted, jnp.add, 0, num_axes=2))


def repeated(
    count: Int32[Array, " n"], size: int
) -> tuple[Int32[Array, " size"], Int32[Array, " n"], Int32[Array, ""]]:
    """Returns the element of each of `size` places if elements have `count`; after these, any.

    Also the first place of each element, and the number of places of all.
    """
    total = running_sum(count)
    place = jnp.arange(size, dtype=jnp.int32)
    if size * len(count) <= _FEW_PAIRS:
        ends = _in_windows(total, fill=np.iinfo(np.int32).max)
        is_over = (ends[None] <= place[:, None, None]).astype(jnp.int32)
        of = jnp.minimum(reduced([is_over], jnp.add, 0, num_axes=2)[0], len(count) - 1)
    else:
        begins = jnp.zeros(size, jnp.int32).at[total].add(1, mode="drop")
        of = jnp.minimum(running_sum(begins), len(count) - 1)
    return of, total - count, total[-1]


def are_covered(
    start: Int32[Array, "B n"], end: Int32[Array, "B n"], size: int
) -> Bool[Array, "B size"]:
    """Returns which of `size` places are in one of the ranges [start, end) in [0, size]."""
    if start.size * size <= _FEW_PAIRS:
        place = jnp.arange(size, dtype=jnp.int32)[None, :, None, None]
        start, end = (_in_windows(x, fill=0)[:, None] for x in (start, end))
        is_in = (start <= place) & (place < end)
        return reduced([is_in], jnp.logical_or, False, num_axes=2)[0]
    row = jnp.arange(len(start), dtype=jnp.uint32)[:, None]
    step = (start < end).astype(jnp.int32)
    edges = jnp.zeros((len(start), size + 1), jnp.int32).at[row, start].add(step)
    edges = edges.at[row, end].add(-step)
    return running_sum(edges)[:, :size] > 0


def _running(xs, combine, *, fill):
    size = xs[0].shape[-1]
    xs = tuple(_in_windows(x, fill=fill) for x in xs)
    shape = xs[0].shape
    lead, num_windows = shape[:-2], shape[-2]
    if math.prod(shape) * size <= _FEW_PAIRS:  # one fused pass compiles fastest
        place = jnp.arange(num_windows * WINDOW, dtype=jnp.int32).reshape(shape[-2:])
        last = jnp.arange(size, dtype=jnp.int32)[:, None, None]
        is_seen = jnp.broadcast_to(place[None] <= last, (*lead, size, *place.shape))
        seen = tuple(jnp.where(is_seen, x[..., None, :, :], fill) for x in xs)
        return reduced(seen, combine, fill, num_axes=2)
    of_windows = reduced(xs, combine, fill, num_axes=1)
    pad = [*(len(lead) * [(0, 0)]), (1, 0)]
    before = tuple(
        jnp.pad(x[..., :-1], pad, constant_values=fill)
        for x in _running(of_windows, combine, fill=fill)
    )
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
    return tuple(x.reshape(*lead, num_windows * WINDOW)[..., :size] for x in xs)


def reduced(xs: Sequence[Array], combine: Callable[..., Any], fill: int, *, num_axes: int):
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


def run_begins(x: Any, ascending: Any = None) -> Any:
    """Returns where runs of equal values begin, booleans `[B, T]`; of NumPy arrays by NumPy.

    A run also ends where `ascending` does not increase.
    """
    new = x[:, 1:] != x[:, :-1]
    if ascending is not None:
        new |= ascending[:, 1:] <= ascending[:, :-1]
    if not isinstance(new, np.ndarray):
        return jnp.pad(new, ((0, 0), (1, 0)), constant_values=True)
    begins = np.ones(x.shape, bool)  # T may be 0
    begins[:, 1:] = new
    return begins


def run_ends(x: Any) -> Any:
    """Returns one past the last column of the run of equal values at each column; as above."""
    xp, num_tokens = np if isinstance(x, np.ndarray) else jnp, x.shape[1]
    is_last = xp.pad(x[:, 1:] != x[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = xp.where(is_last, xp.arange(num_tokens, dtype=np.int32), num_tokens)
    return 1 - xp.flip(running_max(xp.flip(-last, axis=1)), axis=1)


def _in_windows(x: Shaped[Array, "*lead n"], *, fill: Any) -> Shaped[Array, "*lead m window"]:
    num_windows = -(-x.shape[-1] // WINDOW)
    pad = [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, [*pad, (0, num_windows * WINDOW - x.shape[-1])], constant_values=fill)
    return x.reshape(*x.shape[:-1], num_windows, WINDOW)
