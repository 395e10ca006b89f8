"""Several weights of one x, gathered once, and weights of more than two dimensions."""

from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import close, equal, integers, methods, normal, with_gathered
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxprs import runs
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter

K, HEADS, HEAD_DIM, HIDDEN = 5, 2, 3, 7
Q = (HEADS, HEAD_DIM)
gather = partial(all_gather_matmul, axis_name=AXIS)


def flat(x, num_dims=2):
    """Joins the last dimensions, on each rank."""
    return np.asarray(x).reshape(*x.shape[:-num_dims], -1)


def test_each_product_and_one_gradient_of_x():
    """Weights [K, N, H] and [K, N], one with a bias; uneven tokens."""
    p, counts = 3, (2, 0, 4)
    rows, total = max(counts), sum(counts)
    x, wq, w = integers(0, p, 2, rows, K), integers(1, p, K, *Q), integers(2, p, K, HIDDEN)
    bias = integers(3, p, *Q)
    dq, dy = integers(4, p, 2, total, *Q), integers(5, p, 2, total, HIDDEN)

    def local(x, wq, w, bias, dq, dy):
        results = {}
        for name, fn in with_gathered(all_gather_matmul, p):
            if name in ("none, keep", "ring, again", "ring, atomic, keep", "xla, keep"):
                run = lambda x, w, b, fn=fn: fn(x, w, bias=b, axis_name=AXIS, row_counts=counts)
                out, pull = jax.vjp(run, x, (wq, w), (bias, None))
                results[name] = out, pull((dq, dy))
        return results

    results = on_ranks(local, mesh_of(p), check_vma=False)(x, wq, w, bias, dq, dy)
    flat_wq = flat(wq)
    q = oracle.all_gather_matmul(x, flat_wq, flat(bias), counts).reshape(*dq.shape)
    y = oracle.all_gather_matmul(x, w, None, counts)
    dx_q, dwq, dbias = oracle.all_gather_matmul_gradients(x, flat_wq, flat(dq), counts)
    dx_y, dw, _ = oracle.all_gather_matmul_gradients(x, w, dy, counts)
    for name, ((got_q, got_y), (dx, dws, (got_dbias, none))) in results.items():
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
        results, each = {}, methods(matmul_reduce_scatter, p)
        for name in ("none", "ring", "pipeline of 3", "xla"):
            run = lambda x, w, bias, fn=each[name]: fn(x, w, bias=bias, axis_name=AXIS)
            out, pull = jax.vjp(run, x, w, bias)
            results[name] = out, *pull(dy)
        return results

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
        out, pull = jax.vjp(lambda x: gather(x, (up, gate), method="ring"), x)
        return pull(tuple(map(jnp.ones_like, out)))[0]

    ones = np.ones((1, 1, 1), jnp.bfloat16)
    dx = on_ranks(gradient, mesh_of(1))(ones, ones * 256, np.ones((1, 1, 2), jnp.bfloat16))
    equal(dx, np.full((1, 1, 1), 258))


def test_one_gather_and_no_kept_copy_of_the_weights():
    p = 2
    x, up, gate = (np.ones(s, np.float32) for s in ((p, 2, K), (p, K, HIDDEN), (p, K, 4)))
    kept = []

    def local(x, up, gate):
        out, pull = jax.vjp(lambda x, *w: gather(x, w, method="ring"), x, up, gate)
        kept.extend(a.shape for a in jax.tree.leaves(pull))
        return pull(out)

    program = on_ranks(local, mesh_of(p), jit=False)
    assert runs(jax.make_jaxpr(program)(x, up, gate).jaxpr)["gemm"] == 2
    assert (K, HIDDEN) in kept and (K, HIDDEN + 4) not in kept


def test_scaled_weights():
    """Blocks of 32 have their own scales, so products are those of separate calls."""
    p = 2
    x, up, gate = normal(0, p, 4, 64), normal(1, p, 64, 32), normal(2, p, 64, 64)
    scaled = partial(gather, method="ring", scaling_mode="mxfp8_1d_scaling")
    local = lambda x, *w: (scaled(x, w), tuple(scaled(x, a) for a in w))
    together, apart = on_ranks(local, mesh_of(p))(x, up, gate)
    for one, want in zip(together, apart, strict=True):
        close(one, np.asarray(want, np.float64), "float32")


