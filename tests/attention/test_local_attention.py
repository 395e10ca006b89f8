"""Local attention over key ranges and under masks of arrays, and the merge of partial results."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_masks import random_mask
from attention_oracle import attention, attention_gradients, masked_attention
from calls import Call, check_qkv, dense, draw_operands, draw_qkv, errors, with_gradients
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from local_cases import BLOCKS, RANGES, assert_close, inputs, random_ranges
from mask_oracle import batch_visible
from on_mesh import AXIS, mesh_of
from properties import examples

from jax_cp_dispatch import local_attention, merge_partials
from jax_cp_dispatch.attention import local_attention_backward


def with_cotangents(q, k, v, kv_start, kv_end, dout, dlse, **options):
    (out, lse), vjp = jax.vjp(
        lambda q, k, v: local_attention(q, k, v, kv_start, kv_end, **options), q, k, v
    )
    return out, lse, *vjp((dout, dlse))


ORACLE_OPTIONS = ("scale", "logit_soft_cap")
static_jit = functools.partial(
    jax.jit, static_argnames=(*ORACLE_OPTIONS, "block_q", "block_kv", "block_heads")
)
# Compiled once for all tests with the same shapes.
run = static_jit(with_cotangents)
forward = static_jit(local_attention)
backward = static_jit(local_attention_backward)
ALL_OPTIONS = {"scale": -0.9, "logit_soft_cap": 0.7}


def assert_equals_oracle(operands, ranges, tolerance=1e-5, **options):
    q, k, v, dout, dlse = operands
    start, end = ranges
    results = run(q, k, v, start, end, dout, dlse, **(BLOCKS | options))
    options = {name: options.get(name) for name in ORACLE_OPTIONS}
    expected = (
        *attention(q, k, v, start, end, **options),
        *attention_gradients(q, k, v, start, end, dout, dlse, **options),
    )
    assert all(x.dtype == jnp.float32 for x in results[:2])
    assert all(x.dtype == q.dtype for x in results[2:])
    for actual, wanted in zip(results, expected, strict=True):
        assert_close(actual, wanted, tolerance)


@pytest.mark.parametrize("ranges", RANGES)
def test_ranges(ranges):
    assert_equals_oracle(inputs(0), RANGES[ranges](2, 37, 45))


@given(seed=st.integers(0, 2**32 - 1))
@examples(15)
def test_random_ranges(seed):
    assert_equals_oracle(inputs(seed), random_ranges(seed, 2, 37, 45))


@pytest.mark.parametrize(
    "shape, options",
    [
        ({"N": 8, "K": 1, "T": 3, "S": 100, "Hv": 5}, ALL_OPTIONS),
        ({"N": 8, "K": 8}, ALL_OPTIONS | {"block_q": 7, "block_kv": 1, "block_heads": 2}),
        ({}, {"block_q": None, "block_kv": None, "block_heads": 1}),
        ({"T": 1, "S": 1}, {}),
    ],
    ids=str,
)
def test_shapes_and_options(shape, options):
    """With 8, 1 and 2 query heads for a KV head."""
    operands = inputs(1, **shape)
    q, k = operands[:2]
    ranges = random_ranges(2, 2, q.shape[1], k.shape[1])
    assert_equals_oracle(operands, ranges, **options)


def test_small_floats():
    """Probabilities and gradients are rounded to 11 bits. To 8: tests/contract."""
    assert_equals_oracle(inputs(4, dtype=jnp.float16), random_ranges(5, 2, 37, 45), 2e-3)


def test_no_keys():
    q, k, v, dout, dlse = inputs(6, S=0)
    zeros = jnp.zeros(q.shape[:2], jnp.int32)
    out, lse, *grads = with_cotangents(q, k, v, zeros, zeros + 4, dout, dlse)
    assert out.shape == dout.shape and not np.any(out)
    assert lse.shape == dlse.shape and np.all(np.isneginf(lse))
    for gradient, x in zip(grads, (q, k, v), strict=True):
        assert gradient.shape == x.shape and not np.any(gradient)


def test_large_logits_do_not_overflow():
    q, k, v, dout, dlse = inputs(7)
    results = run(1e3 * q, 1e3 * k, v, *RANGES["causal"](2, 37, 45), dout, dlse, **BLOCKS)
    assert all(np.all(np.isfinite(x)) for x in results)


@pytest.mark.parametrize("first", [0, 20])
def test_merged_pieces_are_the_whole(first):
    """Merges forward pieces; sums the backward passes of all pieces, given the merged lse and out.

    Keys before `first` are not used: with 20, no query attends to the first piece.
    """
    q, k, v, dout, dlse = inputs(11, S=40)
    start, end = random_ranges(12, 2, 37, 40)
    start = jnp.maximum(start, first)
    options = BLOCKS
    pieces = [(k[:, c : c + 20], v[:, c : c + 20], start - c, end - c) for c in (0, 20)]
    whole = run(q, k, v, start, end, dout, dlse, **options)
    parts = [forward(q, *piece, **options) for piece in pieces]
    out, lse = merge_partials(*parts[0], *parts[1])
    grads = [backward(q, *piece, out, lse, dout, dlse, **options) for piece in pieces]
    (dq_0, dk_0, dv_0), (dq_1, dk_1, dv_1) = grads
    dk, dv = jnp.concatenate([dk_0, dk_1], axis=1), jnp.concatenate([dv_0, dv_1], axis=1)
    for actual, wanted in zip((out, lse, dq_0 + dq_1, dk, dv), whole, strict=True):
        assert_close(actual, wanted, 1e-5)


def test_local_attention_backward_accepts_no_lse_cotangent_and_returns_float32():
    q, k, v, dout, dlse = inputs(14, dtype=jnp.bfloat16)
    start, end = RANGES["causal"](2, 37, 45)
    out, lse, *rounded = run(q, k, v, start, end, dout, 0 * dlse, **BLOCKS)
    grads = backward(q, k, v, start, end, out, lse, dout, **BLOCKS)
    for x, y in zip(grads, rounded, strict=True):
        assert x.dtype == jnp.float32
        assert_close(x, y, 1e-2)


def test_sharded_queries_of_replicated_keys():
    """dk and dv are summed over the mesh."""
    q, k, v, dout, dlse = inputs(15, T=36)
    start, end = random_ranges(15, 2, 36, 45)
    tokens, heads = P(None, AXIS), P(None, None, AXIS)
    sharded = jax.shard_map(
        functools.partial(local_attention, **BLOCKS), mesh=mesh_of(4),
        in_specs=(tokens, P(), P(), tokens, tokens), out_specs=(tokens, heads),
    )  # fmt: skip

    @jax.jit
    def both(q, k, v):
        results, vjp = jax.vjp(lambda q, k, v: sharded(q, k, v, start, end), q, k, v)
        return *results, *vjp((dout, dlse))

    expected = run(q, k, v, start, end, dout, dlse, **BLOCKS)
    for actual, wanted in zip(both(q, k, v), expected, strict=True):
        assert_close(actual, wanted, 1e-6)


@pytest.mark.parametrize("is_whole", [True, False])
def test_sinks_and_largest_logits_of_whole_keys_and_of_parts(is_whole):
    """In parts, the sink joins the last merge."""
    shape = 2, 21
    options: Any = {"scale": 0.4, "logit_soft_cap": 3.0}
    call = Call("ring", 1, heads=(4, 2), sink=True, returns=("lse",), **options)
    operands, (g, dlse) = draw_operands(call, np.random.default_rng(), shape)
    here = jnp.broadcast_to(jnp.arange(21), shape)
    local = functools.partial(local_attention, **options)

    def attend(x):
        operands = x["q"], *x["keys"]
        if is_whole:
            return local(*operands, sink=x["sink"], return_max_logits=True)
        first = local(*operands, 0 * here, jnp.minimum(here + 1, 9))
        second = local(*operands, 0 * here + 9, here + 1)
        return *merge_partials(*first, *second, sink=x["sink"]), jnp.zeros(4)

    @jax.jit
    def both(operands):
        (out, lse, largest), pull_back = jax.vjp(attend, operands)
        gradients = pull_back((g, jnp.swapaxes(dlse, 1, 2), jnp.zeros_like(largest)))
        return (out, jnp.swapaxes(lse, 1, 2)), gradients[0], largest

    *got, largest = both(jax.tree.map(jnp.asarray, operands))
    *wanted, of_largest, gradients = dense(call, operands, np.tri(21, dtype=bool)[None], (g, dlse))
    found = errors(call, tuple(got), (tuple(wanted), gradients))
    assert max(found.values()) <= 1, found
    if is_whole:
        np.testing.assert_allclose(largest, of_largest, rtol=3e-6)


def test_memory_is_linear():
    """Temporary memory is a few copies of the operands, not the 1 GiB of one head's logits."""
    x = jax.ShapeDtypeStruct((1, 16384, 2, 16), jnp.float32)
    ranges = jax.ShapeDtypeStruct((1, 16384), jnp.int32)
    lse = jax.ShapeDtypeStruct((1, 2, 16384), jnp.float32)
    analysis = run.lower(x, x, x, ranges, ranges, x, lse).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 20 * 4 * x.size


