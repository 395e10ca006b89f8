"""`gemm` on one device: transpositions, derivatives, types, blocks, fused epilogues, threads.

The contract (`tests/contract`) calls it with a bias and GELU in all ways.
"""

import ctypes
import pathlib
import re
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import K, N, close, equal, integers, normal
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import permuted_mesh
from scaled_gemm_cases import (
    MXFP8,
    TRANSPOSED,
    WIDE,
    all_epilogues,
    check_all,
    draw,
    gelu,
    gelu_derivative,
    in_layout,
    laid,
    near,
    scaled,
)

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


def test_plain_product_and_its_derivative():
    """Every transposition, with several contracted and several free dimensions."""
    calls, operands, wants = {}, {}, {}
    for lhs_shape, rhs_shape, dims, text in LAYOUTS:
        lhs, rhs = integers(0, *lhs_shape), integers(1, *rhs_shape)
        product, pull = jax.vjp(partial(jnp.einsum, text), lhs, rhs)
        free = [n for d, n in enumerate(rhs_shape) if not {d, d - rhs.ndim} & set(dims[1])]
        bias, dy = integers(2, np.prod(free, dtype=int)), integers(3, *product.shape)
        calls[text] = lambda x, w, b, dims=dims: gemm(x, w, bias=b, contracting_dims=dims)
        operands[text] = lhs, rhs, bias, dy
        dbias = dy.reshape(-1, bias.size).sum(0)
        wants[text] = product + bias.reshape(free), *pull(dy), dbias

    @jax.jit
    def run(operands):
        results = {}
        for text, (*given, dy) in operands.items():
            out, pull = jax.vjp(calls[text], *given)
            results[text] = out, *pull(dy)
        return results

    for text, results in run(operands).items():
        for got, want in zip(results, wants[text], strict=True):
            equal(got, want, text)


def test_operands_that_explicit_axes_shard():
    """The product is whole, as one device computes it; gradients are sharded like the operands."""
    mesh = permuted_mesh((2, 2), ("a", "b"), AxisType.Explicit)
    values = integers(0, 4, 8), integers(1, 8, 6), integers(2, 6)
    specs = P("a"), P("b", "a"), P("b")
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    operands = list(map(put, values, specs))

    def loss(x, w, b):
        out = gemm(x, w, bias=b)
        return out.sum() + gemm(x, w, bias=b, fuse_gelu=True)[1].sum(), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*operands)
    equal(out, np.matmul(*values[:2]) + values[2])
    want = jax.grad(lambda x, w, b: 2 * (x @ w + b).sum(), (0, 1, 2))(*values)
    for got, expected, operand in zip(gradients, want, operands, strict=True):
        equal(got, expected)
        assert jax.typeof(got) == jax.typeof(operand)