# ---- Global arrays.

SPECS = (P("dp", "tp"), P(None, "tp"), P(None, "tp"), P(None, "tp"), P("tp"), P("tp"))


def global_operands(rows):
    shapes = (4, rows, 12), (12, 8, 3), (12, 4, 3), (12, 8), (8, 3, 12), (8, 3)
    return [integers(i, *shape) for i, shape in enumerate(shapes)]


def block(mesh, x, wq, wk, up, out, bias):
    """q, k and another product of x, and the projection of q."""
    options: Any = {"axis_name": "tp", "mesh": mesh, "method": "ring"}
    q, k, hidden = all_gather_matmul(x, (wq, wk, up), bias=(bias, None, None), **options)
    return matmul_reduce_scatter(q, out, **options), k, hidden


def dense_block(x, wq, wk, up, out, bias):
    q = np.einsum("btd,dnh->btnh", x, wq) + bias
    return np.einsum("btnh,nhd->btd", q, out), np.einsum("btd,dnh->btnh", x, wk), x @ up


def dense_gradients(x, wq, wk, up, out, bias, dy, dk, dh):
    q = np.einsum("btd,dnh->btnh", x, wq) + bias
    dq = np.einsum("btd,nhd->btnh", dy, out)
    dx = np.einsum("btnh,dnh->btd", dq, wq) + np.einsum("btnh,dnh->btd", dk, wk) + dh @ up.T
    of_w = partial(np.einsum, "btd,btnh->dnh", x)
    dup, dout = np.einsum("btd,btf->df", x, dh), np.einsum("btnh,btd->nhd", q, dy)
    return dx, of_w(dq), of_w(dk), dup, dout, dq.sum((0, 1))


@pytest.mark.parametrize("kind, rows", [(AxisType.Auto, 7), (AxisType.Explicit, 8)])
def test_global_arrays(kind, rows):
    mesh, typed = permuted_mesh((2, 4), ("dp", "tp"), kind), kind == AxisType.Explicit
    arrays = global_operands(rows)
    expected = dense_block(*arrays)
    cotangents = [integers(10 + i, *a.shape) for i, a in enumerate(expected)]
    specs = SPECS if rows == 8 else (P("dp"), *SPECS[1:])
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    placed = [put(a, spec) for a, spec in zip(arrays, specs, strict=True)]

    @jax.jit
    def both(*arrays):
        out, pull = jax.vjp(partial(block, mesh), *arrays)
        like = lambda c, o: jax.sharding.reshard(c, jax.typeof(o).sharding) if typed else c
        return out, pull(tuple(map(like, cotangents, out)))

    compiled = both.lower(*placed).compile()
    out, gradients = compiled(*placed)
    wants = *expected, *dense_gradients(*arrays, *cotangents)
    for got, want in zip((*out, *gradients), wants, strict=True):
        equal(got, want)
    text = compiled.as_text() or ""
    if rows == 8:
        assert not any(c in text for c in ("all-gather", "reduce-scatter", "all-to-all"))
        for got, spec in zip(gradients, SPECS, strict=True):
            assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim)


def test_under_vmap():
    """Weights of each pipeline stage."""
    mesh = permuted_mesh((2, 4), ("dp", "tp"))
    x, wq, up = integers(0, 2, 4, 8, 12), integers(1, 2, 12, 8, 3), integers(2, 2, 12, 8)
    run = lambda x, *w: all_gather_matmul(x, w, axis_name="tp", method="ring", mesh=mesh)
    q, y = jax.jit(jax.vmap(run))(x, wq, up)
    equal(q, np.einsum("sbtd,sdnh->sbtnh", x, wq))
    equal(y, np.einsum("sbtd,sdf->sbtf", x, up))
