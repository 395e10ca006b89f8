"""A document in several calls equals one call: `initial_state` and `return_state` of each layer."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_oracle as oracle
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of, permuted_mesh
from operations import RunningSum
from orders import packed

from jax_cp_dispatch import Documents, sequence

# Three calls of four rows. Row 0: two documents over several calls. Row 1: padding behind a
# document that continues, a call without tokens, padding before it. Row 2: a document that begins a
# call, and one that is shorter than the taps of a convolution. Row 3: one document.
CALLS = np.stack(
    [
        packed([[24], [3, 13, -8], [24], [24]]),
        packed([[10, 14], [-24], [22, 2], [24]]),
        packed([[24], [-2, 5, 1, 10, -6], [1, 23], [7, -17]]),
    ]
)
CONTINUES = np.array([[False] * 4, [True, True, False, True], [True] * 4])


def documents(calls=CALLS):
    """Yields the tokens of each document over all calls: (calls, row, columns)."""
    for row in range(calls.shape[1]):
        found: list[list[tuple[int, int]]] = []
        for call, ids in enumerate(calls[:, row]):
            last = None if CONTINUES[call, row] else 0
            for column in np.flatnonzero(ids):
                if last is not None and ids[column] != last:
                    found.append([])
                last = ids[column]
                found[-1].append((call, int(column)))
        for places in found:
            numbers, columns = np.array(places).T
            yield numbers, row, columns


def expected(function, arrays, like, calls=CALLS):
    """Applies `function` to each document; returns arrays like `like`, zero for padding."""
    out = [np.zeros(x.shape) for x in like]
    for where in documents(calls):
        results = function(*(np.asarray(x, np.float64)[where] for x in arrays))
        for x, result in zip(out, results, strict=True):
            x[where] = result
    return out


def program(layer, state, *, num_ranks=None, mesh: Any = None, calls=CALLS, **given):
    """Returns `tokens [calls, B, T, ...] -> (outputs, last state)`, by a scan over the calls.

    On the ranks, with the pieces of documents found once, or with a mesh on global arrays.
    """

    def on_rank(tokens, given, state):
        pieces = sequence.document_pieces(given, axis_name=AXIS)
        return layer(tokens, axis_name=AXIS, documents=pieces, initial_state=state, **carried)

    carried = {"return_state": True}
    if mesh is None:
        specs = Documents(calls[0]).specs(AXIS)
        on_ranks: Any = jax.shard_map(
            on_rank,
            mesh=mesh_of(num_ranks),
            in_specs=(P(None, AXIS), specs, P()),
            out_specs=(P(None, AXIS), P()),
        )
        one_call = lambda tokens, ids, state: on_ranks(tokens, Documents(ids), state)
    else:
        options = {"axis_name": AXIS, "mesh": mesh, **carried, **given}
        one_call = lambda tokens, ids, state: layer(
            tokens, segment_ids=ids, initial_state=state, **options
        )

    def step(last, x):
        tokens, ids, continues = x

        def entering(last, new):
            return jnp.where(continues.reshape(-1, *[1] * (last.ndim - 1)), last, new)

        out, last = one_call(tokens, ids, jax.tree.map(entering, last, state))
        return last, out

    def run(tokens):
        last, out = jax.lax.scan(step, state, (tokens, calls, CONTINUES))
        return out, last

    return run


def out_and_gradients(run, tokens, g):
    @jax.jit
    def both(tokens, g):
        out, pull, last = jax.vjp(run, tokens, has_aux=True)
        return out, pull(g)[0], last

    tokens, g = jax.tree.map(lambda x: np.asarray(x, np.float32), (tokens, g))
    return jax.tree.map(np.asarray, both(tokens, g))


def live(x, calls=CALLS):
    return (calls > 0).reshape(*calls.shape, *[1] * (x.ndim - 3))


def assert_near(got, want, tolerance=1e-5):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert np.abs(x - y).max() <= tolerance * np.abs(y).max()


@pytest.mark.parametrize("op, num_ranks", [("gated_delta_rule", 4), ("linear_attention", 1)])
def test_states_of_heads(op, num_ranks):
    """Documents begin and end in chunks of 32 tokens that are neither the first nor the last."""
    calls, rng = np.repeat(CALLS, 8, axis=2), np.random.default_rng()
    n, size, columns = 2, 4, 3
    normal = lambda *shape: rng.normal(size=(*calls.shape, *shape))
    tokens = {"q": normal(1, size), "k": normal(1, size), "v": normal(n, columns)}
    tokens["k"] /= np.linalg.norm(tokens["k"], axis=-1, keepdims=True)
    tokens["log_decay"] = -rng.uniform(size=(*calls.shape, n))
    if op == "gated_delta_rule":
        tokens["beta"] = rng.uniform(0, 2, (*calls.shape, n))
    g = normal(n, columns)
    g *= live(g, calls)
    layer = lambda tokens, **given: getattr(sequence, op)(**tokens, scale=0.5, **given)
    place = {"num_ranks": num_ranks} if num_ranks > 1 else {"mesh": mesh_of(1)}
    run = program(layer, jnp.zeros((4, n, size, columns)), calls=calls, **place)
    padded = {name: np.where(live(x, calls), x, np.nan) for name, x in tokens.items()}
    out, gradients, last = out_and_gradients(run, padded, g)

    def of_document(*arrays):
        return oracle.recurrence(*arrays[:-1], scale=0.5, g=arrays[-1])

    want = expected(of_document, (*tokens.values(), g), (g, *tokens.values()), calls)
    assert_near([out, *(gradients[name] for name in tokens)], want)
    assert last.shape == (4, n, size, columns)


def test_states_of_elementwise_recurrences_on_a_mesh():
    """Of 2 data x 2 sequence x 2 tensor devices, which shard the state, too."""
    rng = np.random.default_rng()
    x, log_decay = rng.normal(size=(2, *CALLS.shape, 6)).astype(np.float32)
    log_decay = -abs(log_decay)
    layer = lambda tokens, **given: sequence.linear_recurrence(*tokens, **given)
    mesh = permuted_mesh((2, 2, 2), ("data", AXIS, "tensor"))
    axes: Any = {"batch_axis": "data", "head_axis": "tensor"}
    out, last = jax.jit(program(layer, jnp.zeros((4, 6)), mesh=mesh, **axes))((x, log_decay))
    of_document = lambda x, log: oracle.linear_recurrence(x, log, x)[:1]
    (want,) = expected(of_document, (x, log_decay), (x,))
    assert_near([out, last[0], last[3]], [want, want[2, 0, 23], want[2, 3, 6]])


def test_states_of_a_kernel_of_a_user():
    x = np.random.default_rng().integers(-9, 9, (*CALLS.shape, 3))
    layer = partial(sequence.recurrence, local=RunningSum())
    run = program(layer, jnp.zeros((4, 3)), mesh=mesh_of(4))
    out, last = jax.jit(run)(x.astype(np.float32))
    (want,) = expected(lambda x: (np.cumsum(x, axis=0),), [x], [x])
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(last, want[2, range(4), [23, 17, 23, 6]])


def test_states_of_convolutions():
    """The taps reach over a whole rank, and over a document of two tokens."""
    rng = np.random.default_rng()
    x, g = rng.normal(size=(2, *CALLS.shape, 2)).astype(np.float32)
    weight, g = rng.normal(size=(5, 2)).astype(np.float32), g * live(x)
    conv = partial(sequence.causal_conv, weight=jnp.asarray(weight))
    run = program(conv, jnp.zeros((4, 4, 2)), num_ranks=8)
    out, dx, last = out_and_gradients(run, np.where(live(x), x, np.nan), g)

    def of_document(x, g):
        return oracle.causal_conv(x, weight), oracle.causal_conv_gradients(x, weight, g)[0]

    assert_near([out, dx], expected(of_document, (x, g), (x, x)))
    rows = [x[2, 0, -4:], x[2, 1, 14:18], x[2, 2, -4:], x[2, 3, 3:7]]
    np.testing.assert_array_equal(last, rows)


def test_states_of_shifts():
    """Of integers and floats together, farther than the tokens of a rank; values are exact."""
    rng, offset, fill = np.random.default_rng(), 5, -7
    x: Any = {"i": rng.integers(1, 99, CALLS.shape).astype(np.int32)}
    x["f"] = rng.normal(size=(*CALLS.shape, 2)).astype(np.float32)
    state = {"i": jnp.full((4, 5), fill), "f": jnp.full((4, 5, 2), float(fill))}
    layer = partial(sequence.shift, offset=offset, fill=fill)
    out, last = jax.jit(program(layer, state, mesh=mesh_of(8)))(x)
    for name in x:
        want: Any = np.full(x[name].shape, fill, x[name].dtype)
        for where in documents():
            want[where] = oracle.shift(x[name][where], offset, fill)
        np.testing.assert_array_equal(out[name], want)
        np.testing.assert_array_equal(last[name][2], x[name][2, 2, -5:])


def test_gradients_of_a_state_that_one_call_gets_and_returns():
    """Through a document on two ranks, the second of which has only its last token."""
    rng, (n, size, columns) = np.random.default_rng(), (1, 3, 2)
    shapes = [(1, 8, 1, size)] * 2 + [(1, 8, n, columns), (1, 8, n), (1, 8, n)]
    q, k, v, log, beta = (rng.uniform(size=shape) for shape in shapes)
    first = np.zeros((1, n, size, columns))
    of_state = rng.normal(size=first.shape)
    run = partial(sequence.gated_delta_rule, axis_name=AXIS, mesh=mesh_of(2), return_state=True)
    ids = packed([[5, -3]])

    def loss(state):
        tokens = (jnp.asarray(x, jnp.float32) for x in (q, k / 2, v, -log, beta))
        _, last = run(*tokens, segment_ids=ids, initial_state=state)
        return (last * of_state).sum()

    got = jax.jit(jax.grad(loss))(jnp.asarray(first, jnp.float32))
    want = of_state[0, 0]
    for t in reversed(range(5)):  # S_t = (I - beta k k^T) exp(log) S_(t-1) + ...
        key = k[0, t, 0] / 2
        want = np.exp(-log[0, t, 0]) * (want - beta[0, t, 0] * np.outer(key, key @ want))
    assert_near([np.asarray(got)[0, 0]], [want])


@pytest.mark.parametrize("op", ["gated_delta_rule", "linear_attention"])
def test_gradients_of_a_state_that_only_returns_over_one_device(op):
    """Traced only."""
    rows = jax.ShapeDtypeStruct((1, 6, 2, 4), np.float32)
    gates = jax.ShapeDtypeStruct((1, 6, 2), np.float32)
    arrays = (rows, rows, rows, gates, gates)[: 5 if op == "gated_delta_rule" else 4]
    run = partial(getattr(sequence, op), axis_name=AXIS, mesh=mesh_of(1), return_state=True)
    loss = lambda *arrays: sum(x.sum() for x in run(*arrays))
    assert jax.eval_shape(jax.grad(loss), *arrays).shape == rows.shape


def test_states_of_tokens_without_ids():
    """A row is one document: of tokens that the ranks do not divide, and of none."""
    x = np.random.default_rng().integers(-9, 9, (2, 20)).astype(np.float32)
    mesh = permuted_mesh((4, 1), (AXIS, "tensor"))  # no array has heads
    given = {"axis_name": AXIS, "mesh": mesh, "head_axis": "tensor", "return_state": True}

    @jax.jit
    def run(x):
        outs, state = [], None
        for part in (x[:, :10], x[:, :0], x[:, 10:]):
            out, state = sequence.linear_recurrence(part, 0 * part, initial_state=state, **given)
            outs.append(out)
        return jnp.concatenate(outs, 1), state

    out, state = run(x)
    np.testing.assert_array_equal(out, np.cumsum(x, 1))
    np.testing.assert_array_equal(state, x.sum(1))
