"""`overflow="drop"`: which choices are kept where a rank has fewer rows than it needs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch._scans import running_sum


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

    Choices without a place in [0, P) are kept: they move nothing, or are errors.
    """
    num_places = len(quota)
    has_place = (place >= 0) & (place < num_places)
    key = jnp.where(has_place, place, num_places)
    index = jnp.arange(len(place), dtype=jnp.int32)
    key, _, index = lax.sort((key, -weights, index), num_keys=2, is_stable=True)
    first = jnp.searchsorted(key, jnp.arange(num_places + 1, dtype=jnp.int32)).astype(jnp.int32)
    within = jnp.arange(len(place), dtype=jnp.int32) - first[key]
    limit = jnp.append(quota, jnp.int32(len(place)))[key]
    return jnp.zeros(len(place), bool).at[index].set(within < limit, unique_indices=True)
