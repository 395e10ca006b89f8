"""`gemm` without a buffer: every transposition, its derivative, types, blocks, and threads."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import K, N, equal, integers
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import permuted_mesh

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
    """vmap, second derivatives, and arrays without elements."""
    lhs, rhs = jnp.asarray(integers(0, 3, 4, K)), jnp.asarray(integers(1, 3, K, N))
    equal(jax.vmap(gemm)(lhs, rhs), lhs @ rhs)
    equal(jax.vmap(gemm, in_axes=(None, 0))(lhs[0], rhs), lhs[0] @ rhs)
    twice = lambda fn: jax.grad(
        lambda a, b: jnp.sum(jax.grad(lambda a: jnp.sum(fn(a, b) ** 3))(a) ** 2)
    )
    signs = jnp.sign(lhs[0]), jnp.sign(rhs[0])  # keeps all numbers below 2**24
    equal(jax.jit(twice(gemm))(*signs), jax.jit(twice(jnp.matmul))(*signs))
    assert gemm(lhs[0, :0], rhs[0]).shape == (0, N)
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
from jax_cp_dispatch.comm_gemm.engine.custom_call import load_blas
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
