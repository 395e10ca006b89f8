"""Masks: what they admit is their definition, on the host and on the device; invalid masks."""

import pickle
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_mask import any_mask
from array_masks import ALL_KINDS, KINDS, pack_for, random_mask, random_trees
from hypothesis import given, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from mask_oracle import (
    batch_pairs,
    batch_visible,
    block_diffusion_pairs,
    copied_tokens,
    range_pairs,
    tree_pairs,
    visible,
)
from on_mesh import permuted_mesh
from packed_batches import pack
from properties import examples
from refusals import check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch import place_tokens, plan_attention
from jax_cp_dispatch._ranks.runtime import native  # inner: pairs in the planner
from jax_cp_dispatch.documents.documents import attended_tokens, trusted  # inner: the same
from jax_cp_dispatch.masks import (
    BlockCausal,
    BlockDiffusion,
    Blocks,
    Causal,
    Chunked,
    Full,
    MaskRanges,
    PrefixLM,
    Ranges,
    SharedPrefix,
    SlidingWindow,
    Tree,
    both_copies,
)
from jax_cp_dispatch.masks.pairs import pairs_per_query, traced_pairs_per_query  # inner: the same
from jax_cp_dispatch.masks.read import read_mask  # inner: the same

LARGE = 2**40
SHAPE = (2, 24)


def check_ranges(ranges, counts, wanted):
    """Requires ranges and counts that were made on a device; counts them on the host, too."""
    whole = lambda x: None if x is None else np.broadcast_to(np.asarray(x), wanted.shape[:2])
    ranges = MaskRanges(*map(whole, ranges))
    np.testing.assert_array_equal(range_pairs(*ranges), wanted)
    np.testing.assert_array_equal(pairs_per_query(ranges), wanted.sum(2))
    np.testing.assert_array_equal(counts, wanted.sum(2))


# ---- Masks of numbers.


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
    # In NumPy at any place: a document may start at any coordinate.
    query, shift = np.arange(length), data.draw(st.integers(-50, 50))
    begin, stop = (
        mask.k_start(query + shift, shift),
        mask.k_end(query + shift, shift, length + shift),
    )
    np.testing.assert_array_equal(begin - shift, seen.argmax(1))
    np.testing.assert_array_equal(stop - shift, length - seen[:, ::-1].argmax(1))


@examples(16)
@given(
    mask=any_mask(30)
    | st.builds(
        lambda left, first: SlidingWindow(left, first=first), st.integers(1, 40), st.integers(1, 9)
    ),
    seed=st.integers(0, 2**32 - 1),
    told_by=st.sampled_from(["segments", "positions", "both"]),
)
def test_ranges_of_packed_documents(mask, seed, told_by):
    segment_ids, positions = pack(np.random.default_rng(seed), *SHAPE, max_length=20)
    if told_by != "segments":
        segment_ids = np.minimum(segment_ids, 1)
    segment_ids = np.ones_like(segment_ids) if told_by == "positions" else segment_ids
    documents = segment_ids, None if told_by == "segments" else positions
    wanted, mask = batch_pairs(mask, *documents), mask.simplified()
    ranges = attended_tokens(trusted(*jax.tree.map(jnp.asarray, documents), mask=mask), SHAPE)
    assert mask.has_query_ranges == (ranges.q_end is not None)
    check_ranges(ranges, traced_pairs_per_query(ranges, is_causal=mask.is_causal), wanted)


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
    assert first.num_keys(100) == 4 + 8


def test_static_masks_are_pytrees_without_leaves():
    """Of equal structures `jax.jit` makes one program, so those of two kinds differ."""
    masks = [Full(), Causal(), SlidingWindow(4, 0), SlidingWindow(8, first=4), Chunked(4)]
    masks += [BlockCausal(4), read_mask("a test", SlidingWindow(4, first=8))]
    trees, traces = [jax.tree.structure(mask) for mask in masks], []

    @jax.jit
    def count(mask, q):
        traces.append(mask)
        return mask.ranges(q, 0 * q, q + 1)

    for i, mask in enumerate(masks):
        assert not jax.tree.leaves(mask) and jax.tree.unflatten(trees[i], []) == mask
        assert [tree == trees[i] for tree in trees] == [i == j for j in range(len(masks))]
        assert pickle.loads(pickle.dumps(mask)) == mask
        for _ in range(2):
            count(mask, np.arange(3))
    assert traces == masks
    for mask in (*masks[:5], SlidingWindow(None, 2), SlidingWindow(3, None)):
        seen = visible(mask, 9)
        assert mask.is_causal == bool(np.triu(seen, 1).sum() == 0)
        assert read_mask("a test", mask).num_keys(9) == seen.sum(1).max()


@pytest.mark.parametrize("make", [place_tokens, plan_attention])
def test_plans_on_the_host_move_the_window_and_the_first_tokens(make):
    """Of one document on 8 ranks: at most left - 1 + first keys before each piece of a rank."""
    mask = SlidingWindow(9, first=2)
    made = make(lengths=[[8 * 64]], world_size=8, mask=mask)
    plan = getattr(made, "plan", made)
    moved = int(np.asarray(plan.num_kv_tokens_moved))
    pieces = int((np.asarray(plan.run_row) < np.asarray(plan.num_rows)[:, None]).sum())
    assert 0 < moved <= (8 + 2) * pieces
    assert int(plan.pairs.sum()) == batch_pairs(mask, np.ones((1, 512), int)).sum()


