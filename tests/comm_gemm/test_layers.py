"""Every method of `all_gather_matmul` and `matmul_reduce_scatter` on ranks, with derivatives.

Most programs contain every method, so many calls are in flight at the same time. The contract
(`tests/contract`) calls some methods in all ways.
"""

import itertools
from functools import partial

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import (
    K,
    N,
    close,
    equal,
    integers,
    methods,
    normal,
    of_gather,
    of_scatter,
    with_gathered,
    with_gradients,
    with_nan_behind,
)
from comm_gemm_refusals import GATHER, SCATTER, T, W, ones
from contract import same_bits
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxprs import runs
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter

ORACLES = {
    all_gather_matmul: (oracle.all_gather_matmul, oracle.all_gather_matmul_gradients),
    matmul_reduce_scatter: (oracle.matmul_reduce_scatter, oracle.matmul_reduce_scatter_gradients),
}


# ---- Values and derivatives.


@pytest.mark.parametrize("op", ORACLES)
@pytest.mark.parametrize(
    "num_ranks, batch, counts, order",
    [(3, (2, 2), (2, 0, 5), (1, 2, 0)), (4, (), (0, 3, 0, 0), (2, 0, 3, 1))],
)
def test_every_method_and_its_derivative(op, num_ranks, batch, counts, order):
    """Exact. The bias is added once; tokens are uneven or absent, in several batches.

    NaN behind a rank's own tokens, in x or dy, reaches no result.
    """
    gathers = op is all_gather_matmul
    rows = max(counts), sum(counts)
    rows_in, rows_out = rows if gathers else rows[::-1]
    x, w, bias = (of_gather if gathers else of_scatter)(num_ranks, batch, rows_in)
    dy = integers(4, num_ranks, *batch, rows_out, N)
    if gathers:
        x = with_nan_behind(x, counts)
    else:
        dy = with_nan_behind(dy, counts)

    options = {"axis_name": AXIS, "row_counts": counts}

    def local(x, w, bias, dy):
        run = lambda fn: lambda x, w, b: fn(x, w, bias=b, **options)
        ways = {name: run(fn) for name, fn in with_gathered(op, num_ranks).items()}
        return with_gradients(ways, dy, x, w, bias)

    results = on_ranks(local, mesh_of(num_ranks, order))(x, w, bias, dy)
    forward, backward = ORACLES[op]
    wants = forward(x, w, bias, counts), *backward(x, w, dy, counts)
    for name, got in results.items():
        for part, one, want in zip(("y", "dx", "dw", "dbias"), got, wants, strict=True):
            equal(one, want, f"{name}, {part}")


@pytest.mark.parametrize(
    "op, types, names",
    [
        (GATHER, ("bfloat16", "float32", "bfloat16"), ("ring, keep", "ring, again", "xla, again")),
        (SCATTER, ("bfloat16", "bfloat16", "float16"), ("ring", "pipeline of 3", "xla")),
    ],
)
def test_narrow_types(op, types, names):
    """Results and gradients, each with the type of its operand, are rounded once from float32.

    The type of the result is that of both operands, or the preferred one.
    """
    p, op = 2, op.func
    draw = lambda seed, dtype, *shape: normal(seed, p, *shape, dtype=dtype)
    rows = (40, 80) if op is all_gather_matmul else (80, 40)
    natural = jnp.promote_types(*types[:2])
    x, w, bias = map(draw, range(3), types, *zip((rows[0], 70), (70, N), (N, 1), strict=True))
    bias = np.stack([bias[0, :, 0]] * p)
    dy = draw(3, natural, rows[1], N)

    def local(x, w, bias, dy):
        run = lambda fn, **out: lambda x, w, b: fn(x, w, bias=b, axis_name=AXIS, **out)
        ways = {name: with_gathered(op, p)[name] for name in names}
        results = with_gradients({name: run(fn) for name, fn in ways.items()}, dy, x, w, bias)
        wide = {name: run(fn, preferred_element_type="float32") for name, fn in ways.items()}
        return {name: (wide[name](x, w, bias), *results[name]) for name in names}

    forward, backward = ORACLES[op]
    y, *gradients = forward(x, w, bias), *backward(x, w, dy)
    for name, got in on_ranks(local, mesh_of(p))(x, w, bias, dy).items():
        kinds = "float32", natural, *types
        for dtype, one, want in zip(kinds, got, (y, y, *gradients), strict=True):
            assert one.dtype == dtype
            close(one, want, dtype, name)


