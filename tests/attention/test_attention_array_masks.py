"""Attention under masks of arrays equals dense attention, forward and backward.

Their arrays are arguments of the programs, so one program serves many masks of a kind.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_masks import KINDS, random_mask
from attention_oracle import masked_attention, masked_attention_gradients
from jax.sharding import PartitionSpec as P
from mask_oracle import batch_visible
from on_mesh import AXIS, all_fail, mesh_of, permuted_mesh
from packed_batches import pack

from jax_cp_dispatch import (
    Documents,
    Ring,
    context_parallel_attention,
    local_attention,
    place_tokens,
)
from jax_cp_dispatch.attention import auto
from jax_cp_dispatch.cost import rank_pairs
from jax_cp_dispatch.masks import Blocks, Causal, PrefixLM, SharedPrefix, SlidingWindow, Tree

BLOCKS: dict[str, Any] = {"block_q": 8, "block_kv": 8, "block_heads": 1}


def draw(kind, rng, shape):
    """Returns q, k, v and cotangents of out and lse, documents, a mask, and its pairs."""
    B, T = shape
    sizes = (4, 8), (2, 8), (2, 4), (4, 4)
    arrays = [rng.normal(size=(B, T, *size)).astype(np.float32) for size in sizes]
    segment_ids, _ = pack(rng, B, T, max_length=T, padding=0.1)
    constructor, of_mask, pairs = random_mask(kind, rng, segment_ids)
    return arrays, segment_ids, constructor(*of_mask), batch_visible(segment_ids, pairs)


def check(results, arrays, pairs, tolerance=2e-6):
    q, k, v, g = arrays
    out, lse = masked_attention(q, k, v, pairs)
    wanted = (out, *masked_attention_gradients(q, k, v, pairs, g, np.zeros_like(lse)))
    results = tuple(results)
    if len(results) == 1:
        wanted = wanted[:1]  # the output alone
    for i, (got, want) in enumerate(zip(results, wanted, strict=True)):
        # Inputs are of size 1; gradients may cancel to nothing, for queries of one key.
        error = np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1)
        assert error <= tolerance, f"{('out', 'dq', 'dk', 'dv')[i]}: {error}"


def with_gradients(attend):
    @jax.jit
    def run(q, k, v, g, *others):
        out, pull_back = jax.vjp(lambda *x: attend(*x, *others), q, k, v)
        return out, *pull_back(g)

    return run


def poison(arrays, segment_ids):
    return [np.where((segment_ids > 0)[..., None, None], x, np.float32(np.nan)) for x in arrays]


@pytest.mark.parametrize("kind", KINDS)
def test_local_attention_equals_dense_attention(kind):
    """In small blocks, many of which are hidden; NaN in padding reaches no result.

    Gradients follow the ranges of the output: of keys alone, or of queries too.
    """
    rng = np.random.default_rng()
    attend = lambda q, k, v, ids, mask: local_attention(
        q, k, v, mask=mask, segment_ids=ids, **BLOCKS
    )[0]
    run = jax.jit(lambda q, k, v, _, ids, mask: (attend(q, k, v, ids, mask),))
    if kind in ("blocks", "tree"):
        run = with_gradients(attend)
    for _ in range(3):
        arrays, segment_ids, mask, pairs = draw(kind, rng, (2, 45))
        check(run(*poison(arrays, segment_ids), segment_ids, mask), arrays, pairs)


def test_ranges_of_rows_are_those_of_the_mask():
    rng = np.random.default_rng()
    (q, k, v, _), segment_ids, mask, pairs = draw("ranges", rng, (2, 33))
    column = np.arange(33)[None]
    first = np.diff(segment_ids, axis=1, prepend=0) != 0
    start = np.maximum.accumulate(np.where(first, column, 0), axis=1)
    last = np.diff(segment_ids, axis=1, append=0) != 0
    end = np.minimum.accumulate(np.where(last, column + 1, 33)[:, ::-1], axis=1)[:, ::-1]
    seen = mask.ranges(column, start, end)
    ranges = [jnp.where(segment_ids > 0, x, 0) for x in seen]
    q, k, v = map(jnp.asarray, (q, k, v))
    out, lse = local_attention(q, k, v, *ranges[:2], q_start=ranges[2], q_end=ranges[3], **BLOCKS)
    for got, want in zip((out, lse), masked_attention(q, k, v, pairs), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_fewer_queries_are_the_last_tokens():
    rng = np.random.default_rng()
    (q, k, v, _), segment_ids, mask, pairs = draw("tree", rng, (2, 33))
    attend: Any = jax.jit(lambda *x: local_attention(*x[:3], mask=x[3], segment_ids=x[4])[0])
    out = attend(q[:, 20:], k, v, mask, segment_ids)
    want, _ = masked_attention(q[:, 20:], k, v, pairs[:, 20:])
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6)


def test_a_sharded_batch_and_one_rank_at_a_time():
    rng = np.random.default_rng()
    mesh = permuted_mesh((2, 4), ("data", AXIS))
    rows = P("data", AXIS)
    attend = jax.shard_map(
        lambda q, k, v, ids, mask: context_parallel_attention(
            q, k, v, algorithm="ring", axis_name=AXIS, segment_ids=ids, mask=mask
        ),
        mesh=mesh, in_specs=rows, out_specs=rows,
    )  # fmt: skip
    arrays, segment_ids, mask, pairs = draw("tree", rng, (2, 24))
    check(with_gradients(attend)(*poison(arrays, segment_ids), segment_ids, mask), arrays, pairs)


@pytest.mark.parametrize("algorithm", ["ring", "balanced"])
def test_the_mask_of_other_columns_fails_on_all_ranks(algorithm):
    """In packed order for zigzag tokens; of one rank's columns; against the rules of its kind."""
    mesh = mesh_of(4)
    ids = np.repeat([[1, 2, 3]], [30, 20, 14], axis=1)
    blocks = np.repeat([[0, 1, 0, 2, 0]], [20, 13, 7, 10, 14], axis=1)
    q = np.ones((1, 64, 1, 4), np.float32)

    def attend(ids, mask, order=lambda x: x, algorithm=algorithm):
        return context_parallel_attention(
            *(q, q, q), mesh=mesh, axis_name=AXIS, algorithm=algorithm,
            documents=order(Documents(ids)), mask=mask,
        )  # fmt: skip

    says = "the mask is not one of these tokens and documents"
    if algorithm == "balanced":
        # A ring compiles faster than a plan, and every kind has its rules in one function.
        in_rows = jax.jit(lambda ids, mask: attend(ids, mask, algorithm="ring"))
        all_fail(in_rows(ids, PrefixLM(np.arange(64)[None] == 5)), says)  # not a document's first
        of_tree = jax.jit(lambda spans, parents: attend(ids, Tree(spans, parents)))
        spans = np.repeat([[0, 1, 2, 3]], [30, 10, 10, 14], axis=1)
        assert np.isfinite(of_tree(spans, np.array([[-1, -1, 1, -1]]))).all()
        all_fail(of_tree(spans, np.array([[-1, 2, -1, -1]])), says)  # a child before its parent
        return
    zigzag = lambda documents: documents.zigzag(4)
    stored = jax.jit(lambda ids, mask: attend(ids, mask, zigzag))
    mask = zigzag(Documents(ids)).apply(Blocks(blocks))
    assert np.isfinite(stored(ids, mask)).all()
    still_packed = jax.tree.unflatten(jax.tree.structure(mask), jax.tree.leaves(Blocks(blocks)))
    all_fail(stored(ids, still_packed), says)
    with pytest.raises(ValueError, match=r"mask=.* in packed order, but the tokens in zigzag"):
        stored(ids, Blocks(blocks))

    def of_rank(q, ids, blocks):
        return context_parallel_attention(
            q, q, q, algorithm="ring", axis_name=AXIS, segment_ids=ids, mask=Blocks(blocks)
        )

    spec = P(None, AXIS)
    on_ranks = jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    all_fail(jax.jit(on_ranks)(q, ids, blocks), says)


