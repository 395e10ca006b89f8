"""The keys that each query of a rank picks: scores in tiles, and the k best of each query.

Picks are the same bits for any number of ranks and any order of tokens. So the score of a pair must
not depend on where it is computed: all products are of one shape, a chunk of queries by a tile of
keys, and sums over the features and over the heads are in one order. The best scores of a query are
found by the k-th largest, bit by bit from the highest one, and not by sorting; among equals, the
first ones are taken.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jax_cp_dispatch._arrays import in_chunks, running_max, running_sum, sum_dtype
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch.attention.local.passes import local_pass
from jax_cp_dispatch.attention.local.picked import DocumentRows

# The shape of every product of scores: queries of a chunk, and keys of a tile.
CHUNK, TILE = 32, 512
_WORD = 32


@dataclasses.dataclass(frozen=True)
class PickOptions:
    """What a query picks; static.

    Attributes:
      num_keys: the most picks of a query.
      block: tokens of a pick.
      pool: "max" or "mean", of the scores of a block.
      local: whether the block that holds the query itself is picked in any case.
      relu: whether the products of a head are cut at 0.
    """

    num_keys: int
    block: int
    pool: str
    local: bool
    relu: bool


class Index(NamedTuple):
    """The index of one group: queries `[..., J, d]` and keys `[..., d]`."""

    q: Array
    k: Array
    weights: Array | None  # [..., J]; None: 1 each


def head_scores(q, k, *, relu: bool, per_query: bool = False):
    """Returns the products of each head, `[C, J, W]`, cut at 0 with `relu`.

    Args:
      q: `[C, J, d]`, in the dtype of sums.
      k: `[W, d]`; with `per_query`, `[C, W, d]`.
      relu, per_query: as above.
    """
    C, J, d = q.shape
    highest = lax.Precision.HIGHEST
    if per_query:
        products = lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,))), precision=highest)
    else:
        rows = q.reshape(C * J, d)
        products = lax.dot_general(rows, k, (((1,), (1,)), ((), ())), precision=highest)
        products = products.reshape(C, J, -1)
    return without_negative(products) if relu else products


def without_negative(x):
    """Returns max(x, 0), and NaN for NaN, which XLA's maximum on CPUs may drop."""
    return jnp.where(x <= 0, 0, x)


def weighted(products, weights):
    """Returns the sum over the heads of products `[C, J, W]`, times the weights `[C, J]`."""
    return jnp.sum(products if weights is None else products * weights[..., None], axis=1)


def _shapes(options: PickOptions, q, *_):
    return [q.update(shape=(*q.shape[:3], options.num_keys), dtype=jnp.dtype(np.int32))]


@local_pass("pick_keys", "cpd.pick_keys", _shapes, results=lambda x: x[0])
def pick_keys(options: PickOptions, q, k, weights, rows: DocumentRows):
    """Returns the picks of queries, `[b, R, G, num_keys]`; see `masks.Selected`.

    Args:
      options: what they pick.
      q: `[b, R, G, J, d]`.
      k: `[b, S, G, d]`; or of one group for all, `[b, S, 1, d]`.
      weights: `[b, R, G, J]`, or None.
      rows: of the queries' documents.
    """
    dtype, num_queries = sum_dtype(q.dtype), q.shape[1]

    def of_row(operands):
        q, k, weights, rows = operands
        q, weights = jax.tree.map(lambda x: jnp.moveaxis(x.astype(dtype), 1, 0), (q, weights))
        k = jnp.moveaxis(k.astype(dtype), 1, 0)
        k = jnp.broadcast_to(k, (q.shape[0], *k.shape[1:]))
        picks = lax.map(lambda x: _of_group(options, Index(*x), rows), (q, k, weights))
        return jnp.moveaxis(picks, 0, 1)[:num_queries]

    return [lax.map(of_row, (q, k, weights, rows))]


