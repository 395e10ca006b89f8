"""`SlidingWindow(left, first=...)`: the first tokens of each document stay visible."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mask_oracle import batch_pairs, range_pairs
from packed_batches import pack

from jax_cp_dispatch import (
    choose_algorithm,
    cost,
    local_attention,
    merge_partials,
    place_tokens,
    plan_attention,
)
from jax_cp_dispatch.documents.ranges import PackedMask, attended_tokens
from jax_cp_dispatch.masks import Causal, SlidingWindow
from jax_cp_dispatch.masks.pairs import pairs_per_query, traced_pairs_per_query
from jax_cp_dispatch.masks.read import read_mask

LARGE = 2**40


@pytest.mark.parametrize("left, first", [(1, 1), (3, 2), (5, 9), (40, 3), (LARGE - 1, 4)])
def test_ranges_and_pairs_are_the_definition(left, first):
    mask = SlidingWindow(left, first=first)
    ids, positions = pack(np.random.default_rng(left), 2, 30, max_length=20)
    read = read_mask("a test", mask)
    ranges = attended_tokens(PackedMask(read, jnp.asarray(ids), jnp.asarray(positions)), ids.shape)
    want = batch_pairs(mask, ids, positions)
    everything = ranges if ranges.q_start is not None else (*ranges[:2], None, None)
    got = range_pairs(*(x if x is None else np.asarray(x) for x in everything))
    np.testing.assert_array_equal(got & (ids > 0)[:, :, None], want)
    np.testing.assert_array_equal(pairs_per_query(jax.tree.map(np.asarray, ranges)), want.sum(2))
    np.testing.assert_array_equal(traced_pairs_per_query(ranges, is_causal=True), want.sum(2))


def test_equal_masks_are_one():
    assert read_mask("a test", SlidingWindow(None, first=4)) == Causal()
    assert read_mask("a test", SlidingWindow(8, first=LARGE)) == Causal()
    assert read_mask("a test", SlidingWindow(8, first=0)) == SlidingWindow(8)
    mask = read_mask("a test", SlidingWindow(8, first=4))
    assert mask == read_mask("a test", SlidingWindow(8, 0, 4)) != SlidingWindow(8)
    assert pickle.loads(pickle.dumps(mask)) == mask and not jax.tree.leaves(mask)
    assert repr(SlidingWindow(8, first=4)) == "SlidingWindow(left=8, right=0, first=4)"


def test_local_attention_equals_two_partial_results():
    rng, i = np.random.default_rng(), jnp.arange(32)[None]
    q, k, v = jnp.asarray(rng.normal(size=(3, 1, 32, 2, 8)), jnp.float32)
    got, _ = local_attention(q, k, v, mask=SlidingWindow(8, first=4))
    first = local_attention(q, k, v, 0 * i, jnp.minimum(i + 1, 4))
    recent = local_attention(q, k, v, jnp.maximum(i - 7, 4), i + 1)
    want, _ = merge_partials(*first, *recent)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [place_tokens, plan_attention])
def test_plans_on_the_host_move_the_window_and_the_first_tokens(make):
    """Of one document on 8 ranks: at most left - 1 + first keys before each piece of a rank."""
    mask = SlidingWindow(9, first=2)
    made = make(lengths=[[8 * 64]], world_size=8, mask=mask)
    plan = getattr(made, "plan", made)
    moved = int(np.asarray(plan.num_kv_tokens_moved))
    pieces = int((np.asarray(plan.run_row) < np.asarray(plan.num_rows)[:, None]).sum())
    assert 0 < moved <= (8 + 2) * pieces
    assert read_mask("a test", mask).num_keys(100) == 2 + 9
    assert int(plan.pairs.sum()) == batch_pairs(mask, np.ones((1, 512), int)).sum()


def test_predictions_count_its_pairs():
    mask, ids = SlidingWindow(5, first=3), np.repeat([[1, 2]], [30, 34], axis=1)
    got = cost.rank_pairs([30, 34], num_ranks=4, tokens_per_rank=16, zigzag=False, mask=mask)
    pairs = batch_pairs(mask, ids)[0].reshape(4, 16, 4, 16)
    np.testing.assert_array_equal(got, pairs.sum((1, 3)))
    sizes: Any = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "itemsize": 2}
    choice = choose_algorithm([[30, 34]], num_ranks=4, tokens_per_rank=16, mask=mask, **sizes)
    assert {"ring", "balanced"} <= set(choice.predictions)
