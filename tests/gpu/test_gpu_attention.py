"""Local attention on one GPU: the kernels, cuDNN's and blockwise passes, against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, attention_gradients
from local_cases import RANGES, assert_close, inputs

from jax_cp_dispatch import local_attention, masks, merge_partials
from jax_cp_dispatch.attention import local_attention_backward

SHAPES = {"B": 2, "T": 384, "S": 384, "N": 4, "K": 2, "H": 64, "Hv": 64}
# Relative to the largest magnitude; probabilities and gradients are rounded to 8 bits.
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-5}


@jax.jit
def results(q, k, v, ranges, dout):
    start, end = ranges
    out, lse = local_attention(q, k, v, start, end)
    return out, lse, *local_attention_backward(q, k, v, start, end, out, lse, dout)


def check(actual, q, k, v, ranges, dout, tolerance, dlse: Any = 0.0):
    """Compares out, lse and gradients with NumPy."""
    start, end = ranges
    out, lse = attention(q, k, v, start, end)
    dlse = dlse + np.zeros(lse.shape)
    gradients = attention_gradients(q, k, v, start, end, dout, dlse)
    for x, y in zip(actual, (out, lse, *gradients), strict=True):
        assert_close(x, y, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranges", ["causal", "full", "packed", "window", "random", "empty"])
def test_equals_numpy(ranges, dtype, **shapes):
    q, k, v, dout, _ = inputs(0, **(SHAPES | shapes), dtype=jnp.dtype(dtype))
    operands = q, k, v, RANGES[ranges](2, q.shape[1], k.shape[1]), dout
    check(results(*operands), *operands, TOLERANCE[dtype])


@pytest.mark.parametrize("ranges", ["causal", "packed"])
@pytest.mark.parametrize(
    "shapes",
    [
        {"T": 301, "S": 333},
        *({"H": size, "Hv": size} for size in (96, 128, 256)),
        {"H": 192, "Hv": 128},
        {"H": 80, "Hv": 72},  # of no kernel: padded
    ],
    ids=str,
)
def test_shapes(shapes, ranges):
    test_equals_numpy(ranges, "bfloat16", **shapes)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("head", [64, 128])
def test_one_dense_document_by_cudnn(mask, head):
    shapes: Any = SHAPES | {"H": head, "Hv": head}
    q, k, v, dout, _ = inputs(4, **shapes, dtype=jnp.bfloat16)

    @jax.jit
    def both(q, k, v, dout):
        attend = lambda q, k, v: local_attention(q, k, v, mask=mask, out_dtype=q.dtype)[0]
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    ranges = RANGES[mask](2, 384, 384)
    out, lse = attention(q, k, v, *ranges)
    wanted = out, *attention_gradients(q, k, v, *ranges, dout, np.zeros(lse.shape))
    for x, y in zip(both(q, k, v, dout.astype(q.dtype)), wanted, strict=True):
        assert_close(x, y, TOLERANCE["bfloat16"])


def test_results_in_the_dtype_of_the_operands():
    """And unused rows are not read, although they contain NaN."""
    q, k, v, dout, dlse = inputs(5, **SHAPES, dtype=jnp.bfloat16)
    start, end = RANGES["packed"](2, 384, 384)
    start, end = start.at[:, 100:150].set(7), end.at[:, 100:150].set(7)
    end = jnp.minimum(end, 300)
    queries, keys = (start < end)[..., None, None], (jnp.arange(384) < 300)[:, None, None]
    dout = dout.astype(q.dtype)
    spoilt = [jnp.where(queries, q, jnp.nan), *(jnp.where(keys, x, jnp.nan) for x in (k, v))]

    @jax.jit
    def both(q, k, v, dout, dlse):
        attend = lambda q, k, v: local_attention(q, k, v, start, end, out_dtype=q.dtype)
        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return out, lse, *vjp((dout, dlse))

    actual = both(*spoilt, jnp.where(queries, dout, jnp.nan), dlse)
    assert actual[0].dtype == q.dtype and [x.dtype for x in actual[2:]] == [q.dtype] * 3
    check(actual, q, k, v, (start, end), dout, 2e-2, dlse)


TREE = {
    "mask": masks.Ranges(
        np.zeros((2, 384), np.int32),
        np.tile(np.arange(1, 385, dtype=np.int32), (2, 1)),
        np.zeros((2, 384), np.int32),
        np.random.default_rng(0).integers(0, 385, (2, 384), dtype=np.int32),
    )
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "options",
    [
        {"sink": jnp.linspace(-1, 2, 4), "return_max_logits": True},
        {"logit_soft_cap": 0.7, "scale": -0.3},
        TREE,
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(options, dtype):
    """As the blockwise passes have them, in float32."""
    q, k, v, dout, dlse = inputs(6, **SHAPES, dtype=jnp.dtype(dtype))
    ranges = () if "mask" in options else RANGES["packed"](2, 384, 384)

    @jax.jit
    def both(q, k, v):
        outs, vjp = jax.vjp(lambda *x: local_attention(*x, *ranges, **options), q, k, v)
        rest = (jnp.where(jnp.isinf(outs[1]), 0, dlse), *map(jnp.zeros_like, outs[2:]))
        return *outs, *vjp((dout, *rest))

    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    for x, y in zip(both(q, k, v), both(*wide), strict=True):
        assert_close(x, y, TOLERANCE[dtype])


def test_gradients_of_merged_parts():
    """The derivative receives the lse and the output of the whole softmax."""
    q, k, v, dout, _ = inputs(2, **SHAPES, dtype=jnp.bfloat16)
    part: Any = RANGES["full"](2, 384, 192)

    @jax.jit
    def in_parts(q, k, v):
        held: Any = [(k[:, :192], v[:, :192], *part), (k[:, 192:], v[:, 192:], *part)]
        first, second = (local_attention(q, *x) for x in held)
        out, lse = merge_partials(*first, *second)
        backward: Any = local_attention_backward
        grads = [backward(q, *x, out, lse, dout) for x in held]
        dq, dk, dv = zip(*grads, strict=True)
        return out, lse, sum(dq), *(jnp.concatenate(dx, axis=1) for dx in (dk, dv))

    whole = RANGES["full"](2, 384, 384)
    check(in_parts(q, k, v), q, k, v, whole, dout, TOLERANCE["bfloat16"])
