"""Layers in zigzag and in placed order, over batches and heads; documents in another order.

The contract (`tests/contract`) has each layer in packed order, and two in placed order.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_oracle as oracle
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, all_fail, mesh_of, permuted_mesh
from operations import CASES, DELTA, _convolved, layer
from orders import BATCHES, Order, packed

from jax_cp_dispatch import Documents, place_tokens, sequence
from jax_cp_dispatch.documents import zigzag_permutation

LAYERS = {case.name: case for case in CASES if case.name in sequence.__all__}
# Relative to the largest element. bfloat16: float32 sums of rounded inputs, rounded once.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-8}


def linear_attention(log_decay=(2,)):
    """Two heads of values, one of queries and keys; a decay of each head, or channel."""
    shapes = {"q": (1, 4), "k": (1, 4), "v": (2, 3), "log_decay": log_decay}
    recurrence = partial(oracle.recurrence, scale=1.0)
    return layer(sequence.linear_attention, shapes, recurrence, like="v")


def call_all(cases, tokens, weights, **given):
    """Returns the output of each layer of its tokens and weights."""
    arrays = {name: {**tokens[name], **weights[name], "segment_ids": None} for name in cases}
    return {name: case.call(arrays[name], **given)["out"] for name, case in cases.items()}


def with_gradients(run) -> Any:
    """`(tokens, weights, cotangents) -> (out, gradients of tokens, and of weights)`"""

    @jax.jit
    def both(tokens, weights, cotangents):
        out, pull = jax.vjp(run, tokens, weights)
        return out, *pull(cotangents)

    return both


def check_layers(both, cases, segment_ids, *, dtypes=None, change=None):
    """Compares a program `with_gradients` of all cases; padding of the tokens is NaN.

    `change` alters the arrays that were drawn.
    """
    (batch, num_tokens), dtypes, pad = segment_ids.shape, dtypes or {}, segment_ids == 0
    tokens, weights, cotangents, expected = {}, {}, {}, {}
    for name, case in cases.items():
        dtype = dtypes.get(name, "float32")
        arrays = case.arrays(dtype, ranks=1, tokens=num_tokens, batch=batch)
        arrays = (change or dict)(arrays | {"segment_ids": segment_ids})
        out, expected[name], g = case.expected(arrays)
        expected[name]["out"], cotangents[name] = out["out"], g["out"]
        for x in arrays.values():
            if x.shape[:2] == segment_ids.shape and x is not segment_ids:
                x[pad] = np.nan
        del arrays["segment_ids"]
        weights[name] = {x: arrays.pop(x) for x in ("weight", "bias") if x in arrays}
        tokens[name] = arrays

    out, of_tokens, of_weights = both(tokens, weights, cotangents)
    for name in cases:
        got = {**of_tokens[name], **of_weights[name], "out": out[name]}
        dtype = dtypes.get(name, "float32")
        if (name, dtype) == ("causal_conv", "bfloat16"):  # sums in float32, rounded once
            of_each = np.asarray(got["out"], np.float32)
            np.testing.assert_allclose(of_each, expected[name]["out"], rtol=2**-8, atol=1e-5)
        assert got.keys() == expected[name].keys()
        for array, want in expected[name].items():
            assert got[array].dtype == dtype
            error = np.abs(np.asarray(got[array], np.float64) - want).max()
            # Cotangents of rows before a rank's own are rounded when they return, too.
            roundings = 2 if (name, array) == ("causal_conv", "x") else 1
            assert error <= roundings * TOLERANCE[dtype] * np.abs(want).max(), (name, array, error)
            if want.shape[:2] == segment_ids.shape:
                assert not np.asarray(got[array])[pad].any(), (name, array)


def test_a_document_that_begins_and_ends_at_any_token():
    """In zigzag order. Pieces found once serve two layers, one in a loop and computed again."""
    rows, num_ranks = np.arange(16), 4
    begin, end = np.triu_indices(len(rows) + 1, 1)
    ids = 1 + (rows >= begin[:, None]) + (rows >= end[:, None])  # before, inside and behind it
    segment_ids = np.where((ids == 3) & (end % 2 == 0)[:, None], 0, ids).astype(np.int32)
    looped = {"causal_conv": LAYERS["causal_conv"]}
    shapes: Any = {"x": (), "log_decay": ()}  # without features
    other = {"recurrence": layer(sequence.linear_recurrence, shapes, oracle.linear_recurrence)}

    def once(tokens, weights, *, documents, axis_name):
        pieces = sequence.document_pieces(documents, axis_name=axis_name)
        given = {"documents": pieces, "axis_name": axis_name}
        step = jax.checkpoint(lambda arrays: call_all(looped, *arrays, **given))
        operands = jax.tree.map(lambda x: x[None], (tokens, weights))
        _, out = jax.lax.scan(lambda _, x: (None, step(x)), None, operands)
        out = jax.tree.map(lambda x: x[0], out)
        return out | call_all(other, tokens, weights, **given)

    both = with_gradients(Order("zigzag", segment_ids, num_ranks).on_ranks(once))
    check_layers(both, looped | other, segment_ids, dtypes={"causal_conv": "bfloat16"})


@pytest.mark.parametrize(
    "order, dtype, num_heads, of_head",
    [("zigzag", "bfloat16", 2, ()), ("placed", "float32", 14, (4,))],
)
def test_any_decays_and_equal_keys_over_many_chunks(order, dtype, num_heads, of_head):
    """Decays near one and near zero, too. Many heads: more chunks than one slice takes."""
    segment_ids = packed([[3, 150, 1, 99, -3, 44, 90]])
    shapes = DELTA | {"v": (num_heads, 3), "beta": (num_heads,)}
    shapes["log_decay"] = (num_heads, *of_head)
    recurrence = partial(oracle.recurrence, scale=0.5)
    cases = {"delta": layer(sequence.gated_delta_rule, shapes, recurrence, like="v")}
    run = Order(order, segment_ids, 3).on_global_arrays(partial(call_all, cases))
    both, rng = with_gradients(run), np.random.default_rng(0)

    def decays(least, most, arrays):
        shape = arrays["log_decay"].shape
        log_decay = -np.exp(rng.uniform(least, most, shape))
        log_decay[rng.random(shape) < 0.02] = -np.inf
        return arrays | {"log_decay": log_decay.astype(dtype)}

    def nearly_erased(arrays):
        """The inverse of a chunk stays exact if keys are equal and nothing decays."""
        k = np.array(np.broadcast_to(arrays["k"][:, :1], arrays["k"].shape))
        half, none = np.full_like(arrays["beta"], 0.5), np.zeros_like(arrays["log_decay"])
        return arrays | {"k": k, "beta": half, "log_decay": none}

    ranges = (-6, 2), (-20, -9), (2, 6)
    for change in (*(partial(decays, *ends) for ends in ranges), nearly_erased):
        check_layers(both, cases, segment_ids, dtypes={"delta": dtype}, change=change)


def test_batches_and_heads_are_sharded():
    """As in Mamba-2 with one group: one head of queries and keys serves two devices.

    Groups of rows have placements of their own.
    """
    segment_ids = packed([[1, 20, -2, 9], [7, 25]])
    conv = layer(
        sequence.causal_conv, {"x": (4,)}, _convolved, weights={"weight": (4, 4), "bias": (4,)}
    )
    cases = {"conv": conv, "attention": linear_attention()}
    mesh = permuted_mesh((2, 2, 2), ("data", AXIS, "tensor"))
    placement = place_tokens(segment_ids=segment_ids, world_size=2, num_groups=2)
    given = {"axis_name": AXIS, "mesh": mesh, "batch_axis": "data", "head_axis": "tensor"}
    rows = NamedSharding(mesh, P("data", AXIS))

    def run(tokens, weights):
        tokens = jax.lax.with_sharding_constraint(placement.apply(tokens), rows)
        out = call_all(cases, tokens, weights, documents=placement.documents, **given)
        return placement.restore(out)

    check_layers(with_gradients(run), cases, segment_ids)


# ---- Shifts, whose values are exact.


MIXED = BATCHES["mixed"]


@pytest.mark.parametrize(
    "order, num_ranks, offset, segment_ids",
    [
        ("placed", 3, -17, MIXED),
        # An odd number of tokens per rank: its first chunk is longer by one, or alone.
        ("zigzag", 8, 3, MIXED[:, :88]),
        ("zigzag", 3, 2, packed([[1, 2]])),
    ],
)
def test_shifts_of_integers_and_floats(order, num_ranks, offset, segment_ids):
    """Together, by more than a rank's tokens, with a value for what is missing."""
    rng, fill = np.random.default_rng(), -7
    x = {
        "f": rng.normal(size=(*segment_ids.shape, 3)).astype(np.float32),
        "i": rng.integers(1, 99, segment_ids.shape).astype(np.int32),
    }
    x["f"][segment_ids == 0] = np.nan
    layer = lambda x, _, **given: sequence.shift(x, offset, fill=fill, **given)
    got = jax.jit(Order(order, segment_ids, num_ranks).on_ranks(layer))(x, ())
    for name, array in x.items():
        expected = np.full(array.shape, fill, array.dtype)
        for row, a, b in oracle.documents(segment_ids):
            expected[row, a:b] = oracle.shift(array[row, a:b], offset, fill)
        np.testing.assert_array_equal(got[name], expected)
    loaded = sequence.shift_documents(x, offset, segment_ids=segment_ids, fill=fill)
    jax.tree.map(np.testing.assert_array_equal, loaded, got)


