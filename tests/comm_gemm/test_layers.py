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
    with_nan_behind,
)
from comm_gemm_refusals import GATHER, T, W, ones
from contract import same_bits
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec as P
from jaxprs import runs
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter

ORACLES = {
    all_gather_matmul: (oracle.all_gather_matmul, oracle.all_gather_matmul_gradients),
    matmul_reduce_scatter: (oracle.matmul_reduce_scatter, oracle.matmul_reduce_scatter_gradients),
}


def run_all(op, mesh, *operands, **options):
    """Results of every method in one program."""
    options = {"axis_name": AXIS, **options}
    each = methods(op, mesh.size)
    run = lambda *local: {
        name: fn(*local[:2], **options, **({"bias": local[2]} if local[2:] else {}))
        for name, fn in each.items()
    }
    return on_ranks(run, mesh)(*operands)


def with_gathered(op, num_ranks):
    """Each method; methods that gather keep the tokens for the derivative, or gather them again."""
    for name, fn in methods(op, num_ranks).items():
        if op is matmul_reduce_scatter:
            yield name, fn
        else:
            for gathered in ("keep", "again"):
                yield f"{name}, {gathered}", partial(fn, gathered=gathered)


# ---- Values and derivatives.


@pytest.mark.parametrize("op", ORACLES)
@pytest.mark.parametrize(
    "num_ranks, batch, counts, order, check_vma",
    [
        (1, (), None, None, True),
        (3, (2, 2), (2, 0, 5), (1, 2, 0), True),
        (4, (), (0, 3, 0, 0), (2, 0, 3, 1), True),
        (8, (2,), None, (3, 0, 7, 1, 6, 2, 5, 4), False),
    ],
)
def test_every_method_and_its_derivative(op, num_ranks, batch, counts, order, check_vma):
    """Exact. The bias is added once; tokens are uneven or absent, in several batches.

    NaN behind a rank's own tokens, in x or dy, reaches no result.
    """
    gathers = op is all_gather_matmul
    rows = max(counts or (3,)), sum(counts or (3,) * num_ranks)
    rows_in, rows_out = rows if gathers else rows[::-1]
    x, w, bias = (of_gather if gathers else of_scatter)(num_ranks, batch, rows_in)
    dy = integers(4, num_ranks, *batch, rows_out, N)
    if gathers:
        x = with_nan_behind(x, counts)
    else:
        dy = with_nan_behind(dy, counts)

    def local(x, w, bias, dy):
        def both(fn):
            run = lambda x, w, b: fn(x, w, bias=b, axis_name=AXIS, row_counts=counts)
            out, pull = jax.vjp(run, x, w, bias)
            return out, *pull(dy)

        return {name: both(fn) for name, fn in with_gathered(op, num_ranks)}

    results = on_ranks(local, mesh_of(num_ranks, order), check_vma=check_vma)(x, w, bias, dy)
    forward, backward = ORACLES[op]
    wants = forward(x, w, bias, counts), *backward(x, w, dy, counts)
    for name, got in results.items():
        for part, one, want in zip(("y", "dx", "dw", "dbias"), got, wants, strict=True):
            equal(one, want, f"{name}, {part}")


def test_random_values_of_bfloat16():
    """Several rows and columns; float32 sums, rounded once."""
    dtype, p = jnp.dtype("bfloat16"), 2
    draw = lambda seed, *shape: jnp.asarray(normal(seed, p, *shape), dtype)
    w, bias = draw(1, 300, 70), draw(2, 70)
    for op, (expect, _) in ORACLES.items():
        x = draw(3, 33 if op is all_gather_matmul else 66, 300)

        def local(x, w, bias, op=op):
            call = lambda fn, out: fn(x, w, bias=bias, axis_name=AXIS, preferred_element_type=out)
            each = methods(op, p).items()
            return {name: [call(fn, out) for out in (None, jnp.float32)] for name, fn in each}

        for name, results in on_ranks(local, mesh_of(p))(x, w, bias).items():
            assert [got.dtype for got in results] == [dtype, jnp.float32]
            for got in results:
                close(got, expect(x, w, bias), got.dtype, name)


