"""Products of gathered tokens, scattered sums of products: values and derivatives of all methods.

Most programs hold every method at once, which also makes them many calls in flight. Values that are
small integers are exact in every method; others are within the tolerance of their type.
"""

import itertools
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch.comm_gemm import CommOverlapMethod, all_gather_matmul, matmul_reduce_scatter

GATHERING: dict[str, Any] = {
    "none": {"method": "none"},
    "ring": {"method": "ring"},
    "ring, atomic": {"method": CommOverlapMethod.RING_EXCHANGE, "atomic": True},
    "ring, pairs": {"method": "ring_exchange", "aggregate": True},  # an even number of ranks
    "ring, no copies": {"method": "ring", "use_ce": False},
    "ring, atomic, no copies": {"method": "ring", "atomic": True, "use_ce": False},
    "xla": {"method": "ring", "implementation": "xla"},
}
SCATTERING: dict[str, Any] = {
    "none": {"method": CommOverlapMethod.NONE},
    "ring": {"method": "ring"},
    "ring, atomic": {"method": "ring", "atomic": True},
    "ring, no copies": {"method": "ring", "use_ce": False},
    "ring, atomic, no copies": {"method": "ring", "atomic": True, "use_ce": False},
    "pipeline of 1": {"method": "pipeline", "num_splits": 1},
    "pipeline of 3": {"method": "PIPELINE", "num_splits": 3},
    "pipeline of more than columns": {"method": "pipeline", "num_splits": 100},
    "pipeline, atomic": {"method": "pipeline", "atomic": True},
    "pipeline, first gemm": {"method": "pipeline", "rs_overlap_first_gemm": True},
    "xla": {"method": "pipeline", "implementation": "xla"},
}
K, N = 5, 7
# Most of the time goes to compiling; without LLVM's optimizations it takes less.
QUICKLY: Any = {"xla_backend_optimization_level": 0}


def methods(op, num_ranks):
    """Each method of a product, by name."""
    table = GATHERING if op is all_gather_matmul else SCATTERING
    fits = lambda options: num_ranks % 2 == 0 or not options.get("aggregate")
    return {name: partial(op, **options) for name, options in table.items() if fits(options)}


def integers(seed, *shape, dtype: Any = np.float32):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def normal(seed, *shape, dtype: Any = np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def equal(got, want, name: Any = ""):
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want, err_msg=str(name))


def close(got, want, dtype, name=""):
    """Within the type's tolerance; that of the wide ones is relative to the largest element."""
    largest = np.abs(want).max(initial=0)
    rtol, atol = {
        "bfloat16": (2e-2, 2e-3),
        "float16": (1e-3, 1e-3),
        "float32": (0, 1e-5 * largest),
        "float64": (0, 1e-13 * largest),
    }[jnp.dtype(dtype).name]
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=str(name))


def bits(tree):
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def run_once(program, *operands):
    return program.lower(*operands).compile(compiler_options=QUICKLY)(*operands)


def of_gather(num_ranks, batch, tokens, draw=integers, **options):
    """x, w and bias of `all_gather_matmul`, per rank."""
    shapes = (*batch, tokens, K), (K, N), (N,)
    return [draw(seed, num_ranks, *shape, **options) for seed, shape in enumerate(shapes)]


def of_scatter(num_ranks, batch, tokens, draw=integers, **options):
    """x, w and bias, one for all ranks, of `matmul_reduce_scatter`."""
    x, w, bias = of_gather(num_ranks, batch, tokens, draw, **options)
    return x, w, np.stack([bias[0]] * num_ranks)


def run_all(op, mesh, *operands, check_vma=True, **options):
    """Results of every method in one program."""
    options = {"axis_name": AXIS, **options}
    each = methods(op, mesh.size)
    run = lambda *local: {
        name: fn(*local[:2], **options, **({"bias": local[2]} if local[2:] else {}))
        for name, fn in each.items()
    }
    return run_once(on_ranks(run, mesh, check_vma=check_vma), *operands)


# ---- Values.


def with_nan_behind(x, counts):
    """What no rank may read."""
    x = x.copy()
    for rank, count in enumerate(counts or ()):
        x[rank][..., count:, :] = np.nan
    return x


