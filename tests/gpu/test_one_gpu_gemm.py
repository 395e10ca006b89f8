"""GEMMs on one GPU, alone and overlapped with all ranks on it, against NumPy and jnp."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import close, equal, integers, normal
from comm_gemm_oracle import all_gather_matmul, gathered, matmul_reduce_scatter

from jax_cp_dispatch import gemm
from jax_cp_dispatch._ranks.communicator import Communicator  # inner: all ranks on one GPU
from jax_cp_dispatch.comm_gemm.engine.gemm_call import GemmCall, Overlap
from jax_cp_dispatch.comm_gemm.engine.on_gpu import run_all_ranks
from jax_cp_dispatch.comm_gemm.types import CommOverlapMethod, CommOverlapType
from jax_cp_dispatch.gpu import raise_gpu_errors
from jax_cp_dispatch.scaling import ScalingMode, quantize

AG, RS = CommOverlapType.AG, CommOverlapType.RS
NONE, BULK = CommOverlapMethod.NONE, CommOverlapMethod.BULK
PIPELINE, RING = CommOverlapMethod.PIPELINE, CommOverlapMethod.RING_EXCHANGE
OURS: dict[str, Any] = {"implementation": "cuda_peer"}
BY_XLA: dict[str, Any] = {"implementation": "xla"}


@pytest.fixture(autouse=True)
def no_errors():
    yield
    raise_gpu_errors()


# ---- Alone.


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


# ---- Overlapped, with all ranks on one GPU.

METHODS = {
    "gather": {
        "none": {"method": NONE},
        "ring": {"method": RING},
        "ring, atomic": {"method": RING, "atomic": True},
        "ring, pairs": {"method": RING, "aggregate": True},
        "ring, copied by a kernel": {"method": RING, "use_ce": False},
    },
    "scatter": {
        "none": {"method": NONE},
        "ring": {"method": RING},
        "pipeline of 1": {"method": PIPELINE, "num_splits": 1},
        "pipeline of 3": {"method": PIPELINE, "num_splits": 3},
        "pipeline, first gemm": {"method": PIPELINE, "overlap_first_gemm": True},
    },
}


def run(kind, options, counts, rows, *, batches=(), aux=False, **operands):
    """Returns each rank's output, of so many rows, and the rows that moved beside it."""
    call = GemmCall(
        op="test",
        lhs_boundary=operands["lhs"].ndim - 2,
        rhs_boundary=1,
        out_shape=(*batches, rows, operands["rhs"].shape[-1]),
        out_dtype=str(operands["lhs"].dtype),
        comm=Communicator(axis_names=("tp",), num_ranks=len(counts), deadline_ms=3000),
        overlap=Overlap(comm_type=AG if kind == "gather" else RS, **options),
        row_counts=counts,
        num_batches=int(np.prod(batches, dtype=int)),
        gathers_to_aux=aux,
        fuse_bias="bias" in operands,
    )
    return run_all_ranks(call, **operands)[:4:3]


def twice(*arguments, **options):
    """Compiles, and runs again on the same channel."""
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in arrays}
    program = jax.jit(lambda arrays: run(*arguments, **static, **arrays))
    return [program(arrays) for _ in range(3)][-1]


@pytest.mark.parametrize("counts", [(5, 5), (8, 3, 6, 1)])
@pytest.mark.parametrize("kind, name", [(kind, name) for kind in METHODS for name in METHODS[kind]])
def test_overlapped(kind, name, counts):
    p, options = len(counts), METHODS[kind][name]
    for batches in ((), (2,)) if kind == "gather" else ():
        x = integers(0, p, *batches, max(counts), 16)
        w, bias = integers(1, p, 16, 24), integers(2, p, 24)
        output, aux = twice(
            kind, options, counts, sum(counts), batches=batches, aux=True, lhs=x, rhs=w, bias=bias
        )
        equal(output, all_gather_matmul(x, w, bias, counts), name)
        equal(aux, np.stack([gathered(x, counts)] * p), name)
    for dtype in ("float32", "bfloat16") if kind == "scatter" else ():
        x, w = integers(0, p, sum(counts), 16, dtype=dtype), integers(1, p, 16, 24, dtype=dtype)
        bias = np.stack([integers(2, 24, dtype=dtype)] * p)
        output, _ = twice(kind, options, counts, max(counts), lhs=x, rhs=w, bias=bias)
        equal(output, matmul_reduce_scatter(x, w, bias, counts), name)


def test_a_loop_of_products_replays():
    """XLA may record the body once; each iteration reads another array."""
    rounds, (p, tokens, k) = 20, (2, 8, 32)
    rng = np.random.default_rng(0)
    # Permutes rows and signs, half of the columns on each rank: exact, and sums do not grow.
    first, second = (
        np.eye(k, dtype=np.float32)[rng.permutation(k)] * rng.choice([-1, 1], k).astype(np.float32)
        for _ in range(2)
    )
    x = integers(1, p, tokens, k)
    w = jnp.asarray(np.stack(np.split(first, p, axis=1)))
    v = jnp.asarray(np.stack(np.split(second, p, axis=0)))
    ring, counts = METHODS["gather"]["ring"], (tokens,) * p

    def body(i, x):
        hidden, _ = run("gather", ring, counts, p * tokens, lhs=x, rhs=w)
        return run("scatter", ring, counts, tokens, lhs=hidden, rhs=v)[0] + i

    got = jax.jit(lambda x: jax.lax.fori_loop(0, rounds, body, x))(jnp.asarray(x))
    want = x.astype(np.float64)
    for i in range(rounds):
        want = want @ first @ second + i
    equal(got, want)


@pytest.mark.parametrize("kind", METHODS)
def test_bulk(kind):
    p, rows, width = 4, 6, 10
    x, w = integers(0, p, 8, 16), integers(1, p, 16, 24)
    aux = integers(2, p, rows * (1 if kind == "gather" else p), width)
    output, moved = twice(kind, {"method": BULK}, (rows,) * p, 8, lhs=x, rhs=w, aux_in=aux)
    equal(output, x.astype(np.float64) @ w)
    of_ranks = [aux.reshape(-1, width)] * p
    equal(moved, of_ranks if kind == "gather" else aux.sum(0).reshape(p, rows, width))
