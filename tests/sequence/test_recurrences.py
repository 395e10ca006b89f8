"""Recurrences and all gradients equal loops over the tokens of each document, in every order."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_oracle as oracle
from jax.sharding import AxisType
from on_mesh import AXIS, mesh_of, permuted_mesh
from orders import BATCHES, Order, packed

from jax_cp_dispatch import Documents, place_tokens, sequence
from jax_cp_dispatch.sequence import chunks

NAMES = ("q", "k", "v", "log_decay", "beta")


def draw(segment_ids, *, op, per_channel, strength=(-6, 2), heads=(2, 1), size=8, columns=12):
    """Returns fresh inputs of a recurrence, with some resets, and a cotangent."""
    rng = np.random.default_rng()
    (batch, num_tokens), (n, groups) = segment_ids.shape, heads
    normal = lambda *shape: rng.normal(size=(batch, num_tokens, *shape))
    q, k = (normal(groups, size) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    shape = (batch, num_tokens, n, size)[: 3 + per_channel]
    log_decay = -np.exp(rng.uniform(strength[0], strength[1], shape))
    log_decay[rng.random(shape) < 0.02] = -np.inf
    values = [q, k, normal(n, columns), log_decay, rng.uniform(0, 2, (batch, num_tokens, n))]
    inputs = dict(zip(NAMES[: 5 if op == "gated_delta_rule" else 4], values, strict=False))
    return inputs, normal(n, columns) * (segment_ids > 0)[..., None, None]


def expected(inputs, g, segment_ids, scale):
    out = [np.zeros(x.shape) for x in (g, *inputs.values())]
    for row, a, b in oracle.documents(segment_ids):
        of = [x[row, a:b] for x in inputs.values()]
        results = oracle.recurrence(*of, scale=scale, g=g[row, a:b])
        for x, result in zip(out, results, strict=True):
            x[row, a:b] = result
    return out


def program(op, order, place="on_ranks"):
    """Returns `(inputs, g) -> (out, gradients)`."""
    layer = lambda tokens, _, **given: getattr(sequence, op)(**tokens, **given)
    run = getattr(order, place)(layer)

    @jax.jit
    def both(tokens, g):
        out, pull = jax.vjp(lambda tokens: run(tokens, ()), tokens)
        return out, pull(g)[0]

    return both


def check(both, op, inputs, g, segment_ids, *, dtype: Any = np.float32, rtol=1e-5):
    """Compares output and gradients, relative to the largest; padding of the inputs is NaN."""
    scale = inputs["q"].shape[-1] ** -0.5 if op == "gated_delta_rule" else 1.0
    live = lambda x: (segment_ids > 0).reshape(*segment_ids.shape, *[1] * (x.ndim - 2))
    given = {name: np.where(live(x), x, np.nan).astype(dtype) for name, x in inputs.items()}
    g = np.asarray(g, dtype)
    out, gradients = jax.tree.map(np.asarray, both(given, g))
    assert out.dtype == dtype
    rounded = {name: np.asarray(x, dtype).astype(np.float64) for name, x in inputs.items()}
    wanted = expected(rounded, g.astype(np.float64), segment_ids, scale)
    got = [out, *(gradients[name] for name in inputs)]
    for name, x, want in zip(("out", *inputs), got, wanted, strict=True):
        error = np.abs(x.astype(np.float64) - want).max() / np.abs(want).max()
        assert error < rtol, (name, error)
        assert not x[segment_ids == 0].any()


def test_gated_delta_rule_of_a_document_on_all_ranks():
    """Zigzag order and several documents of a rank: `test_bfloat16`; placed order: below."""
    op, segment_ids = "gated_delta_rule", BATCHES["giant"]
    inputs, g = draw(segment_ids, op=op, per_channel=False)
    check(program(op, Order("packed", segment_ids, 8)), op, inputs, g, segment_ids)


@pytest.mark.parametrize(
    ("order", "per_channel"),
    [("zigzag", True), ("placed", False)],
)
def test_linear_attention(order, per_channel):
    segment_ids = BATCHES["mixed"]
    inputs, g = draw(segment_ids, op="linear_attention", per_channel=per_channel)
    both = program("linear_attention", Order(order, segment_ids, 8))
    check(both, "linear_attention", inputs, g, segment_ids)


@pytest.mark.parametrize("per_channel", [False, True])
def test_any_decays_and_equal_keys_over_many_chunks(per_channel, monkeypatch):
    """Decays near one and near zero, too. Channels: more chunks than one slice takes."""
    op, segment_ids = "gated_delta_rule", packed([[3, 150, 1, 99, -3, 44, 90]])
    if per_channel:
        monkeypatch.setattr(chunks, "_matrices_in_slice", lambda: 12)
    both = program(op, Order("placed", segment_ids, 3), "on_global_arrays")
    of = partial(draw, segment_ids, op=op, per_channel=per_channel, heads=(4, 2))
    for strength in ((-6, 2), (-20, -9), (2, 6)):
        check(both, op, *of(strength=strength), segment_ids)
    # The inverse of a chunk stays exact if its keys are nearly erased, and nothing decays.
    inputs, g = of()
    inputs["k"][:] = inputs["k"][:, :1]
    inputs["log_decay"][:], inputs["beta"][:] = 0, 0.5
    check(both, op, inputs, g, segment_ids)


def test_bfloat16():
    segment_ids = BATCHES["mixed"]
    inputs, g = draw(segment_ids, op="gated_delta_rule", per_channel=False)
    both = program("gated_delta_rule", Order("zigzag", segment_ids, 8))
    bfloat16 = np.dtype(jnp.bfloat16)
    # The result is float32 of rounded inputs, rounded once: half a unit of 8 bits.
    check(both, "gated_delta_rule", inputs, g, segment_ids, dtype=bfloat16, rtol=2**-8)


def test_vmap_over_documents():
    """Each example has a placement of its own: one map over the rows of a batch."""
    op, segment_ids = "gated_delta_rule", packed([[3, 7, -2, 4], [16]])
    inputs, g = draw(segment_ids, op=op, per_channel=False, heads=(1, 1), size=2, columns=3)
    given = {"axis_name": AXIS, "mesh": mesh_of(2), "batch_axis": (), "head_axis": ()}
    placed = place_tokens(segment_ids=segment_ids, world_size=2, num_groups=2)
    of_batch = placed.documents
    ids, positions = of_batch.segment_ids[:, None], of_batch.positions[:, None]
    static = {"order": of_batch.order, "columns": of_batch.columns}
    documents = Documents.in_order(ids, positions, of_batch.plans, **static)

    def example(tokens, documents):
        tokens = {name: x[None] for name, x in tokens.items()}
        return sequence.gated_delta_rule(**tokens, documents=documents, **given)[0]

    @jax.jit
    def run(tokens, g, documents):
        out, pull = jax.vjp(lambda tokens: jax.vmap(example)(tokens, documents), tokens)
        return out, pull(g)[0]

    def both(tokens, g):
        return placed.restore(run(*placed.apply((tokens, g)), documents))

    check(both, op, inputs, g, segment_ids)


def test_linear_recurrence():
    segment_ids, rng = BATCHES["mixed"], np.random.default_rng()
    x, g = rng.normal(size=(2, *segment_ids.shape, 5))
    log_decay = -np.exp(rng.uniform(-5, 1, x.shape))
    log_decay[rng.random(x.shape) < 0.02] = -np.inf
    pad = segment_ids == 0
    g[pad] = 0
    layer = lambda tokens, _, **given: sequence.linear_recurrence(*tokens, **given)
    run = Order("placed", segment_ids, 8).on_ranks(layer)
    given = [np.where(pad[..., None], np.nan, x).astype(np.float32) for x in (x, log_decay)]

    @jax.jit
    def both(given):
        out, pull = jax.vjp(lambda given: run(given, ()), given)
        return out, *pull(jnp.asarray(g, jnp.float32))[0]

    got = jax.tree.map(np.asarray, both(given))
    wanted = [np.zeros(x.shape) for _ in range(3)]
    for row, a, b in oracle.documents(segment_ids):
        arrays = (np.asarray(y, np.float32)[row, a:b].astype(float) for y in (x, log_decay, g))
        for y, result in zip(wanted, oracle.linear_recurrence(*arrays), strict=True):
            y[row, a:b] = result
    for x, want in zip(got, wanted, strict=True):
        assert np.abs(x - want).max() < 1e-5 * np.abs(want).max()


class RunningSum:
    """A user's kernel: the sum of a document's tokens so far, by a plain scan."""

    def summary(self, inputs):
        return inputs.sum((0, 1))

    def apply(self, map_, state):
        return map_ if state is None else state + map_

    def run(self, inputs, states, piece_ids):
        most = states.shape[0] - 1

        def row(x, ids):
            def step(carry, x):
                state, last = carry
                x, piece = x
                state = jnp.where(piece != last, states[jnp.minimum(piece, most)], state) + x
                return (state, piece), state

            none = x[0] * 0, ids[0] * 0
            return jax.lax.scan(step, none, (x, ids))[1]

        return jax.vmap(row)(inputs, piece_ids)


@pytest.mark.parametrize("order, num_ranks", [("placed", 8), ("zigzag", 1)])
def test_kernel_of_a_user(order, num_ranks):
    segment_ids, rng = BATCHES["mixed"], np.random.default_rng()
    x = rng.integers(-9, 9, (*segment_ids.shape, 3)).astype(np.float32)
    x[segment_ids == 0] = np.nan
    local = RunningSum()
    layer = lambda x, _, **given: sequence.recurrence(x, local, **given)
    got = jax.jit(Order(order, segment_ids, num_ranks).on_ranks(layer))(x, ())
    sums = oracle.by_document(lambda x: np.cumsum(x, axis=0), segment_ids, x, like=x.shape)
    np.testing.assert_array_equal(got, sums)


def test_global_arrays_without_features():
    """[B, T] in and out, of a kernel of this package and of a user."""
    segment_ids, rng = packed([[3, 6, -2, 5], [1, 15]]), np.random.default_rng()
    mesh = permuted_mesh((2, 2), ("data", AXIS), AxisType.Explicit)
    x, log_decay = rng.normal(size=segment_ids.shape), -rng.random(segment_ids.shape)
    given = {"axis_name": AXIS, "mesh": mesh, "segment_ids": segment_ids, "batch_axis": "data"}

    @jax.jit
    def run(x, log_decay):
        summed = sequence.recurrence(x, RunningSum(), **given)
        return sequence.linear_recurrence(x, log_decay, **given), summed

    with jax.set_mesh(mesh):
        got = run(*(x.astype(np.float32) for x in (x, log_decay)))
    wanted = [np.zeros(x.shape) for _ in range(2)]
    for row, a, b in oracle.documents(segment_ids):
        of = (y[row, a:b] for y in (x, log_decay, x))
        wanted[0][row, a:b] = oracle.linear_recurrence(*of)[0]
        wanted[1][row, a:b] = np.cumsum(x[row, a:b])
    for x, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)


def test_document_pieces_found_once_serve_checkpoint_and_scan_over_layers():
    """Layers in `lax.scan`, each under `jax.checkpoint`, with the pieces found once."""
    segment_ids, rng = BATCHES["mixed"], np.random.default_rng()
    v = rng.normal(size=(*segment_ids.shape, 4)).astype(np.float32)
    log_decay = -rng.random(v.shape, np.float32)

    def layers(tokens, _, *, documents, axis_name):
        pieces = sequence.document_pieces(documents, axis_name=axis_name)

        @jax.checkpoint
        def layer(v, _):
            given = {"axis_name": axis_name, "documents": pieces}
            return sequence.linear_recurrence(v, tokens[1], **given) + v, None

        return jax.lax.scan(layer, tokens[0], None, length=2)[0]

    run = Order("zigzag", segment_ids, 8).on_ranks(layers)
    got = jax.jit(jax.grad(lambda tokens: (run(tokens, ()) ** 2).sum()))((v, log_decay))
    wanted = np.zeros((2, *v.shape))
    of = lambda v, log, g: np.array(oracle.linear_recurrence(v, log, g))
    for row, a, b in oracle.documents(segment_ids):
        first, log = v[row, a:b].astype(float), log_decay[row, a:b].astype(float)
        second = of(first, log, 0 * first)[0] + first
        g = 2 * (of(second, log, 0 * first)[0] + second)
        _, dv, dlog = of(second, log, g)
        g = dv + g
        _, dv, dlog_of_first = of(first, log, g)
        wanted[:, row, a:b] = dv + g, dlog + dlog_of_first
    for x, want in zip(got, wanted, strict=True):
        assert np.abs(x - want)[segment_ids > 0].max() < 1e-5 * np.abs(want).max()