def test_documents_by_positions():
    """Positions that do not increase begin a document, with ids and without."""
    segment_ids = packed([[6, 4, 14]])
    positions = np.concatenate([np.arange(n) for n in (6, 4, 14)])[None].astype(np.int32)
    x = np.arange(24, dtype=np.int32)[None]
    zigzag = Documents(np.ones_like(segment_ids), positions).zigzag(4)
    shift = partial(sequence.shift, offset=1, axis_name=AXIS, mesh=mesh_of(4), fill=-1)

    @jax.jit
    def both(x):
        of_zigzag = shift(zigzag.apply(x), documents=zigzag)
        return zigzag.restore(of_zigzag), shift(x, positions=positions)

    expected = sequence.shift_documents(x, 1, segment_ids=segment_ids, fill=-1)
    for got in both(x):
        np.testing.assert_array_equal(got, expected)


def test_tokens_that_the_ranks_do_not_divide():
    """With ids, and without, where a batch row is one document."""
    segment_ids = packed([[11, 8]])
    x = np.random.default_rng().normal(size=(1, 19, 2)).astype(np.float32)
    given = {"axis_name": AXIS, "mesh": permuted_mesh((8,), (AXIS,), AxisType.Explicit)}
    got = sequence.shift(x, -1, segment_ids=segment_ids, **given)
    expected = sequence.shift_documents(x, -1, segment_ids=segment_ids)
    np.testing.assert_array_equal(got, expected)
    got = sequence.shift(x, -1, **given)
    np.testing.assert_array_equal(got[:, :-1], x[:, 1:])