# ---- Masks of arrays.


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_mask_admits_what_its_definition_says(kind):
    """Also traced, and after its arrays moved and came back; and its pairs are counted."""
    rng = np.random.default_rng()

    def on_device(constructor, arrays, segment_ids):
        mask = constructor(*arrays)
        ranges = attended_tokens(trusted(segment_ids, mask=mask), SHAPE)
        return mask, ranges, traced_pairs_per_query(ranges, is_causal=mask.is_causal)

    program: Any = jax.jit(on_device, static_argnums=0)
    for _ in range(20):
        segment_ids, _ = pack_for(kind, rng, *SHAPE, max_length=20)
        constructor, arrays, pairs = random_mask(kind, rng, segment_ids)
        wanted = batch_visible(segment_ids, pairs)
        mask = constructor(*arrays)
        traced, ranges, counts = program(constructor, arrays, segment_ids)
        jax.tree.map(np.testing.assert_array_equal, mask, traced)
        assert mask.has_arrays and mask.has_query_ranges == (ranges.q_end is not None)
        check_ranges(ranges, counts, wanted)
        assert not mask.is_causal or not np.triu(wanted, 1).any()


def test_both_copies_of_documents_side_by_side():
    """On the host and traced; the layout of tokens is that of their mask."""
    rng = np.random.default_rng()
    trace: Any = jax.jit(lambda segment_ids: both_copies(segment_ids, 3))
    for _ in range(10):
        segment_ids, _ = pack(rng, *SHAPE, max_length=9)
        copies = both_copies(segment_ids, 3)
        jax.tree.map(np.testing.assert_array_equal, tuple(copies), tuple(trace(segment_ids)))
        columns, positions, is_noisy = copied_tokens(segment_ids)
        np.testing.assert_array_equal(copies.columns, columns)
        np.testing.assert_array_equal(copies.positions, positions)
        np.testing.assert_array_equal(copies.is_noisy, is_noisy)
        ids = np.take_along_axis(segment_ids, columns, axis=1)
        np.testing.assert_array_equal(copies.segment_ids, ids)
        ranges = attended_tokens(trusted(ids, mask=copies.mask), ids.shape)
        pairs = range_pairs(*jax.tree.map(np.asarray, ranges))
        np.testing.assert_array_equal(pairs, block_diffusion_pairs(ids, 3))


@pytest.mark.parametrize("hardware", [None, "h100"])
def test_noisy_keys_do_not_move(hardware):
    """If blocks of noise divide the documents and the tokens of a rank; also planned by time."""
    size, num_ranks = 16, 4
    segment_ids = np.repeat([1, 2, 3, 0], size * np.array([45, 3, 70, 10]))[None]
    copies = both_copies(segment_ids, size)
    batch: Any = {"segment_ids": copies.segment_ids, "mask": copies.mask, "world_size": num_ranks}
    config = cp.PlanConfig(block=size, balance_tolerance=0.1, hardware=hardware)
    placement = place_tokens(**batch, config=config)
    is_noisy = placement.apply(copies.is_noisy).reshape(num_ranks, -1)
    sent = placement.plan.kv_metadata
    for rank in range(num_ranks):
        ranges = sent.dst_rank[rank], sent.src_offset[rank], sent.seq_len[rank]
        for to, first, length in zip(*ranges, strict=True):
            assert to in (-1, rank) or not is_noisy[rank, first : first + length].any()
    assert placement.plan.num_kv_tokens_moved > 500


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
    of_tree = Tree(np.sort(ids), ids[:, 1:4] - 1)
    for mask in (PrefixLM(ids == 0), Blocks(ids), SharedPrefix(ids), of_tree):
        moved = jax.tree.map(lambda x: x[:, order], mask)
        assert type(moved) is type(mask) and moved != mask and mask == mask
        back = jax.tree.map(lambda x: x[:, np.argsort(order)], moved)
        jax.tree.map(np.testing.assert_array_equal, back, mask)
        assert [x.dtype for x in jax.tree.leaves(mask)] == [np.int32]
        assert "6" in repr(mask) and hash(mask)
    assert not jax.tree.leaves(jax.tree.map(lambda _: None, mask))


def test_traced_trees_out_of_order_get_ends_that_attention_refuses():
    """A child after its sibling, a span in two runs, a cycle of parents."""
    make = jax.jit(Tree)
    for span_ids, parents in (
        ([[0, 1, 2, 3]], [[-1, 0, 0, 1]]),
        ([[0, 1, 0, 1]], [[-1, -1, -1, -1]]),
        ([[0, 1, 2, 3]], [[1, 0, -1, -1]]),
    ):
        mask = make(jnp.array(span_ids), jnp.array(parents))
        ((rule, _),) = mask.rules(jnp.arange(4)[None], jnp.zeros((1, 4)), jnp.full((1, 4), 4))
        assert not rule.any()