def test_the_order_of_sums():
    """Float32 sums of 1e8, 1, -1e8 and 3 show the order of the additions, on every rank.

    A gathered product has the same bits every time and on every rank.
    """
    p, orders = 4, np.array(list(itertools.permutations([1e8, 1, -1e8, 3])), np.float32)
    parts = np.ascontiguousarray(orders.T)[:, None, :]  # [p, 1, 24]
    x, w, _ = of_gather(p, (), 6, normal)
    w = np.stack([w[0]] * p)

    def local(whole, parts, x, w):
        each = lambda op, *operands: {
            name: fn(*operands, axis_name=AXIS) for name, fn in methods(op, p).items()
        }
        return each(matmul_reduce_scatter, whole, parts), each(all_gather_matmul, x, w)

    operands = np.ones((p, 8, 1), np.float32), parts, x, w
    run = on_ranks(local, mesh_of(p))
    sums, products = run(*operands)
    expected = oracle.sums_in_rank_order(parts[:, 0])
    assert len(set(expected.tolist())) > 2
    for name, got in sums.items():
        equal(got, np.broadcast_to(expected, (p, 2, 24)), name)
    same_bits(run(*operands)[1], products)
    for name, got in products.items():
        same_bits({name: [got[0]] * p}, {name: list(got)})


def over_mesh(fn, mesh, kind):
    """The product of whole arrays; shards x and w as the layer requires."""
    rows, columns = P(AXIS, None), P(None, AXIS)
    specs = {
        all_gather_matmul: ((rows, columns, P(AXIS)), columns),
        matmul_reduce_scatter: ((columns, rows, P()), rows),
    }[kind]
    run = lambda x, w, bias: fn(x, w, bias=bias, axis_name=AXIS)
    return jax.shard_map(run, mesh=mesh, in_specs=specs[0], out_specs=specs[1])


def test_second_derivatives():
    """Reverse mode over reverse mode."""
    p = 2
    x, w, bias = integers(0, 4, K * p), integers(1, K * p, N * p), integers(2, N * p)

    def loss(fn, x, w):
        first = jax.grad(lambda x, w: jnp.sum(fn(x, w, bias) ** 2), argnums=(0, 1))(x, w)
        return sum(jnp.sum(jnp.sin(g)) for g in first)

    mapped = lambda op, **options: over_mesh(partial(op, method="ring", **options), mesh_of(p), op)
    ways = {
        "dense": lambda x, w, bias: x @ w + bias,
        "keep": mapped(all_gather_matmul),
        "again": mapped(all_gather_matmul, gathered="again"),
        "scatter": mapped(matmul_reduce_scatter),
    }
    second = lambda fn, x, w: jax.grad(partial(loss, fn), argnums=(0, 1))(x, w)
    results = jax.jit(lambda x, w: {name: second(fn, x, w) for name, fn in ways.items()})(x, w)
    for name in ways:
        for got, want in zip(results[name], results["dense"], strict=True):
            close(got, np.asarray(want, np.float64), "float32", name)


def test_gathered_tokens_are_kept_by_name():
    """Together with the product, which the activation reads, they save a second gather."""
    only = jax.checkpoint_policies.save_only_these_names
    p, rows = 2, 4

    def layer(x, up, down):
        y = checkpoint_name(all_gather_matmul(x, up, axis_name=AXIS), "up")
        return matmul_reduce_scatter(jax.nn.gelu(y), down, axis_name=AXIS)

    def local(policy, x, up, down):
        checkpointed = jax.checkpoint(layer, policy=policy)
        return jax.grad(lambda *x: checkpointed(*x).sum(), argnums=(0, 1, 2))(x, up, down)

    x, up, down = (jnp.zeros(shape) for shape in ((p, rows, K), (p, K, N), (p, N, K)))
    for names, num_gemms in (
        ((), 5),
        (("up",), 5),
        (("gathered_tokens",), 5),
        (("up", "gathered_tokens"), 4),
    ):
        program = on_ranks(partial(local, only(*names)), mesh_of(p), jit=False)
        assert runs(jax.make_jaxpr(program)(x, up, down).jaxpr)["gemm"] == num_gemms, names


# ---- Several weights of one x, gathered once, and weights of more than two dimensions.

Q = 2, 3  # heads, and features of each


def flat(x, num_dims=2):
    """Joins the last dimensions, on each rank."""
    return x.reshape(*x.shape[:-num_dims], -1)


