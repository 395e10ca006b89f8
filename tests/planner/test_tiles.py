"""Plans that count what attention computes: whole tiles of queries and keys."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jax_cp_dispatch import PlacementConfig, PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch._window import Reach
from jax_cp_dispatch.cost.pairs import wasted_pairs

LENGTHS = Path(__file__).parents[1] / "data" / "packed"
TILE = 64, 128


def computed_pairs(start, end, offset_q, offset_k, tile):
    """Pairs of the tiles that hold a query [offset_q + i] with the keys [start, end) of it."""
    queries, keys = tile
    first = np.flatnonzero(np.r_[True, np.diff((np.arange(len(start)) + offset_q) // queries) > 0])
    begin = (np.minimum.reduceat(start, first) + offset_k) // keys
    stop = -(-(np.maximum.reduceat(end, first) + offset_k) // keys)
    return queries * keys * int((stop - begin).sum())


@settings(max_examples=40, deadline=None)
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
    got = pairs + wasted_pairs(start, end, length, Reach(left, right), tile)
    assert abs(got - mean) <= 2 * tile[0] * (tile[0] + tile[1])


def test_no_waste_without_tiles_or_queries():
    causal = Reach(None, 0)
    assert wasted_pairs(3, 9, 20, causal, (1, 1)) == 0
    assert wasted_pairs(np.array([5]), np.array([5]), np.array([9]), causal, TILE) == 0


def tiles_of_ranks(plan, tile):
    ranges = (plan.local_ranges(rank) for rank in range(plan.world_size))
    used = ((a[a < b], b[a < b]) for a, b in ranges)
    return np.array([computed_pairs(a, b, 0, 0, tile) for a, b in used])


def planned(lengths, world_size, tile):
    plan = plan_attention(lengths=lengths, world_size=world_size, config=PlanConfig(tile=tile))
    config = PlacementConfig(tile=tile)
    return plan, place_tokens(lengths, world_size=world_size, config=config).plan


def test_ranks_compute_more_equal_numbers_of_tiles():
    """Published lengths, whole and short against a rank's tokens: better in the mean.

    Where a piece meets the grid of tiles is not part of the count, so not each plan is better.
    """
    imbalance = {(1, 1): [], TILE: []}
    for path in LENGTHS.glob("*.json"):
        (lengths,) = (x["lengths"] for x in json.loads(path.read_text()) if x["ranks"] == 8)
        for divisor in (1, 4, 8):
            scaled = [max(1, x // divisor) for x in lengths]
            for tile, values in imbalance.items():
                for plan in planned(scaled, 8, tile):
                    counted = tiles_of_ranks(plan, TILE)
                    values.append(counted.max() / counted.mean())
                    if tile == TILE:
                        assert plan.imbalance <= 1.04
    by_pairs, by_tiles = (np.array(x) - 1 for x in imbalance.values())
    assert by_tiles.mean() < 0.85 * by_pairs.mean()
    assert by_tiles.max() < by_pairs.max()


def test_the_work_of_a_long_document_includes_that_of_its_cuts():
    """So ranks are balanced although each cut adds to the sum of their work."""
    for plan in planned([65536], 8, (128, 128)):
        assert plan.imbalance <= 1.02
        assert plan.num_kv_tokens_moved > 0


def test_work_counts_the_waste():
    pieces = planned([1000, 24], 1, TILE)
    counted = [float(plan.pairs_after[0]) for plan in pieces[:1]] + [float(pieces[1].pairs[0])]
    want = sum(n * (n + 1) // 2 + wasted_pairs(0, n, n, Reach(None, 0), TILE) for n in (1000, 24))
    assert counted == [want, want]


@pytest.mark.parametrize("kind", [PlanConfig, PlacementConfig])
@pytest.mark.parametrize("tile", [128, (128,), "ab"])
@pytest.mark.usefixtures("unchecked_types")
def test_other_tiles_are_refused(kind, tile):
    with pytest.raises(TypeError, match=rf"{kind.__name__}: tile .*(needs to be|must be)"):
        kind(tile=tile)


def test_plans_inside_jit_refuse_tiles():
    config = PlanConfig(tile=TILE)
    with pytest.raises(ValueError, match="plans made inside jit do not keep tile of PlanConfig"):
        jax.jit(lambda ids: plan_attention(ids, world_size=2, config=config))(
            jnp.ones((1, 256), jnp.int32)
        )
