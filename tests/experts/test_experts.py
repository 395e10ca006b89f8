"""Rows of experts: of any dtype, over several axes, with padding, and what moves.

The contract (`tests/contract`) has a layer of experts on each rank and of global arrays.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from contract import check, on_ranks as layer_on_ranks, split, with_gradients
from expert_cases import CAPACITY, LAYER, OPTIONS, D, E, K, T, W, draw, layer_with
from experts_oracle import evenly, grouped_rows, summed_rows
from jax.sharding import AxisType, PartitionSpec as P
from jaxprs import flattened
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh
from operations import EXPERTS, FEATURES, ROOM

from jax_cp_dispatch import experts


def test_the_mesh_of_the_index_is_that_of_the_calls_that_follow():
    arrays = LAYER.arrays("float32")
    rows = jax.NamedSharding(mesh_of(W), P(AXIS))
    on_mesh = {**arrays, "expert_index": jax.device_put(arrays["expert_index"], rows)}
    check(LAYER.call(on_mesh, axis_name=AXIS), LAYER.expected(arrays)[0], "float32")


def check_layer(run, mesh, rows):
    """Checks the layer and its gradients; arrays are split by this spec."""
    arrays = LAYER.arrays("float32")
    *expected, cotangents = LAYER.expected(arrays)
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, rows))
        operands = jax.tree.map(place, (*split(arrays), cotangents))
        check(jax.jit(with_gradients(run))(*operands), tuple(expected), "float32")


def test_an_explicit_axis_shards_the_tokens_of_a_rank():
    mesh = permuted_mesh((2, W), ("data", AXIS), (AxisType.Explicit, AxisType.Auto))
    call = lambda arrays: LAYER.call(arrays, axis_name=AXIS)
    run = jax.shard_map(call, in_specs=P(AXIS), out_specs=P(AXIS), axis_names={AXIS})
    check_layer(run, mesh, P((AXIS, "data")))


def test_ranks_of_two_explicit_axes():
    mesh = permuted_mesh((2, 2, 2), ("data", AXIS, "other"), AxisType.Explicit)
    axes = ("data", AXIS)
    check_layer(lambda arrays: LAYER.call(arrays, axis_name=axes), mesh, P(axes))


def test_narrow_rows():
    """Rows of several arrays move bit for bit; sums of bfloat16 are rounded once on each rank."""
    index, held = draw(5)[2], evenly(E, W)
    rng = np.random.default_rng(0)
    x = {
        "bytes": rng.integers(0, 256, (W, T, 2, 3)).astype(np.uint8),
        "rows": rng.normal(size=(W, T, D)).astype(jnp.bfloat16),
        "small": rng.integers(-1, 2, (W, T, D)).astype("float8_e4m3fn"),  # sums are exact
    }
    weights = {
        "rows": rng.random((W, T, K)).astype(jnp.bfloat16),
        "small": rng.integers(1, 3, (W, T, K)).astype(np.float32),
    }

    def run(x, weights, index):
        routing = experts.route(index, **OPTIONS)
        rows = experts.dispatch_tokens(x, routing)
        sums = {n: experts.combine_tokens(rows[n], w, routing) for n, w in weights.items()}
        return rows, sums, experts.combine_tokens(rows["rows"], None, routing)

    rows, sums, plain = on_ranks(run, mesh_of(W))(x, weights, index)
    found = {name: grouped_rows(array, index, held, CAPACITY)[0] for name, array in x.items()}
    jax.tree.map(np.testing.assert_array_equal, rows, found)
    # A rounding on each rank and one of their sum, each of 2**-9 of at most K rows.
    of_rows = 2 * K * 3 * 2.0**-9
    for got, name, w, atol in (
        (sums["rows"], "rows", weights["rows"], of_rows),
        (plain, "rows", None, of_rows),
        (sums["small"], "small", weights["small"], 0),
    ):
        assert got.dtype == x[name].dtype
        want = summed_rows(found[name], w, index, held)
        np.testing.assert_allclose(np.asarray(got, float), want, rtol=0, atol=atol)


def test_complex_rows():
    """As pairs of real ones, gradients included; weighted sums take real rows alone."""
    index = draw(9)[2]
    rng = np.random.default_rng(9)
    pairs = rng.normal(size=(2, 2, W, T, D)).astype(np.float32)
    x, v = pairs[0] + 1j * pairs[1]

    def run(x, v, index, implementation):
        routing = experts.route(index, implementation=implementation, **OPTIONS)
        rows, pull = jax.vjp(lambda x: experts.dispatch_tokens(x, routing), x)
        moved = experts.dispatch_tokens(v, routing)
        return rows, moved, pull(rows)[0]

    of_both = lambda x, v, index: [run(x, v, index, name) for name in (None, "xla")]
    for results in on_ranks(of_both, mesh_of(W))(x, v, index):
        rows, moved, dx = map(np.asarray, results)
        np.testing.assert_array_equal(rows, grouped_rows(x, index, evenly(E, W), CAPACITY)[0])
        # A derivative of a linear function, without conjugation.
        np.testing.assert_allclose((dx * v).sum(), (rows * moved).sum(), rtol=1e-5)


def test_an_exchange_sums_the_bits_of_xla():
    """Sums and all gradients; products have few bits, so that they are exact if fused or not."""
    index = draw(9)[2]
    index[:, ::2, 2] = index[:, ::2, 0]
    rng = np.random.default_rng(0)
    few = lambda *shape: rng.integers(-15, 16, (W, *shape)) / 8
    y, g = few(CAPACITY, D).astype(jnp.bfloat16), few(T, D).astype(jnp.bfloat16)
    weights = few(T, K).astype(np.float32)

    def sums(y, g, weights, index, implementation):
        routing = experts.route(index, implementation=implementation, **OPTIONS)
        combine = lambda y, w: experts.combine_tokens(y, w, routing)
        out, pull = jax.vjp(combine, y, weights)
        back = jax.vjp(lambda g: experts.dispatch_tokens(g, routing), g)[1](y)
        return out, pull(g), back

    runs = [partial(sums, implementation=name) for name in ("in_process", "xla")]
    one, other = (on_ranks(run, mesh_of(W))(y, g, weights, index) for run in runs)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), one, other)
    assert all(np.asarray(x, np.float32).any() for x in jax.tree.leaves(one))


def test_second_derivatives():
    """Of a sum of cubes: 2 rows, on the ranks of experts 0 and E - 1, are those of each token."""
    index = np.broadcast_to(np.array([0, E - 1], np.int32), (W, T, 2))
    rng = np.random.default_rng(3)
    y, c = rng.normal(size=(2, W, W * T, 2)).astype(np.float32)
    weights = rng.random((W, T, 2)).astype(np.float32)
    options = {**OPTIONS, "capacity": W * T}

    def run(y, c, weights, index):
        combine = lambda y: experts.combine_tokens(y, weights, experts.route(index, **options))
        first = jax.grad(lambda y: (combine(y) ** 3).sum())
        return jax.grad(lambda y: (first(y) * c).sum())(y)

    got = on_ranks(run, mesh_of(W))(y, c, weights, index)
    # Rank 0 has expert 0, the last rank expert E - 1: row r * T + t is token t of rank r.
    w = weights.reshape(-1, 2)
    out = w[:, :1] * y[0] + w[:, 1:] * y[-1]
    along = 6 * out * (w[:, :1] * c[0] + w[:, 1:] * c[-1])
    want = np.zeros_like(y)
    want[0], want[-1] = w[:, :1] * along, w[:, 1:] * along
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_padding_may_hold_anything():
    """Weights of -1 and rows behind the last group are not read."""

    def scaled(rows, scale, routing):
        is_used = jnp.arange(len(rows)) < routing.group_sizes.sum()
        return jnp.where(is_used[:, None], rows * scale, jnp.nan)

    arrays = LAYER.arrays("float32")
    arrays["expert_index"][::6] = -1
    none = arrays["expert_index"] < 0
    *expected, cotangents = LAYER.expected({**arrays, "weights": arrays["weights"] * ~none})
    arrays["weights"][none] = np.nan
    run = with_gradients(layer_on_ranks(layer_with(scaled), mesh_of(W)))
    check(jax.jit(run)(*split(arrays), cotangents), tuple(expected), "float32")


def test_8_bits():
    """Rows are close to those that move whole, by blocks; gradients return whole."""
    _, weights, index = draw(8)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(W, T, 64)).astype(jnp.bfloat16)
    x[:, :, 32:] *= 1000  # each block has its own scale

    def run(x, weights, index):
        routing = experts.route(index, **OPTIONS)
        outs = []
        for mode in ("MXFP8_1D_SCALING", "NO_SCALING"):
            send = lambda x, mode=mode: experts.dispatch_tokens(x, routing, scaling_mode=mode)
            rows, pull = jax.vjp(send, x)
            outs += [rows, pull(rows)[0]]
        return outs

    narrow, dnarrow, rows, drows = on_ranks(run, mesh_of(W))(x, weights, index)
    assert narrow.dtype == dnarrow.dtype == jnp.bfloat16
    blocks = np.asarray(rows, np.float32).reshape(W, CAPACITY, 2, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    error = np.abs(np.asarray(narrow, np.float32).reshape(blocks.shape) - blocks)
    assert (error <= largest / 16).all() and error.any()  # 4 bits of a number, or of the smallest
    assert not np.array_equal(dnarrow, drows)  # sums of other rows
    moved, _ = grouped_rows(x.astype(np.float32), index, evenly(E, W), CAPACITY)
    np.testing.assert_array_equal(np.asarray(rows, np.float32), moved)
    want = summed_rows(np.asarray(narrow), None, index, evenly(E, W))
    np.testing.assert_allclose(np.asarray(dnarrow, float), want, rtol=3 * 2.0**-8, atol=1e-2)


def test_only_counts_move_before_the_tokens():
    """Counts of experts and ranks first; then tokens, and the sums of their rows."""
    run = layer_on_ranks(LAYER, mesh_of(W), implementation="in_process")
    traced = jax.make_jaxpr(run)(LAYER.arrays("float32"))
    moved = {}
    for eqn in flattened(traced.jaxpr):
        if eqn.primitive.name in ("dispatch", "combine"):
            arrays = [(str(v.aval.dtype), v.aval.shape) for v in eqn.invars]
            moved.setdefault(eqn.params["exchange"].op, []).append(arrays)
    assert list(moved) == ["route", "dispatch_tokens", "combine_tokens"]
    (counts,), (tokens,), (rows,) = moved.values()
    floats = lambda arrays: [shape for dtype, shape in arrays if dtype == "float32"]
    assert not floats(counts) and ("int32", (1, 1, EXPERTS + W + 1)) in counts
    assert floats(tokens) == [(T, FEATURES)] and (ROOM, FEATURES) in floats(rows)
