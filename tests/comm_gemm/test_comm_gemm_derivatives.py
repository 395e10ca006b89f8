"""Derivatives of overlapped products: all methods, adjoints, second order, and a whole MLP.

Most programs contain every method, so many calls are in flight at the same time.
"""

from functools import partial
from typing import Any

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
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxprs import runs
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter


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


def with_gathered(op, num_ranks):
    """Each method; methods that gather keep the tokens for the derivative, or gather them again."""
    for name, fn in methods(op, num_ranks).items():
        if op is matmul_reduce_scatter:
            yield name, fn
        else:
            for gathered in ("keep", "again"):
                yield f"{name}, {gathered}", partial(fn, gathered=gathered)


@pytest.mark.parametrize("op", [all_gather_matmul, matmul_reduce_scatter])
def test_derivatives_equal_the_dense_ones(op):
    """For every method, through shard_map, with a sharded or replicated bias."""
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

    for name, got in gradients(x, w, bias).items():
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
    """Exact; NaN after a rank's own tokens, in x or dy, reaches no result."""
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

    results = on_ranks(local, mesh_of(p), check_vma=False)(x, w, bias, dy)
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

            for name, (out, dx, dw) in on_ranks(local, mesh_of(p))(tokens, w, y).items():
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
    """Each gradient has the type of its operand and is rounded once, from float32 sums."""
    p = 2
    x, w, bias = (jnp.asarray(a) for a in of_gather(p, (), 40, normal))
    x, w, bias = x.astype(types[0]), w.astype(types[1]), bias.astype(types[0])
    dy = jnp.asarray(normal(3, p, rows, N)).astype(jnp.promote_types(*types))

    def local(x, w, bias, dy):
        gradients = lambda fn: jax.vjp(lambda x, w, b: fn(x, w, bias=b, axis_name=AXIS), x, w, bias)
        return {name: gradients(fn)[1](dy) for name, fn in with_gathered(op, p)}

    expected = expect(x, w, dy)
    for name, got in on_ranks(local, mesh_of(p))(x, w, bias, dy).items():
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

    second = lambda fn: jax.jit(jax.grad(partial(loss, fn), argnums=(0, 1)))(x, w)
    mapped = over_mesh(partial(op, method="ring", **options), mesh_of(p), op, [])
    for got, want in zip(second(mapped), second(dense), strict=True):
        close(got, np.asarray(want, np.float64), "float32")


def test_mlp_equals_the_unsharded_one():
    """Two layers with gelu and biases; batch over data, tokens and features over tp."""
    B, S, D, F = 2, 8, 6, 12
    mesh = permuted_mesh((2, 4), ("data", "tp"))
    draw = lambda seed, *shape: normal(seed, *shape) / np.float32(np.sqrt(shape[0]))
    params = [draw(1, D, F), draw(2, F), draw(3, F, D), draw(4, D)]
    x, target = normal(5, B, S, D), normal(6, B, S, D)

    def unsharded(x, up, up_bias, down, down_bias):
        return jax.nn.gelu(x @ up + up_bias) @ down + down_bias

    def sharded(x, up, up_bias, down, down_bias):
        options: Any = {"axis_name": "tp"}
        hidden = all_gather_matmul(x, up, bias=up_bias, method="ring", gathered="again", **options)
        hidden = jax.nn.gelu(hidden)
        return matmul_reduce_scatter(hidden, down, bias=down_bias, method="pipeline", **options)

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