def _of_group(options: PickOptions, index: Index, rows: DocumentRows) -> Int32[Array, "R k"]:
    """Returns the picks of one group: q `[R, J, d]`, k `[S, d]`, weights `[R, J]` or None."""
    most = -(-index.k.shape[0] // TILE)
    k = jnp.pad(index.k, ((0, most * TILE - index.k.shape[0]), (0, 0)))
    widths = [2**i for i in range((most - 1).bit_length())] + [most]  # in tiles

    def of_chunk(operands):
        q, weights, rows = operands
        used = rows.start < rows.end
        low = jnp.min(jnp.where(used, rows.start, most * TILE)) // TILE
        high = -(-jnp.max(jnp.where(used, rows.end, 0)) // TILE)
        number = jnp.sum(jnp.asarray(widths, jnp.int32) < high - low)
        of_width = [
            lambda low, width=width: _of_chunk(options, Index(q, k, weights), rows, low, width)
            for width in widths
        ]
        return lax.switch(jnp.minimum(number, len(widths) - 1), of_width, low)

    given = jax.tree.map(lambda x: in_chunks(x, CHUNK), (index.q, index.weights, rows))
    return lax.map(of_chunk, given).reshape(-1, options.num_keys)


def _of_chunk(
    options: PickOptions, index: Index, rows: DocumentRows, low: Array, width: int
) -> Int32[Array, "C k"]:
    """Returns the picks of a chunk, whose keys are in `width` tiles from tile `low` on."""
    start, end, origin, position = rows
    low = jnp.clip(low, 0, index.k.shape[0] // TILE - width)
    base, last = low * TILE, jnp.minimum(low + width, -(-jnp.max(end) // TILE))
    hidden = 0 if options.pool == "mean" else -jnp.inf
    column = jnp.arange(TILE, dtype=jnp.int32)[None]

    def add_tile(i, scores):
        k = lax.dynamic_slice_in_dim(index.k, i * TILE, TILE)
        of_tile = weighted(head_scores(index.q, k, relu=options.relu), index.weights)
        row = i * TILE + column
        is_seen = (row >= start[:, None]) & (row < end[:, None])
        of_tile = jnp.where(is_seen, of_tile, hidden)
        return lax.dynamic_update_slice_in_dim(scores, of_tile, (i - low) * TILE, axis=1)

    scores = jnp.full((CHUNK, width * TILE), hidden, index.q.dtype)
    scores = lax.fori_loop(low, last, add_tile, vary_alike([scores], like=index.q)[0])
    start, end, origin = (x - base for x in (start, end, origin))  # in columns
    block = options.block
    if block == 1:
        column = jnp.arange(width * TILE, dtype=jnp.int32)[None]
        is_seen = (column >= start[:, None]) & (column < end[:, None])
        first, place = -origin, position
    else:
        # Columns of blocks: from the one before the first whole block of each query's document.
        phase = origin % block
        num_blocks = -(-width * TILE // block) + 2
        more = num_blocks * block + block - width * TILE
        padded = jnp.pad(scores, ((0, 0), (block, more)), constant_values=hidden)
        cut = lambda x, i: lax.dynamic_slice_in_dim(x, i, num_blocks * block)
        blocks = jax.vmap(cut)(padded, phase).reshape(CHUNK, num_blocks, block)
        column = phase[:, None] - block + block * jnp.arange(num_blocks, dtype=jnp.int32)[None]
        size = jnp.minimum(column + block, end[:, None]) - jnp.maximum(column, start[:, None])
        is_seen, first = size > 0, (phase - block - origin) // block
        place = position // block
        # NaN for a block that has one; XLA's maximum on CPUs may drop it.
        scores = jnp.where(jnp.isnan(blocks).any(axis=2), jnp.nan, jnp.max(blocks, axis=2))
        if options.pool == "mean":
            scores = _sum_of_halves(blocks) / jnp.maximum(size, 1).astype(blocks.dtype)
    keys = jnp.where(is_seen, _in_order(scores), 0)
    if options.local:
        number = first[:, None] + jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        is_own = is_seen & (number == place[:, None])
        keys = jnp.where(is_own, keys.dtype.type(np.iinfo(keys.dtype).max), keys)
    column = largest_columns(keys, options.num_keys)
    return jnp.where(column >= 0, column + first[:, None], -1)


def _sum_of_halves(x: Float[Array, "C W b"]) -> Float[Array, "C W"]:
    """Sums the last axis in one order; that of a reduction depends on the other axes."""
    while x.shape[2] > 1:
        half = -(-x.shape[2] // 2)
        x = x[..., :half] + jnp.pad(x[..., half:], ((0, 0), (0, 0), (0, 2 * half - x.shape[2])))
    return x[..., 0]


def _in_order(scores: Float[Array, "C W"]) -> Any:
    """Returns unsigned integers of at least 1, in the order of the scores; NaN is 1."""
    num_bits = 8 * scores.dtype.itemsize
    signed = jnp.dtype(f"int{num_bits}")
    # A zero with either sign is one score; XLA would omit an addition of 0.
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), signed)
    lowest = np.iinfo(signed).min
    keys = lax.bitcast_convert_type(
        jnp.where(bits < 0, ~bits, bits ^ lowest), jnp.dtype(f"uint{num_bits}")
    )
    return jnp.where(jnp.isnan(scores), 1, keys)


def largest_columns(keys: Any, num_columns: int) -> Int32[Array, "C k"]:
    """Returns the columns of the largest keys of each row, ascending, and -1 after the last.

    Among equal keys the first ones are taken; keys of 0 are never taken.
    """
    width, num_bits = keys.shape[1], 8 * keys.dtype.itemsize
    one = np.ones((), keys.dtype)
    count_from = lambda bound: jnp.sum(keys >= bound[:, None], axis=1, dtype=jnp.int32)

    def add_bit(state):
        i, bound, is_found = state
        higher = bound | (one << (num_bits - 1 - i).astype(keys.dtype))
        count = count_from(higher)
        bound = jnp.where((count >= num_columns) & ~is_found, higher, bound)
        return i + 1, bound, is_found | (count == num_columns)

    # The k-th largest key, bit by bit; or a lower bound of k keys; or 0 if there are not more.
    first = jnp.zeros_like(keys[:, 0])
    state = vary_alike([jnp.int32(0)], like=keys)[0], first, count_from(first + 1) <= num_columns
    is_open = lambda state: (state[0] < num_bits) & ~state[2].all()
    bound = lax.while_loop(is_open, add_bit, state)[1][:, None]
    above = _words(keys > bound)
    equal = _words((keys == bound) & (bound > 0))
    missing = num_columns - jnp.sum(lax.population_count(above), 1, dtype=jnp.int32)
    of_word = lax.population_count(equal).astype(jnp.int32)
    rest = missing[:, None] - (running_sum(of_word) - of_word)
    cut = (np.uint32(1) << _set_bit(equal, rest).astype(jnp.uint32)) - np.uint32(1)
    first = jnp.where(rest >= of_word, equal, jnp.where(rest > 0, equal & cut, 0))
    return _set_columns(above | first, num_columns, width)


def _words(bits: Bool[Array, "C W"]) -> UInt32[Array, "C words"]:
    """Returns the bits of each row in words, the first one lowest."""
    bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % _WORD)))
    bits = bits.reshape(len(bits), -1, _WORD)
    values = np.uint32(1) << np.arange(_WORD, dtype=np.uint32)[None, None]
    return jnp.sum(jnp.where(bits, values, np.uint32(0)), axis=2, dtype=jnp.uint32)


def _set_bit(word: UInt32[Array, "..."], number: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns the place of one of the set bits, of which `number` are lower; there is one."""
    place = jnp.zeros_like(number)
    for half in (16, 8, 4, 2, 1):
        low = word & np.uint32((1 << half) - 1)
        count = lax.population_count(low).astype(jnp.int32)
        is_above = count <= number
        number = jnp.where(is_above, number - count, number)
        place = jnp.where(is_above, place + half, place)
        word = jnp.where(is_above, word >> np.uint32(half), low)
    return place


def _set_columns(
    words: UInt32[Array, "C words"], num_columns: int, width: int
) -> Int32[Array, "C k"]:
    """Returns the columns of the first set bits, ascending, and -1 after the last."""
    num_words, of_word = words.shape[1], lax.population_count(words).astype(jnp.int32)
    total = running_sum(of_word)
    number = jnp.arange(num_columns, dtype=jnp.int32)
    number = jnp.broadcast_to(number, (len(words), num_columns))
    take = lambda x, i: jnp.take_along_axis(x, jnp.clip(i, 0, num_words - 1), axis=1)
    # Each word that has bits begins at the number of the first one, and ends where others begin.
    begin = jnp.where(of_word > 0, total - of_word, num_columns)
    row = jnp.arange(len(words), dtype=jnp.int32)[:, None]
    index = jnp.broadcast_to(jnp.arange(num_words, dtype=jnp.int32), begin.shape)
    word = running_max(jnp.zeros_like(number).at[row, begin].max(index, mode="drop"))
    column = _WORD * word + _set_bit(take(words, word), number - take(total - of_word, word))
    return jnp.where(number < total[:, -1:], column, -1)