def test_plain_product_of_types():
    """Mixed types, and a wide result of narrow operands."""
    lhs, rhs = jnp.asarray(integers(0, 4, K), jnp.bfloat16), jnp.asarray(integers(1, K, N))
    expected = np.asarray(lhs, np.float32) @ np.asarray(rhs)
    assert gemm(lhs, rhs).dtype == jnp.float32
    equal(gemm(lhs, rhs), expected)
    narrow = gemm(lhs, rhs.astype(jnp.float16), preferred_element_type=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    equal(narrow, np.asarray(jnp.asarray(expected, jnp.bfloat16)))
    gradients = jax.grad(lambda *operands: jnp.sum(gemm(*operands)), argnums=(0, 1))(lhs, rhs)
    assert [g.dtype for g in gradients] == [lhs.dtype, rhs.dtype]


@pytest.mark.usefixtures("unchecked_types")  # of a list
def test_plain_product_under_transformations():
    """vmap of one operand, second derivatives, lists, and arrays without elements."""
    lhs, rhs = jnp.asarray(integers(0, 3, 4, K)), jnp.asarray(integers(1, 3, K, N))
    stage = jax.vmap(gemm, in_axes=(0, None), spmd_axis_name="stage")
    twice = lambda fn: jax.grad(
        lambda a, b: jnp.sum(jax.grad(lambda a: jnp.sum(fn(a, b) ** 3))(a) ** 2)
    )
    signs = jnp.sign(lhs[0]), jnp.sign(rhs[0])  # keeps all numbers below 2**24
    with jax.set_mesh(jax.make_mesh((3,), ("stage",), axis_types=(AxisType.Auto,))):
        equal(jax.jit(stage)(lhs, rhs[0]), lhs @ rhs[0])
    equal(jax.jit(twice(gemm))(*signs), jax.jit(twice(jnp.matmul))(*signs))
    rows: Any = lhs[0].tolist()
    equal(jax.jit(jax.vmap(partial(gemm, rows)))(rhs), lhs[0] @ rhs)
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
    lhs, rhs = jnp.asarray(a, "bfloat16"), jnp.asarray(b, "bfloat16")
    call = partial(gemm, bias=jnp.asarray(bias), preferred_element_type=out)
    for got in call(lhs, rhs), call(lhs.T, rhs.T, contracting_dims=((0,), (1,))):
        np.testing.assert_array_equal(got, jnp.asarray(a @ b + bias, out))


# ---- Epilogues.


@pytest.mark.parametrize("mode", [WIDE, MXFP8])
def test_every_transposition(mode):
    """In float32 or bfloat16; and by XLA."""
    m, k = 70, 64  # two blocks of scales
    narrow = partial(np.asarray, dtype=jnp.bfloat16)
    bias, gelu_input = narrow(normal(2, N)), narrow(3 * normal(3, m, N))
    kinds = [("float32", None)], [("bfloat16", None), ("float32", "xla")]
    calls, operands, wants = {}, {}, {}
    for left, right in TRANSPOSED:
        draw_one = lambda seed, *how: draw(seed, 1, mode, *how)
        lhs, rhs, dims = in_layout(left, right, m, k, N, draw_one)
        key = f"{left}, {right}"
        calls[key], _ = scaled(lhs, rhs, mode, contracting_dims=dims)
        operands[key] = [x[0] for x in (*lhs[:2], *rhs[:2])]
        of_rhs = laid(rhs.values[0], "column" if right else "row")
        wants[key] = laid(lhs.values[0], "column" if left else "row") @ of_rhs, of_rhs.sum(0)

    def local(operands):
        run = lambda call, key, out, implementation: all_epilogues(
            partial(call, *operands[key], implementation=implementation),
            *map(jnp.asarray, (bias, gelu_input)),
            preferred_element_type=out,
        )
        return {
            key: [run(call, key, *kind) for kind in kinds[number]]
            for number, (key, call) in zip((0, 1, 1, 0), calls.items(), strict=True)
        }

    added, before = oracle.wide(bias, gelu_input)
    for key, results in jax.jit(local)(operands).items():
        for result in results:
            product, rhs_sum = wants[key]
            check_all(result, product, added, before, rhs_sum, key)


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


def test_second_derivative_of_gelu():
    with jax.enable_x64(True):
        a, b = (jnp.asarray(normal(*shape), np.float64) for shape in ((0, 5, 4), (1, 4, N)))
        plain = lambda a, b: jax.nn.gelu(a @ b)
        fused = lambda a, b: gemm(a, b, fuse_gelu=True)[0]
        slope = lambda fn: lambda a: jnp.sum(jax.grad(lambda a: jnp.sum(fn(a, b) ** 2))(a) * a)
        got, want = jax.jit(lambda a: [jax.grad(slope(fn))(a) for fn in (fused, plain)])(a)
        close(got, want, "float64")


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


def test_products_use_a_copy_of_scipys_blas():
    """One thread each, in memory of their own; the BLAS of SciPy keeps its number of threads."""
    equal(
        gemm(*map(jnp.asarray, (integers(0, 3, K), integers(1, K, N)))),
        integers(0, 3, K) @ integers(1, K, N),
    )
    maps = pathlib.Path("/proc/self/maps").read_text()
    found = set(re.findall(r"(/\S*/(?:scipy|numpy)\.libs/\S*openblas\S*)", maps))
    threads = {}
    for path in found:  # NumPy's is a library of its own, which nothing touches
        name = "scipy_openblas_get_num_threads" + "64_" * ("64_" in path)
        threads[path] = getattr(ctypes.CDLL(path), name)()
    assert "/memfd:blas" in maps or not any("scipy.libs" in path for path in found)
    assert len(set(threads.values())) <= 1, threads
