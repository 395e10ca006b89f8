"""One GPU: the contract's cases; all ranks on it against NumPy and against XLA's gathers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import check, mesh_of, on_ranks, split, with_gradients
from movement_oracle import combined, dispatched, random_plan
from moving import bits, capacity_of
from operations import CASES

from jax_cp_dispatch import Metadata, combine, compute_metadata, dispatch
from jax_cp_dispatch.buffers import create_dispatch_buffer, destroy_dispatch_buffer
from jax_cp_dispatch.gpu import raise_gpu_errors

S, T = 6, 40
MOVED = ("dispatch", "combine", "dispatch_qkv", "dispatch_start")
OURS: dict[str, Any] = {"axis_name": "cp", "implementation": "cuda_peer", "deadline": 3.0}


@pytest.fixture(params=[2, 4, 8])
def num_ranks(request):
    return request.param


@pytest.fixture(autouse=True)
def no_errors():
    yield
    raise_gpu_errors()


def flat(x):
    """Returns [W, rows, ...] as arrays of all ranks on one device."""
    return jnp.asarray(np.asarray(x).reshape(-1, *np.shape(x)[2:]))


def per_rank(x, num_ranks):
    return np.asarray(x).reshape(num_ranks, -1, *x.shape[1:])


def plan_of(num_ranks, num_replicas=3, seed=0):
    return random_plan(np.random.default_rng(seed), num_ranks, S, T, num_replicas)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.functions[0].__name__ in MOVED], ids=str
)
def test_cases_of_all_ranks(case, num_ranks):
    """Values and gradients of arrays of all ranks, without a mesh."""
    arrays = case.arrays("float32", ranks=num_ranks)
    *expected, cotangents = case.expected(arrays)
    run = with_gradients(partial(case.call, **OURS))
    check(jax.jit(run)(*split(arrays), cotangents), tuple(expected), "float32")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_of_one_rank(case):
    """What a rank computes beside its exchanges, and the gradients."""
    arrays = case.arrays("bfloat16", ranks=1)
    *expected, cotangents = case.expected(arrays)
    run = with_gradients(on_ranks(case, mesh_of(1)))
    check(jax.jit(run)(*split(arrays), cotangents), tuple(expected), "bfloat16")


@pytest.mark.parametrize("num_replicas", [1, 3, 11])
def test_every_row_size_arrives_bit_for_bit(num_ranks, num_replicas):
    plan = plan_of(num_ranks, num_replicas)
    capacity = capacity_of(plan) + 3
    rng = np.random.default_rng(1)
    sizes = (1, 3, 16, 17, 200, 999, 1040, 4096, 16384)
    x = {f"{n} bytes": rng.integers(0, 256, (num_ranks, T, n), np.uint8) for n in sizes}
    x["bfloat16"] = rng.normal(size=(num_ranks, T, 2, 5)).astype(jnp.bfloat16)
    move = jax.jit(lambda x, m: dispatch(x, m, capacity=capacity, **OURS))
    for _ in range(4):  # uses both halves of the buffer several times
        move({k: flat(v) for k, v in x.items()}, Metadata(**plan))
    got = move({k: flat(v) for k, v in x.items()}, Metadata(**plan))
    for name, rows in x.items():
        expected = dispatched(plan, rows, capacity)
        np.testing.assert_array_equal(
            bits(per_rank(got[name], num_ranks)), bits(expected), err_msg=name
        )


@pytest.mark.parametrize("num_comm_sm", [1, 20, 1000])
def test_any_number_of_multiprocessors_gives_the_same_bits(num_comm_sm):
    plan = plan_of(4)
    capacity = capacity_of(plan)
    x = np.random.default_rng(8).integers(0, 256, (4, T, 4096), np.uint8)
    options = {**OURS, "num_comm_sm": num_comm_sm}
    move = jax.jit(lambda x, m: dispatch(x, m, capacity=capacity, **options))
    there = per_rank(move(flat(x), Metadata(**plan)), 4)
    np.testing.assert_array_equal(there, dispatched(plan, x, capacity))
    y = np.random.default_rng(9).normal(size=(4, capacity, 1024)).astype(np.float32)
    home = jax.jit(lambda y, m: combine(y, m, num_tokens=T, **options))
    back = per_rank(home(flat(y), Metadata(**plan)), 4)
    np.testing.assert_array_equal(back, combined(plan, y, T, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8"])
def test_combine_sums_in_order(num_ranks, dtype):
    plan = plan_of(num_ranks)
    y = np.random.default_rng(2).normal(size=(num_ranks, capacity_of(plan), 7)) * 5
    y = y.astype(jnp.dtype(dtype))
    ours = jax.jit(lambda y, m: combine(y, m, num_tokens=T, **OURS))
    xla = jax.jit(lambda y, m: combine(y, m, num_tokens=T, axis_name="cp", implementation="xla"))
    got, expected = (f(flat(y), Metadata(**plan)) for f in (ours, xla))
    np.testing.assert_array_equal(bits(got), bits(expected))
    if dtype == "float32":
        exact = combined(plan, y, T, np.float32)
        np.testing.assert_array_equal(per_rank(got, num_ranks), exact)


@pytest.mark.parametrize("width", [16, 1024], ids=["one kernel", "several"])
def test_a_loop_of_calls(num_ranks, width):
    """The number of a call is counted on the GPU."""
    plan = Metadata(**plan_of(num_ranks, 1))
    capacity = int(np.max(plan.num_total_recv_tokens))
    x = flat(np.random.default_rng(4).normal(size=(num_ranks, T, width)).astype(np.float32))

    def body(_, x, implementation="cuda_peer"):
        options = {**OURS, "implementation": implementation}
        there = dispatch(x, plan, capacity=capacity, **options)
        return combine(there + 1, plan, num_tokens=T, **options)

    ours = jax.jit(lambda x: jax.lax.fori_loop(0, 50, body, x))(x)
    xla = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda i, x: body(i, x, "xla"), x))(x)
    np.testing.assert_array_equal(ours, xla)


def test_donated_storage_and_buffers():
    plan = plan_of(4)
    buffer = create_dispatch_buffer(capacity=capacity_of(plan))
    x = np.random.default_rng(5).normal(size=(4, T, 3)).astype(np.float32)
    move = jax.jit(
        lambda x, m, out: dispatch(x, m, buffer=buffer, out=out, **OURS), donate_argnums=2
    )
    out = jnp.full((4 * capacity_of(plan), 3), np.nan, np.float32)
    out = move(flat(x), Metadata(**plan), out)
    expected = dispatched(plan, x, capacity_of(plan))
    np.testing.assert_array_equal(per_rank(out, 4), expected)
    destroy_dispatch_buffer(buffer)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"buffer {buffer} has been destroyed"):
        jax.block_until_ready(move(flat(x), Metadata(**plan), out))


def test_an_invalid_plan_gives_nan_and_raises():
    plan = plan_of(4)
    x = flat(np.ones((4, T, 3), np.float32))
    move = jax.jit(lambda x, m: dispatch(x, m, capacity=capacity_of(plan), **OURS))
    good = Metadata(**plan)
    bad = {**plan, "dst_rank": np.where(plan["dst_rank"] == 0, 4, plan["dst_rank"])}
    assert np.isnan(move(x, Metadata(**bad))).all()
    with pytest.raises(RuntimeError, match=r"has dst_rank 4; it must be in \[-1, 4\)"):
        raise_gpu_errors()
    assert not np.isnan(move(x, good)).any()


def test_offsets_beyond_four_gigabytes():
    rows, width = 3 << 10, 1 << 20  # 3 GiB per rank
    plan, _ = compute_metadata(np.full((2, 1), rows, np.int32), np.array([[1], [0]], np.int32))
    x = jnp.arange(2 * rows, dtype=jnp.uint32)[:, None].astype(jnp.uint8)
    x = jnp.broadcast_to(x, (2 * rows, width))
    got = jax.jit(lambda x: dispatch(x, plan, capacity=rows, **OURS))(x)
    expected = np.roll(np.arange(2 * rows), rows).astype(np.uint8)
    for column in (0, width - 1):
        np.testing.assert_array_equal(got[:, column], expected)