@pytest.mark.parametrize(
    "num_ranks, batch, counts, order, check_vma",
    [
        (1, (), None, None, True),
        (2, (3,), (4, 1), (1, 0), False),
        (3, (2, 2), (2, 0, 5), (1, 2, 0), True),
        (4, (), (0, 3, 0, 0), (2, 0, 3, 1), True),
        (4, (2,), (1, 2, 3, 4), None, True),
        (8, (2,), None, (3, 0, 7, 1, 6, 2, 5, 4), False),
    ],
)
def test_every_method_gives_the_product(num_ranks, batch, counts, order, check_vma):
    """Bias once; uneven tokens, also none, of several batches; rank and device number differ."""
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_random_values_of_each_type(dtype):
    """More rows and columns than one; float32 sums, rounded once."""
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

            for name, results in run_once(on_ranks(local, mesh_of(p)), x, w, bias).items():
                assert {got.dtype for got in results} == types
                for got in results:
                    close(got, expect(x, w, bias), got.dtype, name)


def test_operands_of_different_types():
    """bfloat16 tokens with a float32 weight, or the other way; a bias of any float type."""
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
    w = np.stack([w[0]] * p)  # the gathered product is then the same on all ranks
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


def test_sums_are_in_the_order_of_the_ranks():
    """Float32 sums of 1e8, 1, -1e8 and 3 tell in which order they were made, on every rank."""
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
    [*((*group, AxisType.Auto) for group in GROUPED), (*GROUPED[0], AxisType.Explicit)],
)
def test_groups_of_ranks_are_independent(names, sizes, axes, kind):
    """tp as either axis of a mesh, or as two of them; with automatic and with explicit axes."""
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


def test_where_other_axes_are_automatic():
    """shard_map over tp alone: the batch is split over an axis that it leaves to XLA."""
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


# ---- Inside of other programs.


@pytest.mark.parametrize("gather, scatter", [("ring", "pipeline"), ("none", "ring")])
def test_inside_of_scan(gather, scatter):
    """A layer of two products, its result the next one's input."""
    p, layers = 3, 4
    x = integers(0, p, 2, K)
    up = np.sign(integers(1, p, layers, K, 2))
    down = np.sign(integers(2, p, layers, 2, K))

    def local(x, up, down):
        def layer(x, weights):
            hidden = all_gather_matmul(x, weights[0], axis_name=AXIS, method=gather)
            out = matmul_reduce_scatter(hidden, weights[1], axis_name=AXIS, method=scatter)
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
    """Examples of tokens and weights, of tokens alone in any dimension, of weights alone."""
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


def test_many_calls_beside_other_collectives():
    """XLA runs calls of one program in any order, and ours between its own."""
    p = 4
    x, w = integers(0, p, 4, 4), integers(1, p, 4, 4)

    def local(x, w):
        total = 0
        for i in range(8):
            every = all_gather_matmul(x + i, w, axis_name=AXIS, method="ring")
            total += matmul_reduce_scatter(every, w, axis_name=AXIS, method="pipeline")
            total += jax.lax.psum(x * i, AXIS)
        return total

    expected = np.zeros(x.shape)
    for i in range(8):
        expected += oracle.matmul_reduce_scatter(oracle.all_gather_matmul(x + i, w), w)
        expected += (x * i).sum(0)
    equal(on_ranks(local, mesh_of(p))(x, w), expected)


def test_without_jit():
    x, w, bias = of_scatter(2, (), 4)
    run = partial(matmul_reduce_scatter, axis_name=AXIS, method="ring")
    got = on_ranks(lambda x, w, b: run(x, w, bias=b), mesh_of(2), jit=False)(x, w, bias)
    equal(got, oracle.matmul_reduce_scatter(x, w, bias))


def test_nothing_to_multiply():
    """No tokens, nothing to contract, or no columns."""
    p = 2
    for tokens, k, n in ((0, K, N), (4, 0, N), (4, K, 0)):
        x, w = np.ones((p, tokens, k), np.float32), np.ones((p, k, n), np.float32)
        for op, expect in (
            (all_gather_matmul, oracle.all_gather_matmul),
            (matmul_reduce_scatter, oracle.matmul_reduce_scatter),
        ):
            for name, got in run_all(op, mesh_of(p), x, w).items():
                equal(got, expect(x, w), (name, x.shape, w.shape))


