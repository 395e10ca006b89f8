"""Sinks, lse and the largest logits over several axes and in parts, with gradients.

Of every algorithm: test_values.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import AXIS, mesh_of, permuted_mesh
from packed_batches import pack

from jax_cp_dispatch import (
    context_parallel_attention,
    local_attention,
    merge_partials,
)
from jax_cp_dispatch.masks import SlidingWindow

CAP, SCALE = 3.0, 0.4


def draw(shape, heads=(4, 2)):
    rng = np.random.default_rng()
    B, T = shape
    N, K = heads
    q, k, v, g = (
        jnp.asarray(rng.normal(size=(B, T, *size)), jnp.float32)
        for size in ((N, 8), (K, 8), (K, 4), (N, 4))
    )
    dlse = jnp.asarray(rng.normal(size=(B, T, N)), jnp.float32)
    segment_ids, _ = pack(rng, B, T, max_length=T // 2, padding=0.2)
    sink = jnp.asarray(rng.normal(size=N), jnp.float32)  # as large as the logits
    return (q, k, v, sink), (g, dlse), segment_ids


def dense(q, k, v, sink, segment_ids):
    """`(out, lse, max_logits)` of causal documents, by `jax.numpy`."""
    T, N = q.shape[1:3]
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    new = np.diff(segment_ids, axis=1, prepend=0) != 0
    runs = np.cumsum(new, axis=1)
    seen = (runs[:, :, None] == runs[:, None]) & (segment_ids > 0)[:, :, None]
    seen = (seen & np.tril(np.ones((T, T), bool)))[:, None]
    logits = CAP * jnp.tanh(SCALE * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / CAP)
    largest = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=(0, 2, 3))
    some = jnp.broadcast_to(seen.any(-1), logits.shape[:3])
    e = jnp.where(seen, jnp.exp(logits), 0)
    total = e.sum(-1) + jnp.where(some, jnp.exp(sink)[:, None], 0)
    out = jnp.einsum("bnts,bsnh->btnh", e / jnp.where(some, total, 1)[..., None], v,
                     precision="highest")  # fmt: skip
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    return out, jnp.swapaxes(lse, 1, 2), largest


def results(attend, operands, cotangents, is_token):
    """Outputs, and gradients of a function that weighs out and lse."""
    g, dlse = cotangents

    def loss(operands):
        out, lse, largest = attend(*operands)
        lse_of_tokens = jnp.where(is_token[..., None], lse, 0)
        return (out * g).sum() + (lse_of_tokens * dlse).sum(), (out, lse, largest)

    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(operands)
    return *outputs, *gradients


NAMES = ("out", "lse", "max_logits", "dq", "dk", "dv", "dsink")


def check(got, want, tolerance=3e-6):
    for name, x, y in zip(NAMES, got, want, strict=True):
        scale = max(1, np.abs(np.where(np.isfinite(y), y, 0)).max())
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=name)


def test_heads_and_batch_over_other_axes():
    """Gradients of a sink are summed over the batch and the ranks, once."""
    operands, cotangents, segment_ids = draw((2, 8))
    mesh = permuted_mesh((2, 2, 2), ("data", AXIS, "tensor"))

    def attend(q, k, v, sink):
        return context_parallel_attention(
            q, k, v, mesh=mesh, axis_name=AXIS, algorithm="ring", segment_ids=segment_ids,
            batch_axis="data", head_axis="tensor", sink=sink, return_lse=True,
            return_max_logits=True, scale=SCALE, logit_soft_cap=CAP,
        )  # fmt: skip

    is_token = segment_ids > 0
    want = results(
        lambda q, k, v, sink: dense(q, k, v, sink, segment_ids), operands, cotangents, is_token
    )
    check(results(attend, operands, cotangents, is_token), want)


def test_local_attention_in_parts():
    """The sink joins the last merge."""
    operands, cotangents, segment_ids = draw((2, 21))
    segment_ids = np.ones_like(segment_ids)
    here = jnp.arange(21)[None] + jnp.zeros((2, 1), int)

    def whole(q, k, v, sink):
        out, lse, largest = local_attention(
            q, k, v, sink=sink, return_max_logits=True, scale=SCALE, logit_soft_cap=CAP
        )
        return out, jnp.swapaxes(lse, 1, 2), largest

    def parts(q, k, v, sink):
        options: dict[str, Any] = {"scale": SCALE, "logit_soft_cap": CAP}
        middle = jnp.full_like(here, 9)
        first = local_attention(q, k, v, jnp.zeros_like(here), jnp.minimum(here + 1, 9), **options)
        out, lse = merge_partials(
            *first, *local_attention(q, k, v, middle, here + 1, **options), sink=sink
        )
        return out, jnp.swapaxes(lse, 1, 2), jnp.zeros(4)

    is_token = segment_ids > 0
    want = results(
        lambda q, k, v, sink: dense(q, k, v, sink, segment_ids), operands, cotangents, is_token
    )
    check(results(whole, operands, cotangents, is_token), want)
    got = results(parts, operands, cotangents, is_token)
    check((*got[:2], want[2], *got[3:]), want)


def test_only_what_is_asked_for_is_returned():
    (q, k, v, sink), _, segment_ids = draw((1, 8))
    options: dict[str, Any] = {"mesh": mesh_of(2), "axis_name": AXIS, "segment_ids": segment_ids}
    attend = lambda **more: jax.eval_shape(
        lambda: context_parallel_attention(q, k, v, algorithm="ring", **options, **more)
    )
    out = attend(sink=sink)
    assert out.shape == (1, 8, 4, 4)
    out, lse = attend(return_lse=True)
    assert lse.shape == (1, 8, 4) and lse.dtype == jnp.float32
    out, largest = attend(return_max_logits=True)
    assert largest.shape == (4,)


X: Any = np.ones((1, 8, 2, 4), np.float32)


@pytest.mark.parametrize(
    "sink, error, message",
    [
        (np.ones(3, np.float32), ValueError, r"sink has shape \[3\].*\[2\]"),
        (np.ones(2, np.int32), TypeError, "sink has dtype int32"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_other_sinks_are_refused(sink, error, message):
    options = {"mesh": mesh_of(2), "axis_name": AXIS}
    with pytest.raises(error, match=message):
        context_parallel_attention(X, X, X, algorithm="ring", sink=sink, **options)
    with pytest.raises(error, match=message):
        local_attention(X, X, X, sink=sink)


@pytest.mark.parametrize("algorithm", ["ring", "halo", "ulysses", "balanced", "auto"])
@pytest.mark.parametrize("rows", [(0, 8), (2, 0)])
def test_no_rows_and_no_tokens(algorithm, rows):
    """Traced only: no algorithm plans or moves anything."""
    q = jax.ShapeDtypeStruct((*rows, 2, 4), np.float32)
    run = partial(
        context_parallel_attention,
        axis_name=AXIS,
        algorithm=algorithm,
        mask="causal" if algorithm != "halo" else SlidingWindow(2),
        mesh=mesh_of(2),
        segment_ids=np.ones(rows, np.int32),
        return_lse=True,
    )
    loss = lambda *qkv: run(*qkv)[0].sum()
    assert [x.shape for x in jax.eval_shape(run, q, q, q)] == [q.shape, q.shape[:3]]
    assert jax.eval_shape(jax.grad(loss), q, q, q).shape == q.shape
