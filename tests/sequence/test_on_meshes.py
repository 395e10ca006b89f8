"""A convolution and the delta rule as trainers call them: data × context × tensor axes, donation,
nested `shard_map`; and documents that begin and end at every token.

The expected values are NumPy's.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import sequence_oracle as oracle
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of, permuted_mesh
from orders import packed

from jax_cp_dispatch import Documents, place_tokens, sequence

KEYS, HEADS, SIZE = 2, 4, 8
IDS = packed([[1, 20, -2, 9], [7, 25]])


def draw(segment_ids):
    rng = np.random.default_rng()
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    rows = segment_ids.shape
    tokens = {name: normal(*rows, n, SIZE) for name, n in (("q", KEYS), ("k", KEYS), ("v", HEADS))}
    tokens["k"] /= np.linalg.norm(tokens["k"], axis=-1, keepdims=True)
    tokens |= {"beta": rng.random((*rows, HEADS), np.float32), "log": -abs(normal(*rows, HEADS))}
    return tokens, normal(3, HEADS * SIZE)


def layer(tokens, taps, **given):
    v = sequence.causal_conv(tokens["v"].reshape(*tokens["v"].shape[:2], -1), taps, **given)
    others = (tokens[name] for name in ("log", "beta"))
    q, k, v = tokens["q"], tokens["k"], v.reshape(tokens["v"].shape)
    return sequence.gated_delta_rule(q, k, v, *others, **given)


def loss(tokens, taps, **given):
    return (layer(tokens, taps, **given) ** 2).sum()


def layer_and_gradients(tokens, taps, segment_ids, *, has_gradients=True):
    """Returns the layer's output and the gradients of its sum of squares, by NumPy."""
    names, like = ("q", "k", "v", "log", "beta"), tokens["v"].shape
    out, of_taps = np.zeros(like), np.zeros(taps.shape)
    gradients = {name: np.zeros(tokens[name].shape) for name in names}
    for row, a, b in oracle.documents(segment_ids):
        q, k, v, log, beta = (tokens[name][row, a:b].astype(float) for name in names)
        flat = v.reshape(len(v), -1)
        of = q, k, oracle.causal_conv(flat, taps).reshape(v.shape), log, beta
        scale = SIZE**-0.5
        out[row, a:b] = oracle.recurrence(*of, scale=scale)
        if not has_gradients:
            continue
        _, *found = oracle.recurrence(*of, scale=scale, g=2 * out[row, a:b])
        of_flat = found[2].reshape(flat.shape)
        dv, dtaps, _ = oracle.causal_conv_gradients(flat, taps.astype(float), of_flat)
        found[2], of_taps = dv.reshape(v.shape), of_taps + dtaps
        for name, x in zip(names, found, strict=True):
            gradients[name][row, a:b] = x
    return out, (gradients, of_taps)


@pytest.fixture(scope="module")
def known():
    """Tokens and taps, and the loss and gradients."""
    tokens, taps = draw(IDS)
    out, gradients = layer_and_gradients(tokens, taps, IDS)
    return tokens, taps, ((out**2).sum(), gradients)


def check(got, expected):
    for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(x - want).max() <= 1e-5 * np.abs(want).max()


def test_batch_and_heads_are_sharded_and_tokens_donated(known):
    mesh = permuted_mesh((2, 2, 2), ("data", AXIS, "tensor"))
    tokens, taps, expected = known
    given = {"axis_name": AXIS, "mesh": mesh, "batch_axis": "data", "head_axis": "tensor"}
    placed = place_tokens(segment_ids=IDS, world_size=2, num_groups=2)
    given["documents"] = placed.documents
    sharded = NamedSharding(mesh, P("data", AXIS, "tensor"))
    operands = jax.device_put(placed.apply(tokens), sharded), taps
    run = jax.jit(jax.value_and_grad(partial(loss, **given), argnums=(0, 1)), donate_argnums=0)
    value, (of_tokens, of_taps) = run(*operands)
    assert all(x.is_deleted() for x in operands[0].values())
    assert of_tokens["v"].sharding.is_equivalent_to(sharded, 4)
    check((value, (placed.restore(of_tokens), of_taps)), expected)