# ---- Derivatives.


def dense(x, w, bias):
    return x @ w + bias


def over_mesh(fn, mesh, kind, batch):
    """The product of whole arrays, as `dense`: x and w split as the layer wants them."""
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


def with_gathered(op, num_ranks):
    """Each method, those that gather with what the derivative needs kept, or gathered again."""
    for name, fn in methods(op, num_ranks).items():
        if op is matmul_reduce_scatter:
            yield name, fn
        else:
            for gathered in ("keep", "again"):
                yield f"{name}, {gathered}", partial(fn, gathered=gathered)


@pytest.mark.parametrize("op", [all_gather_matmul, matmul_reduce_scatter])
def test_derivatives_equal_the_dense_ones(op):
    """Of every method, through shard_map, with a bias that is split or one for all ranks."""
    M, p, batch = 8, 4, (2,)
    x, w, bias = integers(0, *batch, M, K * p), integers(1, K * p, N * p), integers(2, N * p)
    dy = integers(3, *batch, M, N * p)
    expected = jax.vjp(dense, x, w, bias)[1](dy)
    mesh = mesh_of(p, np.roll(np.arange(p), 1))
    programs = {
        name: over_mesh(fn, mesh, op, [None] * len(batch)) for name, fn in with_gathered(op, p)
    }

    @jax.jit
    def gradients(*operands):
        return {name: jax.vjp(fn, *operands)[1](dy) for name, fn in programs.items()}

    for name, got in run_once(gradients, x, w, bias).items():
        for part, one, want in zip(("dx", "dw", "dbias"), got, expected, strict=True):
            equal(one, want, f"{name}, {part}")


def inner(a, b):
    return float(np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64)))


@pytest.mark.parametrize(
    "op, expect",
    [
        (all_gather_matmul, oracle.all_gather_matmul_gradients),
        (matmul_reduce_scatter, oracle.matmul_reduce_scatter_gradients),
    ],
)
def test_derivatives_of_uneven_tokens(op, expect):
    """Exact; NaN behind a rank's own tokens, of x or of dy, reaches nothing."""
    p, counts, batch = 3, (2, 0, 4), (2,)
    make = of_gather if op is all_gather_matmul else of_scatter
    x, w, bias = make(p, batch, max(counts) if op is all_gather_matmul else sum(counts))
    rows = sum(counts) if op is all_gather_matmul else max(counts)
    dy = integers(4, p, *batch, rows, N)
    x, dy = (
        (with_nan_behind(x, counts), dy)
        if op is all_gather_matmul
        else (x, with_nan_behind(dy, counts))
    )
    options = {"axis_name": AXIS, "row_counts": counts}

    def local(x, w, bias, dy):
        gradients = lambda fn: jax.vjp(lambda x, w, b: fn(x, w, bias=b, **options), x, w, bias)
        return {name: gradients(fn)[1](dy) for name, fn in with_gathered(op, p)}

    results = run_once(on_ranks(local, mesh_of(p), check_vma=False), x, w, bias, dy)
    expected = expect(x, w, dy, counts)
    for name, got in results.items():
        for part, one, want in zip(("dx", "dw", "dbias"), got, expected, strict=True):
            equal(one, want, f"{name}, {part}")


def test_derivatives_are_adjoint():
    """<f(x), y> = <x, f'(y)>, in x and in w, in float64."""
    with jax.enable_x64(True):
        p, counts = 3, (1, 4, 2)
        x, w, _ = of_gather(p, (2,), max(counts), normal, dtype=np.float64)
        for rank, count in enumerate(counts):
            x[rank, :, count:] = 0
        whole, y_gather = normal(4, p, 2, 7, K), normal(5, p, 2, 7, N)
        whole, y_gather = whole.astype(np.float64), y_gather.astype(np.float64)
        y_scatter = normal(6, p, 2, max(counts), N).astype(np.float64)

        for op, tokens, y in (
            (all_gather_matmul, x, y_gather),
            (matmul_reduce_scatter, whole, y_scatter),
        ):

            def local(x, w, y, op=op):
                results = {}
                for name, fn in with_gathered(op, p):
                    run = partial(fn, axis_name=AXIS, row_counts=counts)
                    out, pull = jax.vjp(run, x, w)
                    results[name] = out, *pull(y)
                return results

            for name, (out, dx, dw) in run_once(on_ranks(local, mesh_of(p)), tokens, w, y).items():
                assert out.dtype == dx.dtype == dw.dtype == np.float64
                assert inner(out, y) == pytest.approx(inner(tokens, dx), rel=1e-12), name
                assert inner(out, y) == pytest.approx(inner(w, dw), rel=1e-12), name


