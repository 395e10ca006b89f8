"""GEMMs on one GPU against NumPy and jnp. Overlapped ones: test_gpu_processes.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import close, equal, integers, normal

from jax_cp_dispatch import gemm
from jax_cp_dispatch.gpu import raise_gpu_errors
from jax_cp_dispatch.scaling import ScalingMode, quantize

OURS: dict[str, Any] = {"implementation": "cuda_peer"}
BY_XLA: dict[str, Any] = {"implementation": "xla"}


@pytest.fixture(autouse=True)
def no_errors():
    yield
    raise_gpu_errors()


def is_gradient_of_gelu(got, want, z, dtype, name):
    """Compares within the rounding of the result and, in 16 bits, of the slope at z.

    There the library's tanh may be an approximation, so the slope has an error of one ulp at 1.
    """
    if dtype == "float32":
        return close(got, want, dtype, name)
    ulp = float(jnp.finfo(dtype).eps)
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert (error <= ulp * (np.abs(want) + np.abs(z))).all(), f"{name}: {error.max()}"


def are_column_sums(got, output, dtype):
    """Compares with sums of the returned output, made in float32 in any order and rounded once."""
    output = np.asarray(output).astype(np.float64)
    want = output.sum(0)
    of_sums = len(output) * float(np.finfo(np.float32).eps) / 2 * np.abs(output).sum(0)
    of_rounding = float(jnp.finfo(dtype).eps) / 2 * (np.abs(want) + of_sums)
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert (error <= of_sums + of_rounding).all(), error.max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [48, 44])  # the library's epilogues, and this package's own
def test_epilogues_equal_those_of_xla(dtype, n):
    x, w = normal(0, 40, 32, dtype=dtype), normal(1, 32, n, dtype=dtype)
    bias, pre = map(jnp.asarray, (normal(2, n, dtype=dtype), normal(3, 40, n, dtype=dtype)))
    z = x.astype(np.float64) @ w.astype(np.float64)
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "bias": {"bias": bias},
        "gelu": {"fuse_gelu": True},
        "bias, gelu": {"bias": bias, "fuse_gelu": True},
        "gradient of gelu": {"fuse_gelu": True, "grad": True, "gelu_input": pre},
        "gradient of bias": {"fuse_bias": True, "grad": True},
        "both": {"fuse_gelu": True, "fuse_bias": True, "grad": True, "gelu_input": pre},
    }
    for name, options in cases.items():
        run = lambda x, w, options=options, **where: jax.tree.leaves(gemm(x, w, **options, **where))
        got = jax.jit(functools.partial(run, **OURS))(x, w)
        want = jax.jit(functools.partial(run, **BY_XLA))(x, w)
        want = [np.asarray(xla).astype(np.float64) for xla in want]
        if "gelu_input" not in options:
            for ours, xla in zip(got, want, strict=True):
                close(ours, xla, dtype, name)
            continue
        is_gradient_of_gelu(got[0], want[0], z, dtype, name)
        if name == "both":  # the two outputs differ, and so do their sums
            are_column_sums(got[1], got[0], dtype)


@pytest.mark.parametrize("dims", [((1,), (0,)), ((0,), (0,)), ((1,), (1,)), ((0,), (1,))])
def test_layouts_are_exact_on_integers(dims):
    (left,), (right,) = dims
    x = integers(0, *((24, 32) if left else (32, 24)))
    w = integers(1, *((16, 32) if right else (32, 16)))
    got = jax.jit(functools.partial(gemm, contracting_dims=dims, **OURS))(x, w)
    equal(got, np.tensordot(x, w, ((left,), (right,))))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dims", [((1,), (0,)), ((1,), (1,)), ((0,), (0,))])
def test_tensor_scales(split, dims):
    (left,), (right,) = dims
    x = jnp.asarray(normal(0, *((64, 128) if left else (128, 64))))
    w = jnp.asarray(normal(1, *((48, 128) if right else (128, 48))))
    scaled_x, scaled_w = (quantize(a, ScalingMode.CURRENT_TENSOR_SCALING) for a in (x, w))
    product = functools.partial(
        gemm,
        scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING,
        lhs_scale_inv=scaled_x.scale_inv,
        rhs_scale_inv=scaled_w.scale_inv,
        contracting_dims=dims,
        use_split_accumulator=split,
        preferred_element_type=jnp.bfloat16,
    )
    got = jax.jit(functools.partial(product, **OURS))(scaled_x.data, scaled_w.data)
    want = jax.jit(functools.partial(product, **BY_XLA))(scaled_x.data, scaled_w.data)
    np.testing.assert_allclose(
        *(np.asarray(a).astype(np.float64) for a in (got, want)), rtol=0.125, atol=0.0625
    )