def test_a_mask_of_each_layer_inside_a_scan():
    """`lax.switch` picks the mask of a layer."""
    rng = np.random.default_rng()
    (q, k, v, _), segment_ids, mask, pairs = draw("prefix", rng, (1, 24))
    attend = functools.partial(
        context_parallel_attention, mesh=mesh_of(4), axis_name=AXIS, algorithm=Ring(),
        segment_ids=segment_ids,
    )  # fmt: skip

    @jax.jit
    def layers(q, mask):
        branches = [lambda q, m=m: attend(q, k, v, mask=m) for m in (mask, Causal())]
        return jax.lax.scan(
            lambda _, kind: (0, jax.lax.switch(kind, branches, q)), 0, jnp.array([0, 1])
        )[1]

    outs = layers(q, mask)
    causal = batch_visible(segment_ids, np.tril(np.ones((24, 24), bool))[None])
    for got, allowed in zip(outs, (pairs, causal), strict=True):
        np.testing.assert_allclose(got, masked_attention(q, k, v, allowed)[0], rtol=2e-6, atol=2e-6)


def test_hidden_blocks_are_not_computed(monkeypatch):
    """A prompt and its completions: the products of blocks whose queries see no key are skipped."""
    from jax_cp_dispatch.attention.local import forward

    counted: list[int] = []
    matmul = forward.matmul

    def counting(x, y, contract):
        jax.debug.callback(lambda: counted.append(1))
        return matmul(x, y, contract)

    monkeypatch.setattr(forward, "matmul", counting)
    ids = np.repeat([0, 0, 1, 2, 3, 4, 5, 6], 8)[None]  # a prompt of 2 blocks, 6 completions of one
    x = jnp.asarray(np.random.default_rng().normal(size=(1, 64, 1, 8)), jnp.float32)
    jax.clear_caches()
    jax.block_until_ready(local_attention(x, x, x, mask=SharedPrefix(ids), **BLOCKS))
    jax.effects_barrier()
    jax.clear_caches()
    assert len(counted) == 2 * (1 + 2 + 6 * 3)  # two products for each pair of blocks


