"""`gemm` on one device: transpositions, derivatives, types, blocks, fused epilogues, threads."""

import itertools
import os
import subprocess
import sys
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import K, N, close, equal, integers, normal
from epilogues import WIDE, all_epilogues, check_all, draw, scaled
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import permuted_mesh
from scaled_gemm_cases import MXFP8, gelu, gelu_derivative, laid, near

from jax_cp_dispatch import gemm

LAYOUTS = [
    # lhs, rhs, contracting dimensions, the same as einsum
    ((2, 3, 4, 5), (4, 5, 6, 7), ((2, 3), (0, 1)), "abkl,klcd->abcd"),
    ((4, 5, 2, 3), (4, 5, 6, 7), ((0, 1), (0, 1)), "klab,klcd->abcd"),
    ((2, 3, 4, 5), (6, 7, 4, 5), ((2, 3), (2, 3)), "abkl,cdkl->abcd"),
    ((4, 5, 2, 3), (6, 7, 4, 5), ((0, 1), (-2, -1)), "klab,cdkl->abcd"),
    ((5,), (5, 6), ((-1,), (0,)), "k,kc->c"),
    ((2, 5), (5,), ((-1,), (0,)), "ak,k->a"),
]


@pytest.mark.parametrize("lhs, rhs, dims, text", LAYOUTS)
def test_plain_product_and_its_derivative(lhs, rhs, dims, text):
    """Every transposition, with several contracted and several free dimensions."""
    lhs, rhs = integers(0, *lhs), integers(1, *rhs)
    expected, pull = jax.vjp(partial(jnp.einsum, text), lhs, rhs)
    bias = integers(2, rhs.size // np.prod([rhs.shape[d] for d in dims[1]]))
    shape = [size for d, size in enumerate(rhs.shape) if d - rhs.ndim not in dims[1]
             and d not in dims[1]]  # fmt: skip

    def both(lhs, rhs, bias, dy):
        call = lambda *operands: gemm(*operands[:2], bias=bias, contracting_dims=dims)
        out, pull = jax.vjp(call, lhs, rhs)
        dbias = jax.grad(lambda b: jnp.sum(gemm(lhs, rhs, bias=b, contracting_dims=dims)))(bias)
        return out, pull(dy), dbias

    dy = integers(3, *expected.shape)
    out, gradients, dbias = jax.jit(both)(lhs, rhs, bias, dy)
    equal(out, expected + bias.reshape(shape))
    for got, want in zip(gradients, pull(dy), strict=True):
        equal(got, want)
    equal(dbias, np.full(bias.shape, expected.size // bias.size))


@pytest.mark.parametrize("specs", [(P("a"), P(None, "b")), (P(), P("b", "a"))])
def test_operands_that_explicit_axes_shard(specs):
    """The product is whole, as one device computes it; gradients are sharded like the operands."""
    mesh = permuted_mesh((2, 2), ("a", "b"), AxisType.Explicit)
    values = integers(0, 4, 8), integers(1, 8, 6)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    operands = list(map(put, values, specs))
    bias = put(integers(2, 6), P("b"))
    outs = jax.jit(lambda x, w, b: gemm(x, w, bias=b))(*operands, bias)
    equal(outs, np.matmul(*values) + np.asarray(bias))
    loss = lambda x, w, b: gemm(x, w, bias=b).sum() + gemm(x, w, bias=b, fuse_gelu=True)[1].sum()
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*operands, bias)
    want = jax.grad(lambda x, w, b: 2 * (x @ w + b).sum(), (0, 1, 2))(*values, np.asarray(bias))
    for got, expected, operand in zip(gradients, want, (*operands, bias), strict=True):
        equal(got, expected)
        assert jax.typeof(got) == jax.typeof(operand)


def test_plain_product_of_types():
    """Mixed types, a wide result of narrow operands, float64."""
    lhs, rhs = jnp.asarray(integers(0, 4, K), jnp.bfloat16), jnp.asarray(integers(1, K, N))
    expected = np.asarray(lhs, np.float32) @ np.asarray(rhs)
    assert gemm(lhs, rhs).dtype == jnp.float32
    equal(gemm(lhs, rhs), expected)
    narrow = gemm(lhs, rhs.astype(jnp.float16), preferred_element_type=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    equal(narrow, np.asarray(jnp.asarray(expected, jnp.bfloat16)))
    gradients = jax.grad(lambda *operands: jnp.sum(gemm(*operands)), argnums=(0, 1))(lhs, rhs)
    assert [g.dtype for g in gradients] == [lhs.dtype, rhs.dtype]
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        lhs, rhs = (jnp.asarray(rng.normal(size=shape)) for shape in ((4, 300), (300, N)))
        np.testing.assert_allclose(gemm(lhs, rhs), lhs @ rhs, rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("unchecked_types")  # of a list
def test_plain_product_under_transformations():
    """vmap of one operand, second derivatives, lists, and arrays without elements."""
    lhs, rhs = jnp.asarray(integers(0, 3, 4, K)), jnp.asarray(integers(1, 3, K, N))
    equal(jax.vmap(gemm, in_axes=(None, 0))(lhs[0], rhs), lhs[0] @ rhs)
    stage = jax.vmap(gemm, in_axes=(0, None), spmd_axis_name="stage")
    with jax.set_mesh(jax.make_mesh((3,), ("stage",), axis_types=(AxisType.Auto,))):
        equal(jax.jit(stage)(lhs, rhs[0]), lhs @ rhs[0])
    twice = lambda fn: jax.grad(
        lambda a, b: jnp.sum(jax.grad(lambda a: jnp.sum(fn(a, b) ** 3))(a) ** 2)
    )
    signs = jnp.sign(lhs[0]), jnp.sign(rhs[0])  # keeps all numbers below 2**24
    equal(jax.jit(twice(gemm))(*signs), jax.jit(twice(jnp.matmul))(*signs))
    rows: Any = lhs[0].tolist()
    equal(gemm(rows, rhs[0]), lhs[0] @ rhs[0])
    bias = integers(2, N)
    nothing = gemm(lhs[0, :, :0], rhs[0, :0], bias=jnp.asarray(bias))
    equal(nothing, np.stack([bias] * 4))


@pytest.mark.parametrize(
    "shape, out", [((600, 1100, 1100), "bfloat16"), ((600, 300, 1100), "float32")]
)
def test_narrow_operands_of_several_blocks(shape, out):
    """More rows, columns and contracted elements than one widened block."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b, bias = (rng.integers(-2, 3, size).astype(np.float32) for size in ((m, k), (k, n), (n,)))
    want = jnp.asarray(a @ b + bias, out)
    lhs, rhs = jnp.asarray(a, "bfloat16"), jnp.asarray(b, "bfloat16")
    bias = jnp.asarray(bias)
    plain = gemm(lhs, rhs, bias=bias, preferred_element_type=out)
    turned = gemm(
        lhs.T, rhs.T, contracting_dims=((0,), (1,)), bias=bias, preferred_element_type=out
    )
    np.testing.assert_array_equal(plain, want)
    np.testing.assert_array_equal(turned, want)


# ---- Epilogues.

DEPTH = 64  # two blocks of scales
LAYOUTS_OF_TWO = list(itertools.product((False, True), (False, True)))  # lhs, rhs transposed


@pytest.mark.parametrize("mode", [WIDE, MXFP8])
def test_every_transposition(mode):
    """In float32, and once more for each: in bfloat16, by XLA, or both."""
    m = 70
    narrow = partial(np.asarray, dtype=jnp.bfloat16)
    bias, gelu_input = narrow(normal(2, N)), narrow(3 * normal(3, m, N))
    others = ("float32", "xla"), ("bfloat16", None), ("bfloat16", "xla"), ("bfloat16", None)
    calls, operands, wants = {}, {}, {}
    for left, right in LAYOUTS_OF_TWO:
        lhs = draw(0, 1, mode, (DEPTH, m) if left else (m, DEPTH), "column" if left else "row")
        rhs = draw(1, 1, mode, (N, DEPTH) if right else (DEPTH, N), "row" if right else "column")
        dims = ((0,) if left else (1,), (1,) if right else (0,))
        calls[left, right], _ = scaled(lhs, rhs, mode, contracting_dims=dims)
        operands[str((left, right))] = [x[0] for x in (*lhs[:2], *rhs[:2])]
        by_row = laid(lhs.values[0], "column" if left else "row")
        of_rhs = laid(rhs.values[0], "column" if right else "row")
        wants[str((left, right))] = by_row @ of_rhs, of_rhs.sum(0)

    def local(operands):
        return {
            str(layout): [
                all_epilogues(
                    partial(call, *operands[str(layout)]),
                    *map(jnp.asarray, (bias, gelu_input)),
                    preferred_element_type=out,
                    implementation=implementation,
                )
                for out, implementation in (("float32", None), other)
            ]
            for (layout, call), other in zip(calls.items(), others, strict=True)
        }

    added, before = oracle.wide(bias, gelu_input)
    for name, results in jax.jit(local)(operands).items():
        for result in results:
            product, rhs_sum = wants[name]
            check_all(result, product, added, before, rhs_sum, name)


def test_gelu_of_large_arguments():
    """There is no NaN where the cube overflows or tanh is 1."""
    x = np.array([-1e20, -1e13, -200, -30, -9, -5, -1, -1e-3, 0, 1e-3, 1, 5, 9, 30, 200, 1e20])
    x = x[:, None].astype(np.float32)
    one = jnp.ones((1, 1))
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            values, ones = jnp.asarray(x, dtype), jnp.ones((x.size, 1), dtype)
            out, pre = gemm(values, one.astype(dtype), fuse_gelu=True)
            np.testing.assert_array_equal(pre, x)
            rtol = 1e-5 if dtype == "float32" else 1e-13
            np.testing.assert_allclose(out, gelu(x), rtol=rtol, atol=rtol)
            slope = gemm(ones, one.astype(dtype), fuse_gelu=True, grad=True, gelu_input=values)
            want = gelu_derivative(np.clip(x, -30, 30))  # 0 and 1 outside
            np.testing.assert_allclose(slope, want, rtol=rtol, atol=rtol)


def test_results_of_several_dimensions():
    """pre_gelu and gelu_input have the output's shape; a bias is one row."""
    lhs, rhs = normal(0, 2, 3, 4), normal(1, 4, 5, 6)
    lhs, rhs, bias = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(normal(2, 30))
    out, pre = gemm(lhs, rhs, bias=bias, fuse_gelu=True)
    want = np.einsum("abk,kcd->abcd", *oracle.wide(lhs, rhs)) + np.reshape(bias, (5, 6))
    near(pre, want)
    near(out, gelu(want))
    out, dbias = gemm(lhs, rhs, fuse_gelu=True, fuse_bias=True, grad=True, gelu_input=pre)
    near(out, (want - np.reshape(bias, (5, 6))) * gelu_derivative(pre))
    near(dbias, np.asarray(out, np.float64).sum((0, 1)).ravel())


def test_derivative_of_gelu():
    """First and second derivatives of both results, in float64."""
    with jax.enable_x64(True):
        draw = lambda seed, *shape: jnp.asarray(normal(seed, *shape), np.float64)
        a, b, bias = draw(0, 5, 4), draw(1, 4, N), draw(2, N)
        dout, dpre = draw(3, 5, N), draw(4, 5, N)
        z = np.asarray(a @ b + bias)
        dz = dout * gelu_derivative(z) + dpre
        want = dz @ b.T, a.T @ dz, dz.sum(0)

        def gradients(a, b, bias, dout, dpre):
            results = {}
            for left, right in ((True, False), (False, True)):
                dims = ((0,) if left else (1,), (1,) if right else (0,))
                fused = partial(gemm, contracting_dims=dims, fuse_gelu=True)
                call = lambda a, b, bias, fused=fused, left=left, right=right: fused(
                    a.T if left else a, b.T if right else b, bias=bias
                )
                results[f"{left}, {right}"] = jax.vjp(call, a, b, bias)[1]((dout, dpre))
            return results

        for name, got in jax.jit(gradients)(a, b, bias, dout, dpre).items():
            for one, expected in zip(got, want, strict=True):
                close(one, expected, "float64", name)

        plain = lambda a, b: jax.nn.gelu(a @ b)
        fused = lambda a, b: gemm(a, b, fuse_gelu=True)[0]
        slope = lambda fn: lambda a: jnp.sum(jax.grad(lambda a: jnp.sum(fn(a, b) ** 2))(a) * a)
        close(jax.jit(jax.grad(slope(fused)))(a), jax.grad(slope(plain))(a), "float64")


def test_epilogues_of_empty_operands():
    """No rows, a contracted dimension of size zero, or no columns."""
    sizes = (0, 4, N), (5, 0, N), (5, 4, 0)
    operands = [(normal(0, n), normal(1, m, n)) for m, _, n in sizes]

    def run(operands):
        return [
            all_epilogues(partial(gemm, jnp.ones((m, k)), jnp.ones((k, n))), bias, gelu_input)
            for (m, k, n), (bias, gelu_input) in zip(sizes, operands, strict=True)
        ]

    results = jax.jit(run)(operands)
    for (m, k, n), (bias, gelu_input), result in zip(sizes, operands, results, strict=True):
        check_all(result, np.full((m, n), k), bias, gelu_input, np.full(n, k), (m, k, n))


def test_one_device_uses_all_cores_and_keeps_scipys_thread_count():
    """The BLAS that SciPy has loaded keeps its number of threads."""
    program = """
import ctypes, os, re
os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp, numpy as np, scipy.linalg.cython_blas
def count():
    paths = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    for path in sorted(p for p in paths if p.startswith("/") and "scipy.libs" in p):
        return ctypes.CDLL(path).scipy_openblas_get_num_threads()
before = count()
from jax_cp_dispatch import gemm
from jax_cp_dispatch.comm_gemm.engine.custom_call import load_blas  # inner: at most once
a = np.random.default_rng(0).integers(-2, 3, (300, 200)).astype(np.float32)
np.testing.assert_array_equal(gemm(a, a.T), a @ a.T)
assert count() == before, (before, count())
print(load_blas() != "" or before is None)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