# ---- Masks of arrays.


SMALL: Any = {"block_q": 8, "block_kv": 8, "block_heads": 1}


def draw_with_mask(kind, shape):
    """Returns operands, a mask of arrays, and the pairs that it admits."""
    operands = draw_qkv(None, *shape)
    constructor, arrays, pairs = random_mask(kind, np.random.default_rng(), operands[4])
    return operands, constructor(*arrays), batch_visible(operands[4], pairs)


@pytest.mark.parametrize("kind", ["blocks", "tree"])
def test_masks_of_arrays(kind):
    """In small blocks, many of which are hidden; NaN in padding reaches no result.

    Ranges of keys alone, and of queries too. Those of other kinds: tests/masks.
    """
    attend = lambda q, k, v, ids, mask: local_attention(
        q, k, v, mask=mask, segment_ids=ids, **SMALL
    )[0]
    run: Any = jax.jit(with_gradients(attend))
    for _ in range(3):
        operands, mask, pairs = draw_with_mask(kind, (2, 45))
        *arrays, ids = operands
        hidden = (ids == 0)[..., None, None]
        poisoned = (np.where(hidden, np.float32(np.nan), x) for x in arrays)
        check_qkv(run(*poisoned, ids, mask), operands, pairs=pairs)


def test_ranges_of_rows_are_those_of_the_mask():
    operands, mask, pairs = draw_with_mask("ranges", (2, 33))
    *qkv, _, segment_ids = operands
    column = np.arange(33)[None]
    first = np.diff(segment_ids, axis=1, prepend=0) != 0
    start = np.maximum.accumulate(np.where(first, column, 0), axis=1)
    last = np.diff(segment_ids, axis=1, append=0) != 0
    end = np.minimum.accumulate(np.where(last, column + 1, 33)[:, ::-1], axis=1)[:, ::-1]
    ranges = [jnp.where(segment_ids > 0, x, 0) for x in mask.ranges(column, start, end)]
    of_queries = {"q_start": ranges[2], "q_end": ranges[3]}
    out, _ = local_attention(*map(jnp.asarray, qkv), *ranges[:2], **of_queries, **SMALL)
    check_qkv([out], operands, pairs=pairs)