def test_numbers_beyond_int32_are_no_limit():
    for dtype in (np.int64, np.uint32, np.uint64):
        none = np.full((1, 4), np.iinfo(dtype).max, dtype)
        mask = Ranges(np.zeros((1, 4), dtype), none)
        np.testing.assert_array_equal(mask.k_end, np.iinfo(np.int32).max)


def test_arrays_that_explicit_axes_shard():
    """Over rows and columns, as segment ids may be; spans have rows of their own."""
    mesh = permuted_mesh((2, 2), ("data", "cp"), AxisType.Explicit)
    rng = np.random.default_rng()
    segment_ids, _ = pack(rng, 2, 24, max_length=20)
    made = [random_mask(kind, rng, segment_ids)[:2] for kind in KINDS[:4]]
    with jax.set_mesh(mesh):
        of = lambda x: NamedSharding(mesh, P("data", "cp" if x.shape[1] == 24 else None))
        sharded = jax.tree.map(lambda x: jax.device_put(x, of(x)), [arrays for _, arrays in made])
        run = jax.jit(
            lambda sharded: [make(*x) for (make, _), x in zip(made, sharded, strict=True)]
        )
        got = run(sharded)
    wanted = [make(*arrays) for make, arrays in made]
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


# ---- Invalid masks, each rejected where it is made: a call, and the message after "<operation>: ".

INTS = np.zeros((2, 6), np.int32)
IDS = np.array([[1, 1, 1, 2, 2, 2]])
Q: Any = np.zeros((1, 6, 1, 4), np.float32)


def attend(mask):
    return cp.local_attention(Q, Q, Q, mask=mask, segment_ids=IDS)


def backwards(mask):
    return jax.tree.map(lambda x: x[:, ::-1], mask)


def tree(span_ids, parents):
    return Tree(np.array([span_ids]), np.array([parents]))


CASES = {
    "SlidingWindow": [
        (lambda: SlidingWindow(0), "left is 0; it needs to be at least 1"),
        (lambda: SlidingWindow(3, -1), "right is -1.*at least 0"),
        (lambda: SlidingWindow(3, first=-1), "first is -1; it needs to be at least 0"),
        (lambda: SlidingWindow(3, 1, first=2), "first is 2 and right is 1; .* Omit right, or"),
    ],
    "Chunked": [(lambda: Chunked(0), "size is 0; it needs to be at least 1")],
    "BlockCausal": [(lambda: BlockCausal(0), "size is 0; it needs to be at least 1")],
    "BlockDiffusion": [
        (lambda: BlockDiffusion(IDS, 0), "size is 0; it needs to be at least 1"),
        (lambda: BlockDiffusion(IDS, 2), "document at column 0 has 3 tokens; .* of equal length"),
    ],
    "both_copies": [(lambda: both_copies(IDS, 0), "size is 0; it needs to be at least 1")],
    "PrefixLM": [],
    "SharedPrefix": [
        (lambda: SharedPrefix(np.array([[0, 1, 2, 1]])), "completion 1 begins again at column 3")
    ],
    "Ranges": [
        (lambda: Ranges(INTS, INTS[:1]), r"k_end is int32\[1, 6\]; .*B = 2, T = 6 as in k_start")
    ],
    "Tree": [
        (lambda: Tree(INTS + 6, INTS - 1), r"span_ids\[0, 0\] is 6, but parents has 6 spans"),
        (lambda: Tree(INTS, INTS - 2), r"parents\[0, 0\] is -2"),
        (lambda: Tree(INTS, INTS), "batch row 0: span 0 is its own ancestor.*Pass -1"),
        (lambda: tree([0, 1, 0], [-1, 0]), "span 0 is not one run of"),
        (
            lambda: tree([0, 1, 2, 3], [-1, -1, 0, 0]),
            "span 0 has descendants that do not follow it in one run.*depth-first",
        ),
    ],
    "local_attention": [
        (lambda: attend(PrefixLM(np.array([[1, 1, 0, 0, 1, 0]]) > 0)), "in batch row 0, at column"),
        (
            lambda: attend(SharedPrefix(np.array([[0, 1, 2, 3, 4, 4]]))),
            "at column 3, SharedPrefix .* as of a prompt of one token, give each completion",
        ),
        (
            lambda: attend(BlockDiffusion(np.ones_like(IDS), 2)),  # as positions end documents
            "at column 1, BlockDiffusion .* clean copy of equal length.* omit positions",
        ),
    ],
    "plan_attention": [
        (
            lambda: plan_attention(IDS, world_size=1, mask=backwards(Blocks(IDS))),
            "at column 2, Blocks is made of other columns. Make it from whole batch rows",
        )
    ],
    "place_tokens": [
        (
            lambda: place_tokens(
                segment_ids=IDS, world_size=1, mask=backwards(Tree(IDS, np.full((1, 3), -1)))
            ),
            "Tree has tokens that are not in depth-first order, or is made of other columns",
        )
    ],
}


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)