def test_each_product_and_one_gradient_of_x():
    """Weights [K, N, H] and [K, N], one with a bias; uneven tokens."""
    p, counts = 3, (2, 0, 4)
    rows, total = max(counts), sum(counts)
    x, wq, w = integers(0, p, 2, rows, K), integers(1, p, K, *Q), integers(2, p, K, N)
    bias = integers(3, p, *Q)
    dq, dy = integers(4, p, 2, total, *Q), integers(5, p, 2, total, N)

    names = "none, keep", "ring, again", "ring, atomic, keep", "xla, keep"
    options = {"axis_name": AXIS, "row_counts": counts}

    def local(x, wq, w, bias, dq, dy):
        run = lambda fn: lambda x, w, b: fn(x, w, bias=b, **options)
        ways = {name: run(with_gathered(all_gather_matmul, p)[name]) for name in names}
        return with_gradients(ways, (dq, dy), x, (wq, w), (bias, None))

    results = on_ranks(local, mesh_of(p), check_vma=False)(x, wq, w, bias, dq, dy)
    flat_wq = flat(wq)
    q = oracle.all_gather_matmul(x, flat_wq, flat(bias), counts).reshape(*dq.shape)
    y = oracle.all_gather_matmul(x, w, None, counts)
    dx_q, dwq, dbias = oracle.all_gather_matmul_gradients(x, flat_wq, flat(dq), counts)
    dx_y, dw, _ = oracle.all_gather_matmul_gradients(x, w, dy, counts)
    for name, ((got_q, got_y), dx, dws, (got_dbias, none)) in results.items():
        equal(got_q, q, name)
        equal(got_y, y, name)
        equal(dx, dx_q + dx_y, name)
        equal(dws[0], dwq.reshape(wq.shape), name)
        equal(dws[1], dw, name)
        equal(got_dbias, dbias.reshape(bias.shape), name)
        assert none is None


def test_two_contracted_dimensions():
    p = 4
    x, w, bias = integers(0, p, 2, 8, *Q), integers(1, p, *Q, K), np.stack([integers(2, K)] * p)
    dy = integers(3, p, 2, 2, K)

    def local(x, w, bias, dy):
        run = lambda fn: lambda x, w, b: fn(x, w, bias=b, axis_name=AXIS)
        each = methods(matmul_reduce_scatter, p)
        ways = {name: run(each[name]) for name in ("none", "ring", "pipeline of 3", "xla")}
        return with_gradients(ways, dy, x, w, bias)

    results = on_ranks(local, mesh_of(p), check_vma=False)(x, w, bias, dy)
    flat_w = w.reshape(p, -1, K)
    expected = oracle.matmul_reduce_scatter(flat(x), flat_w, bias)
    gradients = oracle.matmul_reduce_scatter_gradients(flat(x), flat_w, dy)
    for name, (out, dx, dw, dbias) in results.items():
        equal(out, expected, name)
        for got, want in zip((dx, dw, dbias), gradients, strict=True):
            equal(got, want.reshape(got.shape), name)


def test_the_gradient_of_x_is_rounded_once():
    """257 is not a bfloat16, 258 is."""

    def gradient(x, up, gate):
        out, pull = jax.vjp(lambda x: GATHER(x, (up, gate)), x)
        return pull(tuple(map(jnp.ones_like, out)))[0]

    ones = np.ones((1, 1, 1), jnp.bfloat16)
    dx = on_ranks(gradient, mesh_of(1))(ones, ones * 256, np.ones((1, 1, 2), jnp.bfloat16))
    equal(dx, np.full((1, 1, 1), 258))


def test_one_gather_and_no_kept_copy_of_the_weights():
    p = 2
    x, up, gate = (np.ones(s, np.float32) for s in ((p, 2, K), (p, K, N), (p, K, 4)))
    kept = []

    def local(x, up, gate):
        out, pull = jax.vjp(lambda x, *w: GATHER(x, w), x, up, gate)
        kept.extend(a.shape for a in jax.tree.leaves(pull))
        return pull(out)

    program = on_ranks(local, mesh_of(p), jit=False)
    assert runs(jax.make_jaxpr(program)(x, up, gate).jaxpr)["gemm"] == 2
    assert (K, N) in kept and (K, N + 4) not in kept