def test_placed_attention_equals_dense_attention():
    """Beside a window, over the same tokens; a plan of another mask is an error on all ranks."""
    rng, kind = np.random.default_rng(), "tree"
    arrays, segment_ids, mask, pairs = draw(kind, rng, (2, 48))
    masks = (SlidingWindow(4), mask)
    placement = place_tokens(segment_ids=segment_ids, world_size=8, masks=masks, layers=(5, 1))
    attend = lambda q, k, v, documents, given: context_parallel_attention(
        q, k, v, mesh=mesh_of(8), axis_name=AXIS, algorithm="placed", documents=documents,
        mask=given,
    )  # fmt: skip
    run = with_gradients(attend)
    placed = *placement.apply(poison(arrays, segment_ids)), placement.documents
    results = run(*placed, placement.apply(mask))
    check(map(np.asarray, placement.restore(results)), arrays, pairs)
    other = draw(kind, rng, (2, 48))[2]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"the mask of rank \d has checksum"):
        jax.block_until_ready(run(*placed, placement.apply(other)))


def test_auto_counts_the_pairs_of_any_mask(monkeypatch):
    """With padding between documents; the call is that of the chosen algorithm."""
    rng = np.random.default_rng()
    (q, k, v, _), segment_ids, mask, pairs = draw("tree", rng, (2, 48))
    documents = Documents(segment_ids).zigzag(4)
    *arrays, of_order = documents.apply((q, k, v, mask))
    attend = functools.partial(
        context_parallel_attention, *arrays, mesh=mesh_of(4), axis_name=AXIS, documents=documents,
        mask=of_order,
    )  # fmt: skip
    seen = []
    choose = auto.choose_for

    def recorded(workload, moves, **options):
        result = choose(workload, moves, **options)
        seen.append((workload, result[0].algorithm))
        return result

    monkeypatch.setattr(auto, "choose_for", recorded)
    out = attend(algorithm="auto")
    ((workload, algorithm),) = seen
    np.testing.assert_array_equal(out, attend(algorithm=algorithm))
    want, _ = masked_attention(q, k, v, pairs)
    np.testing.assert_allclose(documents.restore(out), want, rtol=2e-6, atol=2e-6)
    sizes = {"num_ranks": 4, "tokens_per_rank": 12, "zigzag": False}
    of_row = lambda b: jax.tree.map(lambda x: x[b : b + 1], workload.mask)
    rows = enumerate(workload.rows)
    found = sum(rank_pairs(x, mask=of_row(b), **sizes).sum() for b, x in rows)
    assert pairs.sum() <= found <= pairs.sum() + (segment_ids == 0).sum()


def in_prefix(shape=(1, 8)):
    return PrefixLM(np.ones(shape, bool))


X: Any = jnp.zeros((1, 8, 2, 4), jnp.float32)
ROWS: Any = jnp.zeros((1, 8), jnp.int32)
REFUSED = {
    "arrays of another shape": (
        lambda: context_parallel_attention(
            X, X, X, mesh=mesh_of(2), axis_name=AXIS, algorithm="ring", mask=in_prefix((1, 6))
        ),
        r"needs one number for each token, but the batch has shape \[1, 8\]",
    ),
    "a mask and ranges": (
        lambda: local_attention(X, X, X, ROWS, ROWS, mask="full"),
        "got ranges of keys, and a mask",
    ),
    "ranges of queries alone": (
        lambda: local_attention(X, X, X, q_start=ROWS),
        "q_start or q_end without kv_start",
    ),
    "more queries than keys": (
        lambda: local_attention(X, X[:, :4], X[:, :4], mask="causal"),
        "8 queries and 4 keys",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()
