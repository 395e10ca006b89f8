"""The kernels of local attention for TPUs in Pallas's interpreter, against NumPy.

The interpreter has a TPU's memories and copies: it finds races, reads out of bounds, and fills
memory with NaN before it is written.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_masks import random_mask
from attention_oracle import masked_attention, masked_attention_gradients
from jax.experimental.pallas import tpu as pltpu
from local_cases import assert_close
from mask_oracle import batch_ranges, batch_visible, range_pairs
from packed_batches import pack

from jax_cp_dispatch import local_attention
from jax_cp_dispatch.attention.local import local_attention as local, tpu, uncut
from jax_cp_dispatch.attention.local.backward import (
    SoftmaxGradients,
    begin_dq,
    cut_cotangents,
    finish_dq,
)
from jax_cp_dispatch.attention.local.blocks import RowRanges, cut_operands
from jax_cp_dispatch.attention.local.local_options import LocalOptions
from jax_cp_dispatch.attention.local.query_ranges import KeyQueries
from jax_cp_dispatch.attention.local.rows import from_rows
from jax_cp_dispatch.documents.ranges import PackedMask, attended_tokens
from jax_cp_dispatch.masks import Causal, MaskRanges

T, CUT = 300, 140  # tokens; the keys of the first of two parts
SIZES = 2, 1, 128, 128  # heads N, K and features H, Hv; `sweep_attention.py` draws others


@pytest.fixture(autouse=True)
def interpreted():
    """Interprets kernels, and fails if two accesses race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place of `races`

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found


def draw(seed, sizes, dtype=jnp.float32):
    """q, k, v, dout and dlse of one batch row: heads N, K and features H, Hv."""
    rng = np.random.default_rng(seed)
    N, K, H, Hv = sizes
    shapes = (1, T, N, H), (1, T, K, H), (1, T, K, Hv)
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return (
        q,
        k,
        v,
        *(jnp.asarray(rng.normal(size=s), "float32") for s in ((1, T, N, Hv), (1, N, T))),
    )


@jax.jit
def in_two_parts(q, k, v, dout, dlse, ranges: RowRanges):
    """out, lse, dq, dk and dv, as a ring has them: keys come in two parts."""
    options = LocalOptions("test").resolved(q, k, v)
    parts, softmax, K = [], None, k.shape[2]
    for part in (slice(None, CUT), slice(CUT, None)):
        start, end = (x - (part.start or 0) for x in ranges[:2])
        queries = ranges.queries
        if queries is not None:
            queries = queries._replace(start=queries.start[:, part], end=queries.end[:, part])
        operands = k[:, part], v[:, part], RowRanges(start, end, queries)
        parts.append((cut_operands(options, q, *operands), operands))
        of = parts[-1][0]
        softmax = tpu.attend(options, of.q, of.ranges, (of.k, of.v), softmax)
    out, lse = softmax.result(q.shape, K)
    dq, dkv = begin_dq(of.q), []
    whole = SoftmaxGradients(out, lse, dout, jnp.where(jnp.isinf(lse), jnp.nan, dlse))
    for of, (k_part, v_part, _) in parts:
        cotangents = cut_cotangents(options, of.used, whole, K)
        dq, *grads = tpu.gradients(options, of.q, cotangents, of.ranges, (of.k, of.v), dq)
        shapes = k_part.shape, v_part.shape
        dkv.append([from_rows(x, shape, K) for x, shape in zip(grads, shapes, strict=True)])
    dk, dv = (jnp.concatenate(x, 1) for x in zip(*dkv, strict=True))
    return out, lse, finish_dq(dq, q.shape, K), dk, dv


def expected(operands, pairs, **options):
    q, k, v, dout, dlse = operands
    out, lse = masked_attention(q, k, v, pairs, **options)
    dlse = np.where(np.isinf(lse), 0, dlse)
    return out, lse, *masked_attention_gradients(q, k, v, pairs, dout, dlse, **options)


def check(actual, wanted, tolerance):
    for x, y in zip(actual, wanted, strict=True):
        assert_close(x, y, tolerance)