def test_scaled_weights():
    """Blocks of 32 have their own scales, so products are those of separate calls."""
    p = 2
    x, up, gate = normal(0, p, 4, 64), normal(1, p, 64, 32), normal(2, p, 64, 64)
    scaled = partial(GATHER, scaling_mode="mxfp8_1d_scaling")
    local = lambda x, *w: (scaled(x, w), tuple(scaled(x, a) for a in w))
    together, apart = on_ranks(local, mesh_of(p))(x, up, gate)
    for one, want in zip(together, apart, strict=True):
        close(one, np.asarray(want, np.float64), "float32")


# ---- Meshes.


def test_groups_over_two_axes_are_independent():
    """In the order of `axis_name`; chunks also in pairs."""
    axes, mesh = ("y", "x"), permuted_mesh((2, 2, 2), ("x", "data", "y"))
    x, w = integers(0, 2, 4, 2, K), integers(1, 2, 4, K, N)
    whole = integers(2, 2, 4, 8, K)

    def local(x, whole, w):
        x, whole, w = x[0, 0], whole[0, 0], w[0, 0]
        gather = partial(all_gather_matmul, axis_name=axes, method="ring")
        scatter = partial(matmul_reduce_scatter, axis_name=axes, method="ring")
        results = gather(x, w), gather(x, w, aggregate=True), scatter(whole, w)
        return jax.tree.map(lambda a: a[None, None], results)

    spec = P("data", axes)
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    first, pairs, second = map(np.asarray, mapped(x, whole, w))
    for group in range(2):
        expected = oracle.all_gather_matmul(x[group], w[group])
        equal(first[group], expected)
        equal(pairs[group], expected)
        equal(second[group], oracle.matmul_reduce_scatter(whole[group], w[group]))


def test_other_axes_may_be_automatic():
    """shard_map over tp alone: the batch is sharded over an axis that XLA partitions."""
    mesh = permuted_mesh((2, 4), ("data", "tp"))
    x, w = integers(0, 4, 8, K), integers(1, K, 4 * N)
    mapped = jax.shard_map(
        partial(all_gather_matmul, axis_name="tp", method="ring"),
        mesh=mesh,
        axis_names={"tp"},
        in_specs=(P(None, "tp"), P(None, "tp")),
        out_specs=P(None, None, "tp"),
    )
    x = jax.device_put(x, jax.NamedSharding(mesh, P("data", "tp")))
    equal(jax.jit(mapped)(x, w), np.asarray(x) @ w)


# ---- Inside other programs.


def test_under_vmap():
    """Tokens alone in any dimension, and weights alone."""
    p, examples = 2, 3
    x, w = integers(0, p, 4, examples, K), integers(1, p, examples, K, N)

    def local(x, w):
        tokens = jax.vmap(GATHER, in_axes=(1, None))(x, w[0])
        return tokens, jax.vmap(GATHER, in_axes=(None, 0), out_axes=1)(x[:, 0], w)

    tokens, weights = on_ranks(local, mesh_of(p))(x, w)
    for i in range(examples):
        equal(tokens[:, i], oracle.all_gather_matmul(x[:, :, i], w[:, 0]))
        equal(weights[:, :, i], oracle.all_gather_matmul(x[:, :, 0], w[:, i]))


def test_without_jit():
    x, w, bias = of_scatter(2, (), 4)
    got = on_ranks(lambda x, w, b: SCATTER(x, w, bias=b), mesh_of(2), jit=False)(x, w, bias)
    equal(got, oracle.matmul_reduce_scatter(x, w, bias))


def test_empty_operands():
    """No examples, a contracted dimension of size zero, or no columns."""
    p, sizes = 2, (((0,), K, N), ((), 0, N), ((), K, 0))
    operands = [[np.ones((p, *batch, 4, k), "f"), np.ones((p, k, n), "f")] for batch, k, n in sizes]
    ways = GATHER, SCATTER, partial(all_gather_matmul, axis_name=AXIS)
    run = lambda operands: [[way(*each) for each in operands] for way in ways]
    for way, results in zip(ways, on_ranks(run, mesh_of(p))(operands), strict=True):
        for got, each in zip(results, operands, strict=True):
            equal(got, ORACLES[way.func][0](*each), each)


def test_deadline_is_a_minute_and_can_be_set():
    for options, milliseconds in (({}, 60_000), ({"deadline": 0.25}, 250)):
        text = on_ranks(partial(GATHER, **options), mesh_of(W)).lower(ones(T, K), ones(K, N))
        assert f"deadline_ms = {milliseconds} : i64" in text.as_text()