def test_shift_of_arrays_with_sharded_heads_beside_others():
    segment_ids, rng = packed([[3, 6, -2, 5]]), np.random.default_rng()
    mesh = permuted_mesh((2, 2), (AXIS, "tensor"), AxisType.Explicit)
    given = {"axis_name": AXIS, "mesh": mesh, "batch_axis": (), "head_axis": "tensor"}
    shapes = [segment_ids.shape, (*segment_ids.shape, 2)]
    x, g = ([rng.integers(1, 9, s).astype(np.float32) for s in shapes] for _ in range(2))

    @jax.jit
    def both(x, g):
        out, pull = jax.vjp(lambda x: sequence.shift(x, 1, segment_ids=segment_ids, **given), x)
        return out, *pull(g)

    with jax.set_mesh(mesh):
        out, dx = both(x, g)
    live = lambda x: np.where((segment_ids > 0).reshape(*shapes[0], *[1] * (x.ndim - 2)), x, 0)
    back = lambda x: sequence.shift_documents(live(x), -1, segment_ids=segment_ids)
    expected = sequence.shift_documents(x, 1, segment_ids=segment_ids), list(map(back, g))
    jax.tree.map(np.testing.assert_array_equal, (out, dx), expected)


def test_pieces_of_no_tokens():
    def local(x, documents):
        pieces = sequence.document_pieces(documents, axis_name=AXIS)
        return sequence.shift(x, 1, documents=pieces, axis_name=AXIS)

    x, documents = jnp.ones((1, 0, 3)), Documents(np.ones((1, 0), np.int32))
    rows = P(None, AXIS)
    specs = rows, documents.specs(AXIS)
    run = jax.shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=rows)
    assert jax.eval_shape(run, x, documents).shape == x.shape


