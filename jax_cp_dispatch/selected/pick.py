"""The keys that each query of a rank picks: scores in tiles, and the k best of each query.

Picks are the same bits for any number of ranks and any order of tokens. So the score of a pair must
not depend on where it is computed: all products are of one shape, a chunk of queries by a tile of
keys, and sums over the features and over the heads are in one order. The best scores of a query are
found by the k-th largest, two bits at a time from the highest ones, and not by sorting; among
equals, the first ones are taken.
"""

from __future__ import annotations

import dataclasses
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jax_cp_dispatch._arrays import in_chunks, reduced, sum_dtype
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
    terms = products if weights is None else products * weights[..., None]
    # One after another: one pass over the products, and in one order. XLA's sum is not vectorized.
    return reduce(jnp.add, (terms[:, j] for j in range(terms.shape[1])))


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
    num_words = -(-_num_columns(options, most) // _WORD)

    def of_chunk(operands):
        q, weights, rows = operands
        used = rows.start < rows.end
        low = jnp.min(jnp.where(used, rows.start, most * TILE)) // TILE
        high = -(-jnp.max(jnp.where(used, rows.end, 0)) // TILE)
        number = jnp.sum(jnp.asarray(widths, jnp.int32) < high - low)

        def of_width(low, width):
            keys, first = _keys(options, Index(q, k, weights), rows, low, width)
            words = _largest(keys, options.num_keys)
            return first, *(jnp.pad(x, ((0, 0), (0, num_words - x.shape[1]))) for x in words)

        branches = [partial(of_width, width=width) for width in widths]
        first, *words = lax.switch(jnp.minimum(number, len(widths) - 1), branches, low)
        column = _columns(*words, options.num_keys)
        return jnp.where(column >= 0, column + first[:, None], -1)

    given = jax.tree.map(lambda x: in_chunks(x, CHUNK), (index.q, index.weights, rows))
    return lax.map(of_chunk, given).reshape(-1, options.num_keys)


def _num_columns(options: PickOptions, width: int) -> int:
    """Returns how many keys, or blocks of keys, have scores in `width` tiles."""
    return width * TILE if options.block == 1 else -(-width * TILE // options.block) + 2


def _keys(
    options: PickOptions, index: Index, rows: DocumentRows, low: Array, width: int
) -> tuple[Any, Int32[Array, " C"]]:
    """Returns the scores of a chunk as unsigned integers `[C, W]`, and what the columns count.

    They are of keys in `width` tiles from tile `low` on. An integer is 0 where a query sees no key.
    A column and a query's number, `[C]`, are together the pick.
    """
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
        num_blocks = _num_columns(options, width)
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
    return keys, first


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


# ---- The largest of each row: their bits, in words of columns, and then their columns.


def _largest(keys: Any, num_columns: int) -> tuple[Array, Array]:
    """Returns which keys of each row are above a bound, and which are equal to it, in words.

    The former are at most `num_columns`, and both together at least as many; or all keys but those
    of 0, which are never taken.
    """
    num_bits, one = 8 * keys.dtype.itemsize, np.ones((), keys.dtype)

    def counts_from(bounds):  # as one reduction of several arrays, which XLA vectorizes
        counted = [(keys >= bound[:, None]).astype(jnp.int32) for bound in bounds]
        return reduced(counted, jnp.add, 0, num_axes=1)

    def add_bits(state):
        i, bound, is_found = state
        step = one << (num_bits - 2 - 2 * i).astype(keys.dtype)
        higher = [bound + j * step for j in np.arange(1, 4, dtype=keys.dtype)]
        now_found = is_found
        for candidate, count in zip(higher, counts_from(higher), strict=True):
            bound = jnp.where((count >= num_columns) & ~is_found, candidate, bound)
            now_found |= count == num_columns
        return i + 1, bound, now_found

    # The k-th largest key, two bits at a time; or a lower bound of k keys; or 0 for fewer.
    first = jnp.zeros_like(keys[:, 0])
    is_found = counts_from([first + one])[0] <= num_columns
    state = vary_alike([jnp.int32(0)], like=keys)[0], first, is_found
    is_open = lambda state: (2 * state[0] < num_bits) & ~state[2].all()
    bound = lax.while_loop(is_open, add_bits, state)[1][:, None]
    return _words(keys > bound), _words((keys == bound) & (bound > 0))


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


def _columns(
    above: UInt32[Array, "C words"], equal: UInt32[Array, "C words"], num_columns: int
) -> Int32[Array, "C k"]:
    """Returns the columns of `above` and the first ones of `equal`, ascending; then -1."""
    of_word = _counts(equal)
    missing = num_columns - jnp.sum(_counts(above), axis=1, keepdims=True, dtype=jnp.int32)
    rest = missing - (_running_sum(of_word) - of_word)
    cut = (np.uint32(1) << _set_bit(equal, rest).astype(jnp.uint32)) - np.uint32(1)
    words = above | jnp.where(rest >= of_word, equal, jnp.where(rest > 0, equal & cut, 0))
    of_word = _counts(words)
    total = _running_sum(of_word)
    # The word of the n-th column: how many words end at n or before.
    row = jnp.arange(len(words), dtype=jnp.int32)[:, None]
    ends = jnp.zeros((len(words), num_columns), jnp.int32).at[row, total].add(1, mode="drop")
    word = jnp.minimum(_running_sum(ends), words.shape[1] - 1)
    take = lambda x: jnp.take_along_axis(x, word, axis=1)
    number = jnp.arange(num_columns, dtype=jnp.int32)[None]
    column = _WORD * word + _set_bit(take(words), number - take(total - of_word))
    return jnp.where(number < total[:, -1:], column, -1)


def _counts(words: UInt32[Array, "C n"]) -> Int32[Array, "C n"]:
    return lax.population_count(words).astype(jnp.int32)


def _running_sum(x: Int32[Array, "C n"]) -> Int32[Array, "C n"]:
    """Returns inclusive sums of each row, below 2**24, by products with triangles of ones."""
    highest = lax.Precision.HIGHEST
    upper = lambda n, first: jnp.triu(jnp.ones((n, n), jnp.float32), first)
    blocks = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _WORD))).astype(jnp.float32)
    blocks = blocks.reshape(len(x), -1, _WORD)
    within = jnp.matmul(blocks, upper(_WORD, 0), precision=highest)
    before = jnp.matmul(within[..., -1], upper(blocks.shape[1], 1), precision=highest)
    sums = (within + before[..., None]).astype(jnp.int32)
    return sums.reshape(len(x), -1)[:, : x.shape[1]]