@pytest.mark.parametrize(
    "op, types, rows, expect",
    [
        (all_gather_matmul, ("bfloat16", "float32"), 80, oracle.all_gather_matmul_gradients),
        (
            matmul_reduce_scatter,
            ("bfloat16", "bfloat16"),
            20,
            oracle.matmul_reduce_scatter_gradients,
        ),
    ],
)
def test_derivatives_of_narrow_types(op, types, rows, expect):
    """Each gradient has its operand's type and is rounded once, from float32 sums."""
    p = 2
    x, w, bias = (jnp.asarray(a) for a in of_gather(p, (), 40, normal))
    x, w, bias = x.astype(types[0]), w.astype(types[1]), bias.astype(types[0])
    dy = jnp.asarray(normal(3, p, rows, N)).astype(jnp.promote_types(*types))

    def local(x, w, bias, dy):
        gradients = lambda fn: jax.vjp(lambda x, w, b: fn(x, w, bias=b, axis_name=AXIS), x, w, bias)
        return {name: gradients(fn)[1](dy) for name, fn in with_gathered(op, p)}

    expected = expect(x, w, dy)
    for name, got in run_once(on_ranks(local, mesh_of(p)), x, w, bias, dy).items():
        for like, one, want in zip((x, w, bias), got, expected, strict=True):
            assert one.dtype == like.dtype
            close(one, want, like.dtype, name)


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

    second = lambda fn: run_once(jax.jit(jax.grad(partial(loss, fn), argnums=(0, 1))), x, w)
    mapped = over_mesh(partial(op, method="ring", **options), mesh_of(p), op, [])
    for got, want in zip(second(mapped), second(dense), strict=True):
        close(got, np.asarray(want, np.float64), "float32")


@pytest.mark.parametrize("gather, scatter", [("ring", "pipeline"), ("none", "ring")])
def test_mlp_equals_the_unsharded_one(gather, scatter):
    """Two layers with gelu and biases; the batch over data, tokens and features over tp."""
    B, S, D, F = 2, 8, 6, 12
    mesh = permuted_mesh((2, 4), ("data", "tp"))
    draw = lambda seed, *shape: normal(seed, *shape) / np.float32(np.sqrt(shape[0]))
    params = [draw(1, D, F), draw(2, F), draw(3, F, D), draw(4, D)]
    x, target = normal(5, B, S, D), normal(6, B, S, D)

    def unsharded(x, up, up_bias, down, down_bias):
        return jax.nn.gelu(x @ up + up_bias) @ down + down_bias

    def sharded(x, up, up_bias, down, down_bias):
        options: Any = {"axis_name": "tp"}
        hidden = all_gather_matmul(x, up, bias=up_bias, method=gather, gathered="again", **options)
        hidden = jax.nn.gelu(hidden)
        return matmul_reduce_scatter(hidden, down, bias=down_bias, method=scatter, **options)

    tokens = P("data", "tp")
    weights = P(None, "tp"), P("tp"), P("tp", None), P()
    layer = jax.shard_map(sharded, mesh=mesh, in_specs=(tokens, *weights), out_specs=tokens)

    def loss(layer, x, *params):
        return jnp.sum(layer(x, *params) * target)

    value = lambda layer: jax.jit(jax.value_and_grad(partial(loss, layer), argnums=range(5)))
    expected, gradients = value(unsharded)(x, *params)
    got, found = value(layer)(x, *params)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for one, want in zip(found, gradients, strict=True):
        close(one, np.asarray(want), "float32")
