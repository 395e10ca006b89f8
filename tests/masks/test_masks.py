"""Masks of numbers: ranges on the device, pairs on the host and in the planner; invalid masks."""

import pickle
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_mask import any_mask
from hypothesis import given, strategies as st
from mask_oracle import batch_pairs, batch_ranges, range_pairs, visible
from packed_batches import pack
from properties import examples
from refusals import check_names, check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch import (
    place_tokens,
    plan_attention,
)
from jax_cp_dispatch._ranks.runtime import native  # inner: pairs in the planner
from jax_cp_dispatch.documents.ranges import PackedMask, attended_tokens  # inner: the same
from jax_cp_dispatch.masks import (
    BlockCausal,
    Blocks,
    Causal,
    Chunked,
    Full,
    PrefixLM,
    Ranges,
    SharedPrefix,
    SlidingWindow,
    Tree,
)
from jax_cp_dispatch.masks.pairs import pairs_per_query, traced_pairs_per_query  # inner: the same
from jax_cp_dispatch.masks.read import read_mask  # inner: the same

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
@given(
    mask=any_mask(30),
    seed=st.integers(0, 2**32 - 1),
    told_by=st.sampled_from(["segments", "positions", "both"]),
)
def test_ranges_of_packed_documents(mask, seed, told_by):
    """On the device, and in NumPy at any place: a document may start at any coordinate."""
    shape = (2, 24)
    segment_ids, positions = pack(np.random.default_rng(seed), *shape, max_length=20)
    if told_by != "segments":
        segment_ids = np.minimum(segment_ids, 1)
    segment_ids = np.ones_like(segment_ids) if told_by == "positions" else segment_ids
    positions = None if told_by == "segments" else positions
    documents = jax.tree.map(jnp.asarray, (segment_ids, positions))
    got = attended_tokens(PackedMask(mask, *documents), shape)
    np.testing.assert_array_equal(got[:2], batch_ranges(mask, segment_ids, positions))
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
        (SlidingWindow(None, first=4), Causal()),
        (SlidingWindow(8, first=LARGE), Causal()),
        (SlidingWindow(8, first=0), SlidingWindow(8)),
    ):
        got = read_mask("a test", mask)
        assert got == simplest and hash(got) == hash(simplest) and type(got) is type(simplest)
    first = read_mask("a test", SlidingWindow(8, first=4))
    assert first == read_mask("a test", SlidingWindow(8, 0, 4)) != SlidingWindow(8)
    assert pickle.loads(pickle.dumps(first)) == first and not jax.tree.leaves(first)


@pytest.mark.parametrize(
    "mask", [Full(), Causal(), SlidingWindow(3, 1), SlidingWindow(8, first=4), Chunked(4)], ids=str
)
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


# ---- The first tokens of each document stay visible.


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


# ---- Invalid masks, each rejected where it is made: a call, and the message after "<operation>: ".


INTS = np.zeros((2, 6), np.int32)
IDS = np.array([[1, 1, 1, 2, 2, 2]])


def attend(mask):
    q: Any = np.zeros((1, 6, 1, 4), np.float32)
    return cp.local_attention(q, q, q, mask=mask, segment_ids=IDS)


CASES = {
    "SlidingWindow": [
        (lambda: SlidingWindow(0), "left is 0; it needs to be at least 1"),
        (lambda: SlidingWindow(3, -1), "right is -1.*at least 0"),
        (lambda: SlidingWindow(3, first=-1), "first is -1; it needs to be at least 0"),
        (lambda: SlidingWindow(3, 1, first=2), "first is 2 and right is 1; .* Omit right, or"),
    ],
    "Chunked": [
        (lambda: Chunked(0), "size is 0; it needs to be at least 1"),
    ],
    "BlockCausal": [(lambda: BlockCausal(0), "size is 0; it needs to be at least 1")],
    "PrefixLM": [
        (lambda: PrefixLM(INTS), "in_prefix has dtype int32; .*booleans.*Pass"),
        (lambda: PrefixLM(INTS[0] > 0), r"in_prefix has shape \[6\]; it needs to be"),
    ],
    "Blocks": [
        (lambda: Blocks(INTS > 0), "block_ids has dtype bool; it needs to be integers"),
    ],
    "SharedPrefix": [
        (lambda: SharedPrefix(INTS[..., None]), r"completion_ids has shape \[2, 6, 1"),
        (lambda: SharedPrefix(np.array([[0, 1, 2, 1]])), "completion 1 begins again at column 3"),
    ],
    "Ranges": [
        (lambda: Ranges(INTS, INTS[:1]), r"k_end has shape \[1, 6\]; .*\[2, 6\], as"),
        (lambda: Ranges(INTS, INTS, q_end=INTS > 0), "q_end has dtype bool"),
    ],
    "Tree": [
        (lambda: Tree(INTS, INTS[:1]), "span_ids has 2 batch rows and parents has 1"),
        (lambda: Tree(INTS + 6, INTS - 1), r"span_ids\[0, 0\] is 6, but parents has 6 spans"),
        (lambda: Tree(INTS, INTS - 2), r"parents\[0, 0\] is -2"),
        (lambda: Tree(INTS, INTS), "batch row 0: span 0 is its own ancestor.*Pass -1"),
        (lambda: Tree(np.array([[0, 1, 0]]), np.array([[-1, 0]])), "span 0 is not one run of"),
        (
            lambda: Tree(np.array([[0, 1, 2, 3]]), np.array([[-1, -1, 0, 0]])),
            "span 0 has descendants that do not follow it in one run.*depth-first",
        ),
    ],
    "local_attention": [
        (lambda: attend(PrefixLM(np.array([[1, 1, 0, 0, 1, 0]]) > 0)), "in batch row 0, at column"),
        (
            lambda: attend(SharedPrefix(np.array([[0, 1, 2, 3, 4, 4]]))),
            "at column 3, SharedPrefix .* as of a prompt of one token, give each completion",
        ),
    ],
    "plan_attention": [
        (
            lambda: cp.plan_attention(
                IDS, world_size=1, mask=jax.tree.map(lambda x: x[:, ::-1], Blocks(IDS))
            ),
            "at column 2, Blocks is made of other columns. Make it from whole batch rows",
        )
    ],
    "place_tokens": [
        (
            lambda: cp.place_tokens(
                segment_ids=IDS,
                world_size=1,
                mask=jax.tree.map(lambda x: x[:, ::-1], Tree(IDS, np.array([[-1, -1, -1]]))),
            ),
            "Tree has tokens that are not in depth-first order, or is made of other columns",
        )
    ],
}


def test_the_list_is_of_public_functions():
    check_names(CASES)


@each(CASES)
@pytest.mark.usefixtures("unchecked_types")
def test_rejected(name, call, says):
    check_rejected(name, call, says)