def test_operands_of_different_types():
    """bfloat16 tokens with a float32 weight, or vice versa; a bias of any float type."""
    for op, types in (
        (all_gather_matmul, ("bfloat16", "float32", "bfloat16")),
        (matmul_reduce_scatter, ("float32", "bfloat16", "float16")),
    ):
        x, w, bias = (jnp.asarray(a, t) for a, t in zip(of_gather(2, (), 4), types, strict=True))
        for name, got in run_all(op, mesh_of(2), x, w, bias).items():
            assert got.dtype == jnp.float32
            equal(got, ORACLES[op][0](x, w, bias), name)


def test_the_same_bits_every_time_and_on_every_rank():
    """Values that each order of summation rounds differently."""
    p = 4
    x, w, _ = of_gather(p, (), 6, normal)
    w = np.stack([w[0]] * p)  # then the gathered product is equal on all ranks
    whole = of_scatter(p, (), 24, normal)[0]

    def local(x, whole, w):
        gather, scatter = methods(all_gather_matmul, p), methods(matmul_reduce_scatter, p)
        return (
            {name: fn(x, w, axis_name=AXIS) for name, fn in gather.items()},
            {name: fn(whole, w, axis_name=AXIS) for name, fn in scatter.items()},
        )

    run = on_ranks(local, mesh_of(p)).lower(x, whole, w).compile()
    first = run(x, whole, w)
    for _ in range(5):
        same_bits(run(x, whole, w), first)
    for name, got in first[0].items():
        same_bits({name: [got[0]] * p}, {name: list(got)})


def test_sums_are_in_rank_order():
    """Float32 sums of 1e8, 1, -1e8 and 3 show the order of the additions, on every rank."""
    p, orders = 4, np.array(list(itertools.permutations([1e8, 1, -1e8, 3])), np.float32)
    w = np.ascontiguousarray(orders.T)[:, None, :]  # [p, 1, 24]
    expected = oracle.sums_in_rank_order(w[:, 0])
    assert len(set(expected.tolist())) > 2
    results = run_all(matmul_reduce_scatter, mesh_of(p), np.ones((p, 8, 1), np.float32), w)
    for name, got in results.items():
        equal(got, np.broadcast_to(expected, (p, 2, 24)), name)


@pytest.mark.parametrize(
    "op, types, rows",
    [
        (all_gather_matmul, ("bfloat16", "float32"), 80),
        (matmul_reduce_scatter, ("bfloat16", "bfloat16"), 20),
    ],
)
def test_derivatives_of_narrow_types(op, types, rows):
    """Each gradient has the type of its operand and is rounded once, from float32 sums."""
    p = 2
    x, w, bias = (jnp.asarray(a) for a in of_gather(p, (), 40, normal))
    x, w, bias = x.astype(types[0]), w.astype(types[1]), bias.astype(types[0])
    dy = jnp.asarray(normal(3, p, rows, N)).astype(jnp.promote_types(*types))

    def local(x, w, bias, dy):
        gradients = lambda fn: jax.vjp(lambda x, w, b: fn(x, w, bias=b, axis_name=AXIS), x, w, bias)
        return {name: gradients(fn)[1](dy) for name, fn in with_gathered(op, p)}

    expected = ORACLES[op][1](x, w, dy)
    for name, got in on_ranks(local, mesh_of(p))(x, w, bias, dy).items():
        for like, one, want in zip((x, w, bias), got, expected, strict=True):
            assert one.dtype == like.dtype
            close(one, want, like.dtype, name)


def dense(x, w, bias):
    return x @ w + bias


def over_mesh(fn, mesh, kind, batch):
    """The product of whole arrays, like `dense`; shards x and w as the layer requires."""
    rows, columns = P(*batch, AXIS, None), P(*batch, None, AXIS)
    specs = {
        all_gather_matmul: ((rows, P(None, AXIS), P(AXIS)), columns),
        matmul_reduce_scatter: ((columns, P(AXIS, None), P()), rows),
    }[kind]
    return jax.shard_map(
        lambda x, w, bias: fn(x, w, bias=bias, axis_name=AXIS),
        mesh=mesh,
        in_specs=specs[0],
        out_specs=specs[1],
    )


