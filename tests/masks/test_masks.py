"""Masks: ranges for the device, pairs on the host and pairs in the planner, by their definition."""

import pickle
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_mask import any_mask
from hypothesis import given, strategies as st
from mask_oracle import batch_ranges, visible
from packed_batches import pack
from properties import examples

from jax_cp_dispatch._ranks.runtime import native
from jax_cp_dispatch.documents.ranges import PackedMask, attended_tokens
from jax_cp_dispatch.masks import Causal, Chunked, Full, SlidingWindow
from jax_cp_dispatch.masks.read import read_mask

LARGE = 2**40


@examples(60)
@given(data=st.data())
def test_the_three_geometries_of_static_masks_are_the_definition(data):
    """For any queries of a document, and for tiles of queries and keys."""
    mask = data.draw(any_mask(24)).simplified()
    length = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    seen = visible(mask, length)
    for clipped in (mask, mask.clipped(length)):
        assert clipped.pairs(start, end, length) == seen[start:end].sum()
        numbers = clipped.pair_count
        assert native.count_pairs(numbers, start, end, length) == seen[start:end].sum()
        first, last = clipped.keys_of(np.array(start), np.array(end), length)
        keys = np.flatnonzero(seen[start:end].any(0))
        assert (first, last) == (keys[0], keys[-1] + 1)
        assert clipped.pairs_before(end, start) == seen[:end, :start].sum()
        assert clipped.pairs_before(start, end) == seen[:start, :end].sum()
    assert mask.num_keys(length) == seen.sum(1).max()
    query, key = np.nonzero(seen)
    for farthest, reach in zip((query - key, key - query), mask.reach, strict=True):
        assert farthest.max() == (length - 1 if reach is None else min(reach, length - 1))


@examples(20)
@given(mask=any_mask(30), seed=st.integers(0, 2**32 - 1))
def test_ranges_of_packed_documents(mask, seed):
    """On the device, and in NumPy at any place: a document may start at any coordinate."""
    shape = (2, 24)
    segment_ids, _ = pack(np.random.default_rng(seed), *shape, max_length=20)
    got = attended_tokens(PackedMask(mask, jnp.asarray(segment_ids)), shape)
    np.testing.assert_array_equal(got[:2], batch_ranges(mask, segment_ids))
    assert got[2:] == (None, None)
    query, shift = np.arange(20), int(seed % 100) - 50
    begin, stop = mask.k_start(query + shift, shift), mask.k_end(query + shift, shift, 20 + shift)
    seen = visible(mask, 20)
    np.testing.assert_array_equal(begin - shift, seen.argmax(1))
    np.testing.assert_array_equal(stop - shift, 20 - seen[:, ::-1].argmax(1))


@pytest.mark.usefixtures("unchecked_types")  # NumPy integers are integers
def test_equal_masks_are_one():
    """So they share a program, and a plan for one is a plan for the other."""
    for mask, simplest in (
        (None, Causal()),
        ("causal", Causal()),
        ("full", Full()),
        (SlidingWindow(None), Causal()),
        (SlidingWindow(None, None), Full()),
        (SlidingWindow(LARGE, LARGE), Full()),
        (SlidingWindow(5, LARGE), SlidingWindow(5, None)),
        (Chunked(LARGE), Causal()),
        (SlidingWindow(cast(Any, np.int64(4))), SlidingWindow(4)),
    ):
        got = read_mask("a test", mask)
        assert got == simplest and hash(got) == hash(simplest) and type(got) is type(simplest)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(3, 1), Chunked(4)], ids=str)
def test_static_masks_are_pytrees_without_leaves(mask):
    leaves, tree = jax.tree.flatten(mask)
    assert not leaves and jax.tree.unflatten(tree, leaves) == mask
    assert pickle.loads(pickle.dumps(mask)) == mask
    assert mask.is_causal == bool(np.triu(visible(mask, 9), 1).sum() == 0)
    traces = []

    @jax.jit
    def count(mask, q):
        traces.append(mask)
        return mask.k_start(q, 0 * q)

    for _ in range(2):
        count(mask, np.arange(3))
    assert traces == [mask]
