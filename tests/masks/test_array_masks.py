"""Masks of arrays: what they admit is their definition, on the host and on the device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_masks import KINDS, random_mask, random_trees
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from mask_oracle import batch_visible, range_pairs, tree_pairs
from on_mesh import permuted_mesh
from packed_batches import pack

from jax_cp_dispatch.documents.ranges import (  # inner: pairs in the planner
    PackedMask,
    attended_tokens,
)
from jax_cp_dispatch.masks import Blocks, MaskRanges, PrefixLM, Ranges, SharedPrefix, Tree
from jax_cp_dispatch.masks.pairs import (  # inner: pairs in the planner
    pairs_per_query,
    traced_pairs_per_query,
)

SHAPE = (3, 24)


def admitted(ranges):
    """`[B, q, k]`: the pairs of the general form."""
    return range_pairs(*(x if x is None else np.broadcast_to(x, SHAPE) for x in ranges))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_admits_what_its_definition_says(kind):
    """Also traced, and after its arrays moved and came back; and its pairs are counted."""
    rng = np.random.default_rng()

    def on_device(constructor, arrays, segment_ids):
        mask = constructor(*arrays)
        ranges = attended_tokens(PackedMask(mask, segment_ids), SHAPE)
        return mask, ranges, traced_pairs_per_query(ranges, is_causal=mask.is_causal)

    program: Any = jax.jit(on_device, static_argnums=0)
    for _ in range(20):
        segment_ids, _ = pack(rng, *SHAPE, max_length=20)
        constructor, arrays, pairs = random_mask(kind, rng, segment_ids)
        want = batch_visible(segment_ids, pairs)
        mask = constructor(*arrays)
        traced, ranges, counts = program(constructor, arrays, segment_ids)
        jax.tree.map(np.testing.assert_array_equal, mask, traced)
        assert mask.has_arrays and mask.has_query_ranges == (ranges.q_end is not None)
        ranges = MaskRanges(*(x if x is None else np.asarray(x) for x in ranges))
        np.testing.assert_array_equal(admitted(ranges), want)
        np.testing.assert_array_equal(pairs_per_query(ranges), want.sum(2))
        np.testing.assert_array_equal(counts, want.sum(2))
        if mask.is_causal:
            assert not np.triu(want, 1).any()


def test_10000_trees_are_the_ancestor_relation():
    rng = np.random.default_rng()
    span_ids, parents = random_trees(rng, 10_000, 16, 7)
    column = np.arange(16)[None]
    ranges = Tree(span_ids, parents).ranges(column, 0 * span_ids, 0 * span_ids + 16)
    ranges = MaskRanges(*(np.broadcast_to(x, span_ids.shape) for x in ranges))
    # A token without a span sees what it would see as a leaf; nobody sees it.
    want = tree_pairs(span_ids, parents)
    got = range_pairs(*ranges)
    np.testing.assert_array_equal(got[span_ids >= 0], want[span_ids >= 0])
    assert want.sum() > 100_000
    np.testing.assert_array_equal(pairs_per_query(ranges), got.sum(2))


def test_pairs_of_long_rows_are_counted_in_seconds():
    """By counts of steps: a wavelet matrix of 2**17 keys, against the sum over its halves."""
    rng = np.random.default_rng()
    arrays = rng.integers(0, 2**17 + 1, (4, 1, 2**17)).astype(np.int32)
    some = rng.integers(0, 2**17, 50)
    counts = pairs_per_query(MaskRanges(*arrays))[0]
    for q in some:
        k = np.arange(arrays[0, 0, q], max(arrays[0, 0, q], arrays[1, 0, q]))
        assert counts[q] == ((arrays[2, 0, k] <= q) & (q < arrays[3, 0, k])).sum()


def test_masks_are_pytrees_of_their_arrays():
    """Which move with the tokens; their numbers stay those of the batch as packed."""
    ids = np.array([[0, 0, 1, 1, 2, 0]])
    order = np.array([3, 1, 0, 5, 4, 2])
    for mask in (
        PrefixLM(ids == 0),
        Blocks(ids),
        SharedPrefix(ids),
        Tree(np.sort(ids), ids[:, 1:4] - 1),
    ):
        moved = jax.tree.map(lambda x: x[:, order], mask)
        assert type(moved) is type(mask) and moved != mask and mask == mask
        back = jax.tree.map(lambda x: x[:, np.argsort(order)], moved)
        jax.tree.map(np.testing.assert_array_equal, back, mask)
        assert [x.dtype for x in jax.tree.leaves(mask)] == [np.int32]
        assert "6" in repr(mask) and hash(mask)
    assert not jax.tree.leaves(jax.tree.map(lambda _: None, mask))


def test_traced_trees_out_of_order_get_ends_that_attention_refuses():
    """A child after its sibling, a span in two runs, a cycle of parents."""
    for span_ids, parents in (
        ([[0, 1, 2, 3]], [[-1, 0, 0, 1]]),
        ([[0, 1, 0, 1]], [[-1, -1, -1, -1]]),
        ([[0, 1, 2, 3]], [[1, 0, -1, -1]]),
    ):
        mask = jax.jit(Tree)(jnp.array(span_ids), jnp.array(parents))
        ((rule, _),) = mask.rules(jnp.arange(4)[None], jnp.zeros((1, 4)), jnp.full((1, 4), 4))
        assert not rule.any()


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_numbers_beyond_int32_are_no_limit(dtype):
    none = np.full((1, 4), np.iinfo(dtype).max, dtype)
    mask = Ranges(np.zeros((1, 4), dtype), none)
    np.testing.assert_array_equal(mask.k_end, np.iinfo(np.int32).max)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_arrays_that_explicit_axes_shard(kind):
    """Over rows and columns, as segment ids may be; spans have rows of their own."""
    mesh = permuted_mesh((2, 2), ("data", "cp"), AxisType.Explicit)
    segment_ids, _ = pack(np.random.default_rng(), 2, 24, max_length=20)
    constructor, arrays, _ = random_mask(kind, np.random.default_rng(), segment_ids)
    with jax.set_mesh(mesh):
        of = lambda x: P("data", "cp" if x.shape[1] == 24 else None)
        sharded = [jax.device_put(x, NamedSharding(mesh, of(x))) for x in arrays]
        got = jax.jit(constructor)(*sharded)
    jax.tree.map(np.testing.assert_array_equal, got, constructor(*arrays))