def test_inside_a_shard_map_over_another_axis(known):
    mesh = permuted_mesh((2, 2), ("data", AXIS), AxisType.Explicit)
    tokens, taps, expected = known
    given = {"axis_name": AXIS, "batch_axis": (), "head_axis": ()}

    def of_group(tokens, taps, segment_ids):
        run = lambda *x: loss(*x, segment_ids=segment_ids, **given)
        value, (of_tokens, of_taps) = jax.value_and_grad(run, argnums=(0, 1))(tokens, taps)
        return value[None], of_tokens, of_taps

    with jax.set_mesh(mesh):
        arrays = jax.device_put((tokens, IDS), NamedSharding(mesh, P("data", AXIS)))
        run = jax.shard_map(
            of_group,
            in_specs=(P("data"), P(), P("data")),
            out_specs=(P("data"), P("data"), P()),
            axis_names={"data"},
        )
        values, of_tokens, of_taps = jax.jit(run)(arrays[0], taps, arrays[1])
    check((values.sum(), (of_tokens, of_taps)), expected)


def test_an_explicit_axis_shards_the_batch_of_a_rank(known):
    mesh = permuted_mesh((2, 2), ("data", AXIS), (AxisType.Explicit, AxisType.Auto))
    tokens, taps, expected = known
    rows = P(None, AXIS)
    given: Any = {"axis_name": AXIS}

    def of_ranks(tokens, taps, segment_ids):
        run = lambda tokens, taps, ids: layer(tokens, taps, segment_ids=ids, **given)
        specs = {"in_specs": (rows, P(), rows), "out_specs": rows, "axis_names": {AXIS}}
        return (jax.shard_map(run, **specs)(tokens, taps, segment_ids) ** 2).sum()

    def in_pieces(x, documents):
        pieces = sequence.document_pieces(documents, **given)
        return sequence.shift(x, 1, documents=pieces, **given)

    with jax.set_mesh(mesh):
        arrays, ids = jax.device_put((tokens, IDS), NamedSharding(mesh, P("data", AXIS)))
        check(jax.jit(jax.value_and_grad(of_ranks, argnums=(0, 1)))(arrays, taps, ids), expected)
        documents = Documents(ids)
        specs = {"in_specs": (rows, documents.specs(AXIS)), "out_specs": rows}
        run = jax.shard_map(in_pieces, **specs, axis_names={AXIS})
        with pytest.raises(ValueError, match="pieces are those of a whole rank"):
            jax.eval_shape(run, arrays["v"], documents)


def test_one_head_of_queries_and_keys_on_several_devices():
    """As in Mamba-2 with one group."""
    tokens, _ = draw(IDS)
    q, k = (tokens[name][:, :, :1] for name in "qk")
    mesh = permuted_mesh((2, 2), (AXIS, "tensor"))
    given = {"axis_name": AXIS, "mesh": mesh, "batch_axis": (), "head_axis": "tensor"}
    run = partial(sequence.linear_attention, segment_ids=IDS, **given)
    got = jax.jit(run)(q, k, tokens["v"], tokens["log"])
    for row, a, b in oracle.documents(IDS):
        q_, k_, v, log = (x[row, a:b].astype(float) for x in (q, k, tokens["v"], tokens["log"]))
        want = oracle.recurrence(q_, k_, v, log, scale=1.0)
        np.testing.assert_allclose(got[row, a:b], want, rtol=1e-4, atol=1e-5)


def test_a_document_that_begins_and_ends_at_any_token():
    """In zigzag order."""
    num_tokens, num_ranks = 16, 4
    rows = np.arange(num_tokens)
    begin, end = np.triu_indices(num_tokens + 1, 1)
    ids = 1 + (rows >= begin[:, None]) + (rows >= end[:, None])  # before, inside and behind it
    segment_ids = ids.astype(np.int32)
    tokens, taps = draw(segment_ids)
    documents = Documents(segment_ids).zigzag(num_ranks)
    given = {"axis_name": AXIS, "mesh": mesh_of(num_ranks), "batch_axis": (), "head_axis": ()}
    run = jax.jit(partial(layer, documents=documents, **given))
    got = documents.restore(np.asarray(run(documents.apply(tokens), taps)))
    want, _ = layer_and_gradients(tokens, taps, segment_ids, has_gradients=False)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
