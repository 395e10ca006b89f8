"""`shift` and `causal_conv` equal loops over the tokens of each document, in every order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_oracle as oracle
from jax.sharding import AxisType
from on_mesh import AXIS, all_fail, mesh_of, permuted_mesh
from orders import BATCHES, Order, packed

from jax_cp_dispatch import Documents, place_tokens, sequence
from jax_cp_dispatch.documents import zigzag_permutation

CASES = pytest.mark.parametrize(
    ("order", "batch", "num_ranks"),
    [
        *(("packed", "mixed", 1), ("packed", "giant", 8)),
        *(("zigzag", "mixed", 8), ("placed", "mixed", 3)),
    ],
)


def conv(x, weights, **given):
    return sequence.causal_conv(x, *weights, **given)


def random_conv(segment_ids, rng, width=4, channels=6):
    x = rng.normal(size=(*segment_ids.shape, channels)).astype(np.float32)
    weights = [rng.normal(size=s).astype(np.float32) for s in ((width, channels), channels)]
    g = rng.normal(size=x.shape).astype(np.float32)
    return x, weights, np.where(segment_ids[..., None] > 0, g, 0)


@CASES
def test_causal_conv_and_gradients(order, batch, num_ranks):
    place = "on_global_arrays" if batch == "mixed" else "on_ranks"
    segment_ids, rng = BATCHES[batch], np.random.default_rng()
    x, weights, g = random_conv(segment_ids, rng)
    x = np.where(segment_ids[..., None] > 0, x, np.nan)  # padding is not read
    run = getattr(Order(order, segment_ids, num_ranks), place)(conv)

    @jax.jit
    def both(x, weights):
        out, pull = jax.vjp(run, x, weights)
        return out, *pull(g)

    out, dx, (dweight, dbias) = both(x, weights)
    x = np.nan_to_num(x)
    expected = oracle.by_document(
        lambda x: oracle.causal_conv(x, *weights), segment_ids, x, like=x.shape
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    sums = [np.zeros(w.shape) for w in weights]
    expected = np.zeros(x.shape)
    for row, a, b in oracle.documents(segment_ids):
        of = oracle.causal_conv_gradients(x[row, a:b], weights[0].astype(float), g[row, a:b])
        expected[row, a:b], *rest = of
        sums = [s + r for s, r in zip(sums, rest, strict=True)]
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dweight, sums[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dbias, sums[1], rtol=1e-4, atol=1e-4)


@CASES
def test_shift_documents_and_its_adjoint(order, batch, num_ranks):
    """To later tokens on 8 ranks, to earlier ones on fewer; cotangents move back."""
    offset, fill = 3 if num_ranks == 8 else -17, -7
    segment_ids, rng = BATCHES[batch], np.random.default_rng()
    x = {
        "f": rng.normal(size=(*segment_ids.shape, 3)).astype(np.float32),
        "i": rng.integers(1, 99, segment_ids.shape).astype(np.int32),
    }
    x["f"][segment_ids == 0] = np.nan
    g = rng.normal(size=x["f"].shape).astype(np.float32)
    shift = Order(order, segment_ids, num_ranks).on_ranks(
        lambda x, _, **given: sequence.shift(x, offset, fill=fill, **given)
    )

    @jax.jit
    def run(x, g):
        def of_floats(f):
            moved = shift({**x, "f": f}, ())
            return moved["f"], moved

        _, pull, moved = jax.vjp(of_floats, x["f"], has_aux=True)
        return moved, pull(g)[0]

    got, pulled = run(x, g)
    for name, dtype in (("f", np.float32), ("i", np.int32)):
        expected = np.full(x[name].shape, fill, dtype)
        for row, a, b in oracle.documents(segment_ids):
            expected[row, a:b] = oracle.shift(x[name][row, a:b], offset, fill)
        np.testing.assert_array_equal(got[name], expected)
    loaded = sequence.shift_documents(x, offset, segment_ids=segment_ids, fill=fill)
    jax.tree.map(np.testing.assert_array_equal, loaded, got)
    back = oracle.by_document(lambda g: oracle.shift(g, -offset), segment_ids, g, like=g.shape)
    np.testing.assert_array_equal(pulled, back)


@pytest.mark.parametrize("is_zigzag", [False, True])
def test_documents_by_positions_and_without_ids(is_zigzag):
    """Positions that do not increase begin a document; without ids a batch row is one."""
    segment_ids = packed([[6, 4, 14]])
    positions = np.concatenate([np.arange(n) for n in (6, 4, 14)])[None].astype(np.int32)
    x = np.arange(24, dtype=np.int32)[None]
    given = {"axis_name": AXIS, "mesh": mesh_of(4), "fill": -1}
    expected = sequence.shift_documents(x, 1, segment_ids=segment_ids, fill=-1)
    of_positions = Documents(np.ones_like(segment_ids), positions)
    if is_zigzag:
        of_positions = of_positions.zigzag(4)
        got = sequence.shift(of_positions.apply(x), 1, documents=of_positions, **given)
        np.testing.assert_array_equal(of_positions.restore(got), expected)
    else:
        got = sequence.shift(x, 1, positions=positions, **given)
        np.testing.assert_array_equal(got, expected)
        got = sequence.shift(x, 1, **given)
        np.testing.assert_array_equal(got, np.arange(-1, 23)[None])


@pytest.mark.parametrize("num_tokens", [3, 9])
def test_uneven_chunks_of_zigzag_order(num_tokens):
    """An odd number of tokens per rank: the first chunk of a rank is longer by one, or alone."""
    segment_ids = packed([[num_tokens - 2, 2]])
    x = np.random.default_rng().normal(size=(1, num_tokens, 2)).astype(np.float32)
    order = Order("zigzag", segment_ids, 3)
    layer = lambda x, _, **given: sequence.shift(x, 2, **given)
    got = jax.jit(order.on_ranks(layer))(x, ())
    expected = sequence.shift_documents(x, 2, segment_ids=segment_ids)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_padding_of_tokens_that_the_ranks_do_not_divide(kind):
    segment_ids = packed([[11, 8]])
    x = np.random.default_rng().normal(size=(1, 19, 2)).astype(np.float32)
    given = {"axis_name": AXIS, "mesh": permuted_mesh((8,), (AXIS,), kind)}
    got = sequence.shift(x, -1, segment_ids=segment_ids, **given)
    expected = sequence.shift_documents(x, -1, segment_ids=segment_ids)
    np.testing.assert_array_equal(got, expected)
    got = sequence.shift(x, -1, **given)
    np.testing.assert_array_equal(got[:, :-1], x[:, 1:])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shift_of_arrays_with_sharded_heads_beside_others(kind):
    segment_ids, rng = packed([[3, 6, -2, 5]]), np.random.default_rng()
    mesh = permuted_mesh((2, 2), (AXIS, "tensor"), kind)
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


def test_bfloat16_accumulates_in_float32():
    segment_ids = packed([[40, 24]])
    x, weights, _ = random_conv(segment_ids, np.random.default_rng(), width=8)
    x = x.astype(jnp.bfloat16)
    out = Order("packed", segment_ids, 8).on_global_arrays(conv)(x, weights)
    exact = oracle.by_document(
        lambda x: oracle.causal_conv(x, *weights), segment_ids, x, like=x.shape
    )
    assert out.dtype == jnp.bfloat16
    # bfloat16 has 8 bits: half a unit of rounding, after sums that are exact beside it.
    np.testing.assert_allclose(out.astype(np.float32), exact, rtol=2**-8, atol=1e-5)


def _one_by_one(num_tokens, num_documents, num_ranks):
    """The order of documents that are zigzagged one by one, and then stored as one sequence."""
    order = zigzag_permutation(num_tokens, num_ranks).reshape(num_ranks, 1, -1)
    first = num_tokens * np.arange(num_documents)[None, :, None]
    return (order + first).reshape(-1)


@pytest.mark.parametrize(
    "taps, lengths, order, is_zigzag",
    [
        (3, [30, 20, 14], zigzag_permutation(64, 4), False),
        (1, [30, 20, 14], zigzag_permutation(64, 4), False),
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