@pytest.mark.parametrize(
    "op, options",
    [
        (all_gather_matmul, {"gathered": "keep"}),
        (all_gather_matmul, {"gathered": "again"}),
        (matmul_reduce_scatter, {}),
    ],
)
def test_second_derivatives(op, options):
    """Reverse mode over reverse mode."""
    p = 2
    x, w, bias = integers(0, 4, K * p), integers(1, K * p, N * p), integers(2, N * p)

    def loss(fn, x, w):
        first = jax.grad(lambda x, w: jnp.sum(fn(x, w, bias) ** 2), argnums=(0, 1))(x, w)
        return sum(jnp.sum(jnp.sin(g)) for g in first)

    second = lambda fn: jax.jit(jax.grad(partial(loss, fn), argnums=(0, 1)))(x, w)
    mapped = over_mesh(partial(op, method="ring", **options), mesh_of(p), op, [])
    for got, want in zip(second(mapped), second(dense), strict=True):
        close(got, np.asarray(want, np.float64), "float32")


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


# ---- Meshes.


@pytest.mark.parametrize(
    "names, sizes, axes, kind",
    [
        (("x", "data", "y"), (2, 2, 2), ("y", "x"), AxisType.Auto),
        (("data", "tp"), (2, 4), "tp", AxisType.Explicit),
    ],
)
def test_groups_of_ranks_are_independent(names, sizes, axes, kind):
    """tp is either axis of a mesh, or two of them; axes are automatic or explicit."""
    mesh = permuted_mesh(sizes, names, kind)
    x, w = integers(0, 2, 4, 2, K), integers(1, 2, 4, K, N)
    whole = integers(2, 2, 4, 8, K)

    def local(x, whole, w):
        first = all_gather_matmul(x[0, 0], w[0, 0], axis_name=axes, method="ring")
        pairs = all_gather_matmul(x[0, 0], w[0, 0], axis_name=axes, method="ring", aggregate=True)
        second = matmul_reduce_scatter(whole[0, 0], w[0, 0], axis_name=axes, method="ring")
        return jax.tree.map(lambda a: a[None, None], (first, pairs, second))

    spec = P("data", axes)
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    put = partial(jax.device_put, device=jax.NamedSharding(mesh, spec))
    first, pairs, second = map(np.asarray, mapped(*map(put, (x, whole, w))))
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
    """Batches of tokens and weights, of tokens alone in any dimension, and of weights alone."""
    p, examples = 2, 3
    x, w = integers(0, p, examples, 4, K), integers(1, p, examples, K, N)
    turned = np.moveaxis(x, 1, 2)

    def local(x, turned, w):
        gather = partial(all_gather_matmul, axis_name=AXIS, method="ring")
        scatter = partial(matmul_reduce_scatter, axis_name=AXIS, method="pipeline")
        return [
            (
                jax.vmap(fn)(x, w),
                jax.vmap(fn, in_axes=(1, None))(turned, w[0]),
                jax.vmap(fn, in_axes=(None, 0), out_axes=1)(x[0], w),
            )
            for fn in (gather, scatter)
        ]

    results = on_ranks(local, mesh_of(p))(x, turned, w)
    expects = oracle.all_gather_matmul, oracle.matmul_reduce_scatter
    for (both, tokens, weights), expect in zip(results, expects, strict=True):
        for i in range(examples):
            equal(both[:, i], expect(x[:, i], w[:, i]))
            equal(tokens[:, i], expect(x[:, i], w[:, 0]))
            equal(weights[:, :, i], expect(x[:, 0], w[:, i]))


def test_without_jit():
    x, w, bias = of_scatter(2, (), 4)
    run = partial(matmul_reduce_scatter, axis_name=AXIS, method="ring")
    got = on_ranks(lambda x, w, b: run(x, w, bias=b), mesh_of(2), jit=False)(x, w, bias)
    equal(got, oracle.matmul_reduce_scatter(x, w, bias))


def test_empty_operands():
    """No examples, a contracted dimension of size zero, or no columns."""
    p = 2
    for batch, k, n in (((0,), K, N), ((), 0, N), ((), K, 0)):
        x, w = np.ones((p, *batch, 4, k), np.float32), np.ones((p, k, n), np.float32)
        for op, (expect, _) in ORACLES.items():
            for name, got in run_all(op, mesh_of(p), x, w).items():
                equal(got, expect(x, w), (name, x.shape, w.shape))


def test_deadline_is_a_minute_and_can_be_set():
    for options, milliseconds in (({}, 60_000), ({"deadline": 0.25}, 250)):
        text = on_ranks(partial(GATHER, **options), mesh_of(W)).lower(ones(T, K), ones(K, N))
        assert f"deadline_ms = {milliseconds} : i64" in text.as_text()