# ---- Tokens in another order than said.


def _one_by_one(num_tokens, num_documents, num_ranks):
    """The order of documents that are zigzagged one by one, and then stored as one sequence."""
    order = zigzag_permutation(num_tokens, num_ranks).reshape(num_ranks, 1, -1)
    first = num_tokens * np.arange(num_documents)[None, :, None]
    return (order + first).reshape(-1)


@pytest.mark.parametrize(
    "taps, lengths, order, is_zigzag",
    [
        (3, [30, 20, 14], zigzag_permutation(64, 4), False),
        (1, [30, 20, 14], zigzag_permutation(64, 4), False),  # nothing moves
        (3, [32, 32], _one_by_one(32, 2, 4), True),
    ],
)
def test_tokens_in_another_order_than_said_fail_on_all_ranks(taps, lengths, order, is_zigzag):
    """Traced ids show it, or positions: ids alone take equal halves for two documents in zigzag."""
    ids = np.repeat([np.arange(1, 1 + len(lengths))], lengths, axis=1)[:, order]
    positions = np.concatenate([np.arange(n) for n in lengths])[None, order]
    weight = np.ones((taps, 2), np.float32)

    @jax.jit
    def run(x, ids, positions):
        given: dict[str, Any] = {"segment_ids": ids}
        if is_zigzag:  # said of columns that are in that order already
            packed_again = np.argsort(zigzag_permutation(64, 4))
            of_tokens = Documents(ids[:, packed_again], positions[:, packed_again])
            given = {"documents": of_tokens.zigzag(4)}
        return sequence.causal_conv(x, weight, axis_name=AXIS, mesh=mesh_of(4), **given)

    x = np.ones((1, 64, 2), np.float32)
    all_fail(run(x, ids, positions), "causal_conv .* a document has several pieces in its")


def test_ids_that_do_not_ascend_are_compared_as_a_whole():
    """Random ids in order are accepted; by XLA's collectives, an id that returns gives NaN."""
    lengths, x = [30, 20, 14], np.arange(128.0, dtype=np.float32).reshape(1, 64, 2)
    run = jax.jit(
        lambda ids: sequence.shift(
            x, 1, axis_name=AXIS, mesh=mesh_of(4), segment_ids=ids, implementation="xla"
        )
    )
    out = run(np.repeat([[7, 2, 9]], lengths, axis=1))
    np.testing.assert_array_equal(out, run(np.repeat([[1, 2, 3]], lengths, axis=1)))
    assert np.isnan(run(np.repeat([[7, 2, 7]], lengths, axis=1))).all()


@pytest.mark.parametrize("num_ranks, offset", [(1, 1), (2, 0)])
def test_a_plan_of_another_batch_fails_where_nothing_moves(num_ranks, offset):
    placement = place_tokens([[20, 12]], world_size=num_ranks)
    ids = np.repeat([[1, 2]], [20, 12], axis=1)
    x = np.ones((1, 32, 2), np.float32)
    given = {"axis_name": AXIS, "mesh": mesh_of(num_ranks)}
    run = jax.jit(lambda x, documents: sequence.shift(x, offset, documents=documents, **given))
    documents = placement.documents
    assert np.isfinite(run(x, documents)).all()
    others = Documents.in_order(
        np.ones_like(ids), None, documents.plans, order=documents.order, columns=32
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="made for another batch"):
        jax.block_until_ready(run(x, others))