def test_fewer_queries_are_the_last_tokens():
    operands, mask, pairs = draw_with_mask("tree", (2, 33))
    q, k, v, _, ids = operands
    attend: Any = jax.jit(lambda *x: local_attention(*x[:3], mask=x[3], segment_ids=x[4])[0])
    out = attend(q[:, 20:], k, v, mask, ids)
    np.testing.assert_allclose(out, masked_attention(q, k, v, pairs)[0][:, 20:], atol=2e-6)


# ---- Merging two partial softmaxes.


SHAPE = B, T, N, HV = 2, 3, 4, 5


def partial_result(rng, empty_share=0.0):
    """Returns an output and its lse; rows without keys are (0, -inf), as in `local_attention`."""
    out, lse = rng.normal(size=SHAPE), rng.normal(size=(B, N, T)) * 5
    lse = np.where(rng.random(lse.shape) < empty_share, -np.inf, lse)
    out = np.where(np.swapaxes(lse, 1, 2)[..., None] > -np.inf, out, 0)
    return out, lse


def merged_by_definition(out, lse, block_out, block_lse):
    weights = [np.swapaxes(np.exp(x), 1, 2)[..., None] for x in (lse, block_lse)]
    total = weights[0] + weights[1]
    merged = (weights[0] * out + weights[1] * block_out) / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return merged, np.log(np.exp(lse) + np.exp(block_lse))


def float32(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


@given(seed=st.integers(0, 2**32 - 1), empty_share=st.sampled_from([0.0, 0.5, 1.0]))
@examples(15)
def test_merge_partials_equals_the_definition(seed, empty_share):
    rng = np.random.default_rng(seed)
    parts = *partial_result(rng, empty_share), *partial_result(rng, empty_share)
    out, lse = merge_partials(*float32(*parts))
    expected_out, expected_lse = merged_by_definition(*parts)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lse", [-jnp.inf, -3e4])
def test_an_empty_side_returns_the_other_exactly(lse):
    """Likewise one whose logarithms are extreme, which do not overflow."""
    full: Any = float32(*partial_result(np.random.default_rng(2)))
    full = full[0], full[1] - lse / 2 if np.isfinite(lse) else full[1]
    empty: Any = jnp.zeros(SHAPE), jnp.full((B, N, T), lse)
    for merged in (merge_partials(*full, *empty), merge_partials(*empty, *full)):
        for x, y in zip(merged, full, strict=True):
            np.testing.assert_array_equal(x, y)


def test_merged_parts_are_float32():
    parts = [jnp.asarray(x, jnp.bfloat16) for x in partial_result(np.random.default_rng(5))]
    assert all(x.dtype == jnp.float32 for x in merge_partials(*parts, *parts))


def test_two_empty_sides_have_finite_zero_gradients():
    empty = jnp.zeros(SHAPE), jnp.full((B, N, T), -jnp.inf)
    (out, lse), vjp = jax.vjp(merge_partials, *empty, *empty)
    assert not np.any(out) and np.all(np.isneginf(lse))
    for gradient in vjp((jnp.ones_like(out), jnp.ones_like(lse))):
        np.testing.assert_array_equal(gradient, 0)


def test_gradients_match_numerical_ones():
    rng = np.random.default_rng(4)
    with jax.enable_x64(True):
        parts = tuple(jnp.asarray(x) for x in (*partial_result(rng), *partial_result(rng)))
        check_grads(jax.jit(merge_partials), parts, order=1, modes=["fwd", "rev"], rtol=1e-5)
