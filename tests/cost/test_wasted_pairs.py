"""Pairs outside the mask that attention computes, because it computes whole tiles."""

import numpy as np
from hypothesis import given, strategies as st
from properties import examples

from jax_cp_dispatch.cost.pairs import wasted_pairs
from jax_cp_dispatch.masks import Causal, SlidingWindow


def computed_pairs(start, end, offset_q, offset_k, tile):
    """Pairs of the tiles that hold a query [offset_q + i] with the keys [start, end) of it."""
    queries, keys = tile
    first = np.flatnonzero(np.r_[True, np.diff((np.arange(len(start)) + offset_q) // queries) > 0])
    begin = (np.minimum.reduceat(start, first) + offset_k) // keys
    stop = -(-(np.maximum.reduceat(end, first) + offset_k) // keys)
    return queries * keys * int((stop - begin).sum())


@examples(20)
@given(data=st.data())
def test_waste_is_the_mean_over_all_places_of_the_tiles(data):
    """Up to terms that do not grow with the piece: a tile and its neighbour at each end."""
    tile = data.draw(st.sampled_from([(4, 4), (2, 6), (6, 3)]))
    length = data.draw(st.integers(20, 60))
    start = data.draw(st.integers(0, length - 12))
    end = data.draw(st.integers(start + 12, length))
    left = data.draw(st.none() | st.integers(8, 40))
    right = data.draw(st.sampled_from([0, None, 9]))
    query = np.arange(start, end)
    first = np.zeros_like(query) if left is None else np.maximum(query - left, 0)
    last = np.full_like(query, length) if right is None else np.minimum(query + right + 1, length)
    pairs = (last - first).sum()
    places = [(q, k) for q in range(tile[0]) for k in range(tile[1])]
    mean = np.mean([computed_pairs(first, last, q, k, tile) for q, k in places])
    got = pairs + wasted_pairs(
        start, end, length, SlidingWindow(None if left is None else left + 1, right), tile
    )
    assert abs(got - mean) <= 2 * tile[0] * (tile[0] + tile[1])


def test_no_waste_without_tiles_or_queries():
    causal = Causal()
    assert wasted_pairs(3, 9, 20, causal, (1, 1)) == 0
    assert wasted_pairs(np.array([5]), np.array([5]), np.array([9]), causal, (64, 128)) == 0