@pytest.mark.parametrize("name", ["causal", "tree", "ranges"])  # ranges of keys; of queries too
def test_masks(name):
    """Of documents and padding. Keys and queries that no range holds are NaN."""
    rng = np.random.default_rng()
    ids, _ = pack(rng, 1, T, max_length=200, padding=0.3)
    if name == "causal":
        # A document that starts inside a block of keys, and that a whole block of queries sees.
        start, end = int(rng.integers(1, 128)), int(rng.integers(256, T - 9))
        ids = np.repeat([[1, 2, 3, 0]], [start, end - start, 5, T - end - 5], 1).astype(ids.dtype)
        ranges = MaskRanges(*batch_ranges(Causal(), ids))
        pairs = range_pairs(ranges.k_start, ranges.k_end)
    else:
        constructor, arrays, in_row = random_mask(name, rng, ids)
        pairs = batch_visible(ids, in_row)
        masked = lambda ids, *arrays: PackedMask(constructor(*arrays), ids, None)
        ranges = jax.jit(lambda *x: attended_tokens(masked(*x), ids.shape))(ids, *arrays)
    of_keys = ranges.q_start, ranges.q_end
    if of_keys[0] is None:  # all masks of the same sizes are one program
        of_keys = np.zeros_like(ids), np.full_like(ids, T)
    index, *others = (
        jnp.asarray(x, jnp.int32) for x in (np.arange(T)[None], *of_keys, *ranges[:2])
    )
    queries, rows = KeyQueries(index, *others[:2]), others[2:]
    operands = draw(rng.integers(2**32), SIZES)
    q, k, v, *cotangents = operands
    start, end = map(np.asarray, rows)
    hidden = start >= end, ~range_pairs(start, end).any(1)
    q, k, v = (
        jnp.where(hide[..., None, None], jnp.nan, x)
        for x, hide in zip((q, k, v), (hidden[0], hidden[1], hidden[1]), strict=True)
    )
    actual = in_two_parts(q, k, v, *cotangents, RowRanges(rows[0], rows[1], queries))
    check(actual, expected(operands, pairs), 1e-5)


def test_options(monkeypatch):
    """4 query heads of 192 and 128 numbers, soft cap, sink, largest logits; JAX's derivatives."""
    sizes, dtype, tolerance = (4, 1, 192, 128), jnp.bfloat16, 1e-2
    monkeypatch.setattr(uncut, "attend", uncut.attend_cut)
    monkeypatch.setattr(uncut, "gradients", uncut.gradients_cut)
    monkeypatch.setattr(uncut, "attend_blocks", tpu.attend)
    monkeypatch.setattr(uncut, "block_gradients", tpu.gradients)
    for name in ("_forward", "_backward"):  # cached traces would bypass the patch
        monkeypatch.setattr(local, name, getattr(local, name).__wrapped__)
    rng = np.random.default_rng()
    both = [draw(rng.integers(2**32), sizes, dtype) for _ in range(2)]
    operands = tuple(jnp.concatenate(x) for x in zip(*both, strict=True))
    q, k, *_ = operands
    start, end = jnp.asarray(rng.integers(-5, T + 6, (2, 2, T)), jnp.int32)
    options = {"scale": -0.1, "logit_soft_cap": 0.7}
    sink = jnp.asarray(rng.normal(size=sizes[0]), "float32")

    @jax.jit
    def run(q, k, v, dout, dlse):
        attend = functools.partial(local_attention, sink=sink, return_max_logits=True, **options)
        results, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, start, end), q, k, v)
        out, lse, largest = results
        dlse = jnp.where(jnp.isinf(lse), 0, dlse)
        return largest, out, lse, *pull_back((dout, dlse, jnp.zeros_like(largest)))

    largest, *actual = run(*operands)
    pairs = range_pairs(np.asarray(start), np.asarray(end))
    # A sink is one more key, whose value is 0 and whose logit does not depend on the query.
    check(actual, with_sink(operands, pairs, sink, **options), tolerance)
    wide = [np.asarray(x, np.float64) for x in (q, np.repeat(k, sizes[0] // sizes[1], 2))]
    logits = 0.7 * np.tanh(-0.1 * np.einsum("btnh,bsnh->bnts", *wide) / 0.7)
    assert_close(largest, np.where(pairs[:, None], logits, -np.inf).max((0, 2, 3)), tolerance)


def with_sink(operands, pairs, sink, **options):
    q, k, v, dout, dlse = operands
    out, lse = masked_attention(q, k, v, pairs, **options)
    sink = np.asarray(sink, np.float64)[:, None]
    whole = np.where(np.isinf(lse), lse, np.logaddexp(lse, sink))
    sees = np.isfinite(lse)
    share = sees * np.exp(np.subtract(lse, whole, out=np.zeros_like(whole), where=sees))
    # Of out' = share out and lse' = lse - log(share), where d share = share (1 - share) d lse.
    by_row = np.swapaxes(share, 1, 2)[..., None]
    of_share = np.swapaxes((np.asarray(dout, np.float64) * out).sum(-1), 1, 2)
    dlse = share * (np.where(np.isinf(lse), 0, dlse) + (1 - share) * of_share)
    grads = masked_attention_gradients(q, k, v, pairs, by_row * dout, dlse, **options)
    return by_row * out, whole, *grads
