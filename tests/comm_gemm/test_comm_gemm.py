"""`all_gather_matmul` and `matmul_reduce_scatter`: values of all methods.

Most programs contain every method, so many calls are in flight at the same time.
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
from jax.sharding import AxisType, PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter


def bits(tree):
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def run_all(op, mesh, *operands, check_vma=True, **options):
    """Results of every method in one program."""
    options = {"axis_name": AXIS, **options}
    each = methods(op, mesh.size)
    run = lambda *local: {
        name: fn(*local[:2], **options, **({"bias": local[2]} if local[2:] else {}))
        for name, fn in each.items()
    }
    return on_ranks(run, mesh, check_vma=check_vma)(*operands)


# ---- Values.


@pytest.mark.parametrize(
    "num_ranks, batch, counts, order, check_vma",
    [
        (1, (), None, None, True),
        (3, (2, 2), (2, 0, 5), (1, 2, 0), True),
        (4, (), (0, 3, 0, 0), (2, 0, 3, 1), True),
        (8, (2,), None, (3, 0, 7, 1, 6, 2, 5, 4), False),
    ],
)
def test_every_method_of_all_gather_matmul_and_matmul_reduce_scatter(
    num_ranks, batch, counts, order, check_vma
):
    """Adds the bias once; tokens are uneven or absent, in several batches, on permuted devices."""
    mesh, options = mesh_of(num_ranks, order), {"row_counts": counts, "check_vma": check_vma}
    x, w, bias = of_gather(num_ranks, batch, max(counts or (3,)))
    x = with_nan_behind(x, counts)
    expected = oracle.all_gather_matmul(x, w, bias, counts)
    for name, got in run_all(all_gather_matmul, mesh, x, w, bias, **options).items():
        equal(got, expected, name)

    x, w, bias = of_scatter(num_ranks, batch, sum(counts or (3 * num_ranks,)))
    expected = oracle.matmul_reduce_scatter(x, w, bias, counts)
    for name, got in run_all(matmul_reduce_scatter, mesh, x, w, bias, **options).items():
        equal(got, expected, name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_random_values_of_each_type(dtype):
    """Several rows and columns; float32 sums, rounded once."""
    with jax.enable_x64(dtype == "float64"):
        dtype, p = jnp.dtype(dtype), 2
        draw = lambda seed, *shape: jnp.asarray(normal(seed, p, *shape), dtype)
        w, bias = draw(1, 300, 70), draw(2, 70)
        types = {dtype, jnp.dtype("float32")} if dtype == jnp.bfloat16 else {dtype}
        for op, x, expect in (
            (all_gather_matmul, draw(3, 33, 300), oracle.all_gather_matmul),
            (matmul_reduce_scatter, draw(3, 66, 300), oracle.matmul_reduce_scatter),
        ):

            def local(x, w, bias, op=op):
                call = lambda fn, out: fn(
                    *(x, w), bias=bias, axis_name=AXIS, preferred_element_type=out
                )
                return {
                    name: [call(fn, None), *(call(fn, out) for out in types - {dtype})]
                    for name, fn in methods(op, p).items()
                }

            for name, results in on_ranks(local, mesh_of(p))(x, w, bias).items():
                assert {got.dtype for got in results} == types
                for got in results:
                    close(got, expect(x, w, bias), got.dtype, name)


def test_operands_of_different_types():
    """bfloat16 tokens with a float32 weight, or vice versa; a bias of any float type."""
    for op, types, expect in (
        (all_gather_matmul, ("bfloat16", "float32", "bfloat16"), oracle.all_gather_matmul),
        (matmul_reduce_scatter, ("float32", "bfloat16", "float16"), oracle.matmul_reduce_scatter),
    ):
        x, w, bias = (jnp.asarray(a, t) for a, t in zip(of_gather(2, (), 4), types, strict=True))
        for name, got in run_all(op, mesh_of(2), x, w, bias).items():
            assert got.dtype == jnp.float32
            equal(got, expect(x, w, bias), name)


def test_narrow_result_of_wide_operands():
    x, w, bias = of_scatter(2, (), 4)
    options = {"preferred_element_type": jnp.bfloat16}
    for name, got in run_all(matmul_reduce_scatter, mesh_of(2), x, w, bias, **options).items():
        assert got.dtype == jnp.bfloat16
        equal(got, oracle.matmul_reduce_scatter(x, w, bias), name)


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
        assert bits(run(x, whole, w)) == bits(first)
    for name, got in first[0].items():
        assert len(set(bits(list(np.asarray(got))))) == 1, name


def test_sums_are_in_rank_order():
    """Float32 sums of 1e8, 1, -1e8 and 3 show the order of the additions, on every rank."""
    p, orders = 4, np.array(list(itertools.permutations([1e8, 1, -1e8, 3])), np.float32)
    w = np.ascontiguousarray(orders.T)[:, None, :]  # [p, 1, 24]
    expected = oracle.sums_in_rank_order(w[:, 0])
    assert len(set(expected.tolist())) > 2
    results = run_all(matmul_reduce_scatter, mesh_of(p), np.ones((p, 8, 1), np.float32), w)
    for name, got in results.items():
        equal(got, np.broadcast_to(expected, (p, 2, 24)), name)


# ---- Meshes.

GROUPED = [
    (("data", "tp"), (2, 4), "tp"),
    (("tp", "data"), (4, 2), "tp"),
    (("data", "x", "y"), (2, 2, 2), ("x", "y")),
    (("x", "data", "y"), (2, 2, 2), ("y", "x")),
]


@pytest.mark.parametrize(
    "names, sizes, axes, kind",
    [*((*group, AxisType.Auto) for group in GROUPED[1:]), (*GROUPED[0], AxisType.Explicit)],
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


def test_inside_scan():
    """A layer of two products; its result is the input of the next iteration."""
    p, layers = 3, 4
    x = integers(0, p, 2, K)
    up = np.sign(integers(1, p, layers, K, 2))
    down = np.sign(integers(2, p, layers, 2, K))

    def local(x, up, down):
        def layer(x, weights):
            hidden = all_gather_matmul(x, weights[0], axis_name=AXIS, method="ring")
            out = matmul_reduce_scatter(hidden, weights[1], axis_name=AXIS, method="pipeline")
            return out - x, jnp.sum(out)

        return jax.lax.scan(layer, x, (up, down))

    got, sums = on_ranks(local, mesh_of(p))(x, up, down)
    want = x.astype(np.float64)
    for i in range(layers):
        hidden = oracle.all_gather_matmul(want, up[:, i])
        out = oracle.matmul_reduce_scatter(hidden, down[:, i])
        equal(sums[:, i], out.sum((1, 2)))
        want = out - want
    equal(got, want)


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
    """No tokens, a contracted dimension of size zero, or no columns."""
    p = 2
    for tokens, k, n in ((0, K, N), (4, 0, N), (4, K, 0)):
        x, w = np.ones((p, tokens, k), np.float32), np.ones((p, k, n), np.float32)
        for op, expect in (
            (all_gather_matmul, oracle.all_gather_matmul),
            (matmul_reduce_scatter, oracle.matmul_reduce_scatter),
        ):
            for name, got in run_all(op, mesh_of(p), x, w).items():
                equal(got, expect(x, w), (name, x.shape, w.shape))
