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
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x).reshape(-1, *np.shape(x)[2:])), x)


def plan_of(num_ranks, num_replicas=3, seed=0):
    return random_plan(np.random.default_rng(seed), num_ranks, S, T, num_replicas)


def moves(plan, *, capacity=None, **options):
    """Returns compiled functions of rows, by this plan: there and back."""
    options = {**OURS, **options}
    capacity = capacity or capacity_of(plan)
    there = jax.jit(lambda x, m: dispatch(x, m, capacity=capacity, **options))
    home = jax.jit(lambda y, m: combine(y, m, num_tokens=T, **options))
    m = Metadata(**plan)
    return (lambda x: there(x, m)), (lambda y: home(y, m))


def same(got, expected, name=""):
    """Compares bits."""
    expected = np.asarray(expected).reshape(got.shape)
    np.testing.assert_array_equal(bits(got), bits(expected), err_msg=name)


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
    plan, rng = plan_of(num_ranks, num_replicas), np.random.default_rng(1)
    sizes, capacity = (1, 3, 16, 17, 200, 999, 1040, 4096, 16384), capacity_of(plan) + 3
    x = {f"{n} bytes": rng.integers(0, 256, (num_ranks, T, n), np.uint8) for n in sizes}
    x["bfloat16"] = rng.normal(size=(num_ranks, T, 2, 5)).astype(jnp.bfloat16)
    move, _ = moves(plan, capacity=capacity)
    got = [move(flat(x)) for _ in range(5)][-1]  # both halves of the buffer several times
    for name, rows in x.items():
        same(got[name], dispatched(plan, rows, capacity), name)


@pytest.mark.parametrize("num_comm_sm", [1, 20, 1000])
def test_any_number_of_multiprocessors_gives_the_same_bits(num_comm_sm):
    plan = plan_of(4)
    there, home = moves(plan, num_comm_sm=num_comm_sm)
    x = np.random.default_rng(8).integers(0, 256, (4, T, 4096), np.uint8)
    same(there(flat(x)), dispatched(plan, x, capacity_of(plan)))
    y = np.random.default_rng(9).normal(size=(4, capacity_of(plan), 1024)).astype(np.float32)
    same(home(flat(y)), combined(plan, y, T, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "uint8"])
def test_combine_sums_in_order(num_ranks, dtype):
    plan = plan_of(num_ranks)
    y = np.random.default_rng(2).normal(size=(num_ranks, capacity_of(plan), 7)) * 5
    y = flat(y.astype(jnp.dtype(dtype)))
    (_, ours), (_, xla) = moves(plan), moves(plan, implementation="xla")
    same(ours(y), xla(y))


@pytest.mark.parametrize("width", [16, 1024], ids=["one kernel", "several"])
def test_a_loop_of_calls(num_ranks, width):
    """The number of a call is counted on the GPU."""
    plan = plan_of(num_ranks, 1)
    x = flat(np.random.default_rng(4).normal(size=(num_ranks, T, width)).astype(np.float32))

    def run(**options):
        there, home = moves(plan, **options)
        return jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, x: home(there(x) + 1), x))(x)

    same(run(), run(implementation="xla"))


def test_donated_storage_and_buffers():
    plan = plan_of(4)
    buffer = create_dispatch_buffer(capacity=capacity_of(plan))
    x = np.random.default_rng(5).normal(size=(4, T, 3)).astype(np.float32)
    move = jax.jit(
        lambda x, m, out: dispatch(x, m, buffer=buffer, out=out, **OURS), donate_argnums=2
    )
    out = jnp.full((4 * capacity_of(plan), 3), np.nan, np.float32)
    out = move(flat(x), Metadata(**plan), out)
    same(out, dispatched(plan, x, capacity_of(plan)))
    destroy_dispatch_buffer(buffer)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"buffer {buffer} has been destroyed"):
        jax.block_until_ready(move(flat(x), Metadata(**plan), out))


def test_an_invalid_plan_gives_nan_and_raises():
    plan, x = plan_of(4), flat(np.ones((4, T, 3), np.float32))
    bad = {**plan, "dst_rank": np.where(plan["dst_rank"] == 0, 4, plan["dst_rank"])}
    assert np.isnan(moves(bad)[0](x)).all()
    with pytest.raises(RuntimeError, match=r"has dst_rank 4; it must be in \[-1, 4\)"):
        raise_gpu_errors()
    assert not np.isnan(moves(plan)[0](x)).any()


def test_offsets_beyond_four_gigabytes():
    rows, width = 3 << 10, 1 << 20  # 3 GiB per rank
    plan, _ = compute_metadata(np.full((2, 1), rows, np.int32), np.array([[1], [0]], np.int32))
    x = jnp.arange(2 * rows, dtype=jnp.uint32)[:, None].astype(jnp.uint8)
    x = jnp.broadcast_to(x, (2 * rows, width))
    got = jax.jit(lambda x: dispatch(x, plan, capacity=rows, **OURS))(x)
    expected = np.roll(np.arange(2 * rows), rows).astype(np.uint8)
    for column in (0, width - 1):
        np.testing.assert_array_equal(got[:, column], expected)
