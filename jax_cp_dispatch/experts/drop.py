"""`overflow="drop"`: which choices are kept where a rank has fewer rows than it needs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt

from jax_cp_dispatch._arrays import known_inside, sum_dtype
from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch._scans import running_sum, sum_by_key
from jax_cp_dispatch.experts.places import places_by_key

_DIGIT_BITS = 4


def quotas(counts: Int32[Array, "W W L"], capacity: int) -> Int32[Array, "W W L"]:
    """Returns how many rows each rank (first axis) may send to each expert of each rank.

    The largest counts of a full rank are cut to one level, so that its rows are exactly `capacity`;
    where that leaves a rest, the first of these keep one more.
    """
    zero = jnp.zeros(counts.shape[1], jnp.int32)
    low, high = vary_like([zero, zero + capacity], counts)
    kept_at = lambda level: jnp.minimum(counts, level[None, :, None])
    total_at = lambda level: kept_at(level).sum((0, 2), dtype=jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        fits = total_at(middle) <= capacity
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    level, _ = lax.fori_loop(0, capacity.bit_length() + 1, halve, (low, high))
    is_cut = counts > level[None, :, None]
    by_rank = jnp.moveaxis(is_cut, 1, 0).astype(jnp.int32)
    number = running_sum(by_rank.reshape(len(zero), -1)).reshape(by_rank.shape)
    rest = capacity - total_at(level)
    has_more = is_cut & jnp.moveaxis(number <= rest[:, None, None], 0, 1)
    return kept_at(level) + has_more.astype(jnp.int32)


def keep_heaviest(
    place: Int32[Array, " n"], weights: Float[Array, " n"], quota: Int32[Array, " P"]
) -> Bool[Array, " n"]:
    """Whether each choice is among the `quota` heaviest of its place; of equal ones the first.

    Choices without a place in [0, P) are kept: they move nothing, or are errors. NaN is lightest.

    Nothing is sorted, which compilers for TPUs need minutes for: counts give the lightest weight
    that each place keeps, digit by digit from the highest.
    """
    num_places = len(quota)
    has_place = (place >= 0) & (place < num_places)
    at = jnp.where(has_place, place, 0)
    key = _ordered(weights)
    num_digits = key.dtype.itemsize * 8 // _DIGIT_BITS
    base = 1 << _DIGIT_BITS
    is_higher = np.tri(base, k=-1, dtype=np.int32).T[None]

    def add_digit(i, found):
        """Returns the next digits, and how many of the weights that begin with them are kept."""
        lightest, left = found
        rest = key >> ((num_digits - 1 - i) * _DIGIT_BITS).astype(key.dtype)
        before, digit = rest >> _DIGIT_BITS, (rest & (base - 1)).astype(jnp.int32)
        counts_here = has_place & (before == known_inside(lightest, at))
        bins = jnp.where(counts_here, at * base + digit, num_places * base)
        (counts,) = sum_by_key([jnp.ones_like(bins)], bins, num_places * base)
        heavier = (counts.reshape(-1, 1, base) * is_higher).sum(2, dtype=jnp.int32)
        fits = heavier <= left[:, None]
        digit = (~fits).sum(1).astype(key.dtype)
        return (lightest << _DIGIT_BITS) | digit, left - jnp.where(fits, heavier, 0).max(1)

    found = vary_like([jnp.zeros(num_places, key.dtype), quota], place)
    lightest, left = lax.fori_loop(0, num_digits, add_digit, tuple(found))
    lightest, left = known_inside(lightest, at), known_inside(left, at)
    is_equal = has_place & (key == lightest)
    number, _ = places_by_key(jnp.where(is_equal, place, -1), num_places)
    return ~has_place | (key > lightest) | (is_equal & (number < left))


def _ordered(x: Float[Array, " n"]) -> UInt[Array, " n"]:
    """Returns integers in the order of these numbers: -0 equals 0, NaN is the smallest."""
    x = x.astype(sum_dtype(x.dtype))
    number = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), f"uint{x.dtype.itemsize * 8}")
    sign = np.array(1 << (x.dtype.itemsize * 8 - 1), number.dtype)
    return jnp.where(jnp.isnan(x), 0, jnp.where(number >= sign, ~number, number | sign))
