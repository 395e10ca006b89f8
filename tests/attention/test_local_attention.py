"""Local attention over key ranges: values, gradients, dtypes, transforms, memory, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, attention_gradients
from hypothesis import given, strategies as st
from jax.sharding import AxisType, PartitionSpec as P
from local_cases import BLOCKS, RANGES, assert_close, inputs, random_ranges, rows
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


@pytest.mark.parametrize("K, block_heads", [(1, None), (8, 2)])
def test_query_heads_share_kv_heads(K, block_heads):
    """Ratios 8 and 1 (other tests use 2), with all options that change the result."""
    operands = inputs(1, N=8, K=K, B=2)
    ranges = random_ranges(1, 2, 37, 45)
    assert_equals_oracle(operands, ranges, **ALL_OPTIONS, block_heads=block_heads)


@pytest.mark.parametrize(
    "options",
    [
        ALL_OPTIONS,
        {"logit_soft_cap": 0.7, "block_q": 7, "block_kv": 1},
        {"block_q": None, "block_kv": None, "block_heads": 1},
    ],
    ids=str,
)
def test_options(options):
    assert_equals_oracle(inputs(2), random_ranges(2, 2, 37, 45), **options)


@pytest.mark.parametrize("shape", [{"T": 3, "S": 100, "Hv": 5}, {"T": 1, "S": 1}], ids=str)
def test_shapes(shape):
    operands = inputs(3, **shape)
    q, k = operands[:2]
    assert_equals_oracle(operands, random_ranges(4, 2, q.shape[1], k.shape[1]))


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 1e-2), (jnp.float16, 2e-3)])
def test_small_floats(dtype, tolerance):
    """The probabilities and the gradients are rounded to 8 and 11 bits."""
    assert_equals_oracle(inputs(4, dtype=dtype), random_ranges(5, 2, 37, 45), tolerance)


def test_float64_accumulates_in_float64():
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in inputs(5))
    ranges = random_ranges(6, 2, 37, 45)
    with jax.enable_x64(True):
        operands = (jnp.asarray(x) for x in (q, k, v, *ranges, dout, dlse))
        results = run(*operands, **BLOCKS)
    expected = *attention(q, k, v, *ranges), *attention_gradients(q, k, v, *ranges, dout, dlse)
    for actual, wanted in zip(results, expected, strict=True):
        assert actual.dtype == jnp.float64
        assert_close(actual, wanted, 1e-13)


@pytest.mark.parametrize("shape", [{"B": 0}, {"T": 0}, {"S": 0}], ids=str)
def test_empty_arrays(shape):
    q, k, v, dout, dlse = inputs(6, **shape)
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


def test_unused_rows_are_not_read():
    q, k, v, dout, dlse = inputs(8)
    used_q, used_kv = np.arange(37) % 3 > 0, (np.arange(45) > 4) & (np.arange(45) < 30)
    start, end = rows(2, 37, lambda i: 5 + i // 4, lambda i: np.where(used_q, 20 + i // 4, 0))
    clean = run(q, k, v, start, end, dout, dlse, **BLOCKS)
    poison_q, poison_kv = (np.where(x, 0, np.nan) for x in (used_q, used_kv))
    q, dout = (x + poison_q[:, None, None] for x in (q, dout))
    k, v = (x + poison_kv[:, None, None] for x in (k, v))
    poisoned = run(q, k, v, start, end, dout, dlse + poison_q, **BLOCKS)
    for x, y in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(x, y)


def test_adjoint_of_the_jacobian():
    """<cotangent, J tangent> = <J' cotangent, tangent>, with J by central differences, float64."""
    rng = np.random.default_rng(9)
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in inputs(9))
    ranges = RANGES["causal"](2, 37, 45)
    tangents = tq, tk, tv = [rng.normal(size=x.shape) for x in (q, k, v)]
    step = 1e-5
    (out_1, lse_1), (out_0, lse_0) = (
        attention(q + s * tq, k + s * tk, v + s * tv, *ranges, **ALL_OPTIONS) for s in (step, -step)
    )
    expected = (np.sum(dout * (out_1 - out_0)) + np.sum(dlse * (lse_1 - lse_0))) / (2 * step)
    operands = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    _, _, *grads = run(*operands, *ranges, *inputs(9)[3:], **BLOCKS, **ALL_OPTIONS)
    actual = sum(
        np.sum(np.asarray(g, np.float64) * t) for g, t in zip(grads, tangents, strict=True)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


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


def test_is_bitwise_repeatable():
    q, k, v, dout, dlse = inputs(0)
    ranges = RANGES["random"](2, 37, 45)
    first, second = (run(q, k, v, *ranges, dout, dlse, **BLOCKS) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def one_batch_row(q, k, v, start, end, dout, dlse):
    @jax.checkpoint
    def f(q, k, v):
        out, lse = local_attention(q[None], k[None], v[None], start[None], end[None], **BLOCKS)
        return out[0], lse[0]

    results, vjp = jax.vjp(f, q, k, v)
    return *results, *vjp((dout, dlse))


@pytest.mark.parametrize(
    "transform",
    [jax.vmap, lambda f: lambda *xs: jax.lax.scan(lambda _, x: (None, f(*x)), None, xs)[1]],
    ids=["vmap", "scan"],
)
def test_inside_remat_and_a_transform(transform):
    q, k, v, dout, dlse = inputs(0)
    operands = (q, k, v, *RANGES["random"](2, 37, 45), dout, dlse)
    actual = jax.jit(transform(one_batch_row))(*operands)
    for x, y in zip(actual, run(*operands, **BLOCKS), strict=True):
        assert_close(x, y, 1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """Queries are sharded and keys replicated: dk and dv are summed over the mesh."""
    mesh = jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    q, k, v, dout, dlse = inputs(15, T=36)
    start, end = random_ranges(15, 2, 36, 45)
    tokens, heads = P(None, "cp"), P(None, None, "cp")
    sharded = jax.shard_map(
        functools.partial(local_attention, **BLOCKS),
        mesh=mesh,
        in_specs=(tokens, P(), P(), tokens, tokens),
        out_specs=(tokens, heads),
        check_vma=check_vma,
    )

    @jax.jit
    def both(q, k, v):
        results, vjp = jax.vjp(lambda q, k, v: sharded(q, k, v, start, end), q, k, v)
        return *results, *vjp((dout, dlse))

    expected = run(q, k, v, start, end, dout, dlse, **BLOCKS)
    for actual, wanted in zip(both(q, k, v), expected, strict=True):
        assert_close(actual, wanted, 1e-6)


def test_memory_is_linear():
    """Temporary memory is a few copies of the operands, not the 1 GiB of one head's logits."""
    x = jax.ShapeDtypeStruct((1, 16384, 2, 16), jnp.float32)
    ranges = jax.ShapeDtypeStruct((1, 16384), jnp.int32)
    lse = jax.ShapeDtypeStruct((1, 2, 16384), jnp.float32)
    analysis = run.lower(x, x, x, ranges, ranges, x, lse).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 20 * 4 * x.size


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "change, options, error, message",
    [
        ({"q": (2, 37, 4)}, {}, ValueError, "need four axes"),
        ({"k": (2, 45, 2, 9)}, {}, ValueError, r"needs \[2, S, K, 8\]"),
        ({"v": (2, 44, 2, 8)}, {}, ValueError, r"k and v have shapes \(2, 45, 2, 8\)"),
        ({"q": (2, 37, 3, 8)}, {}, ValueError, "N must be a multiple of K"),
        ({"kv_start": (2, 36)}, {}, ValueError, r"one range per query row, \[2, 37\]"),
        ({}, {"scale": "a"}, TypeError, "scale is 'a', but must be a number"),
        ({}, {"logit_soft_cap": 0.0}, ValueError, "logit_soft_cap is 0.0"),
        ({}, {"block_q": 0}, ValueError, "block_q is 0"),
        ({}, {"block_heads": 3}, ValueError, "block_heads is 3, but must be .* divides the 2 KV"),
        ({}, {"block_heads": 2.0}, ValueError, "block_heads is 2.0, but must be an integer"),
        ({"k": jnp.bfloat16}, {}, TypeError, "float32, bfloat16, float32"),
        ({"q": jnp.int32, "k": jnp.int32, "v": jnp.int32}, {}, TypeError, "must have the same one"),
        ({"kv_end": jnp.float32}, {}, TypeError, "kv_end has dtype float32"),
    ],
)
def test_errors(change, options, error, message):
    q, k, v, _, _ = inputs(16)
    start, end = RANGES["full"](2, 37, 45)
    operands = {"q": q, "k": k, "v": v, "kv_start": start, "kv_end": end}
    for name, new in change.items():
        old = operands[name]
        operands[name] = jnp.zeros(new, old.dtype) if isinstance(new, tuple) else old.astype(new)
    with pytest.raises(error, match="local_attention: .*" + message):
        local_attention(*operands.values(), **options)


@pytest.mark.usefixtures("unchecked_types")
def test_backward_names_the_array_of_the_wrong_shape():
    q, k, v, dout, dlse = inputs(16)
    ranges = RANGES["full"](2, 37, 45)
    with pytest.raises(ValueError, match=r"^local_attention_backward: dout has shape \(2, 37, 4\)"):
        local_attention_backward(q, k, v, *ranges, dout, dlse, dout[..., 0])
