"""Invalid plans are rejected on every rank at once, before anything moves.

Invalid calls are rejected while they are traced: see test_dispatch_refusals.py.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from movement_oracle import dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import Metadata, combine, dispatch

pytestmark = pytest.mark.usefixtures("unchecked_types")

W, S, T = 8, 4, 16


@pytest.fixture
def plan():
    return random_plan(np.random.default_rng(0), W, S, T, 2)


def move(plan, x, mesh=None, **options):
    options = {"axis_name": AXIS, "capacity": W * T * 2, **options}
    run = on_ranks(lambda x, m: dispatch(x, m, **options), mesh or mesh_of(W))
    return jax.block_until_ready(run(x, Metadata(**plan)))


def combine_rows(plan, y, **options):
    options = {"axis_name": AXIS, "num_tokens": T, **options}
    run = on_ranks(lambda y, m: combine(y, m, **options), mesh_of(W))
    return jax.block_until_ready(run(y, Metadata(**plan)))


def rows(*feature, dtype=np.float32, num_rows=T):
    return np.zeros((W, num_rows, *feature), dtype)


def expect_on_every_rank(fn, match):
    """Every rank gets the error, and the next program runs."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        fn()
    good = random_plan(np.random.default_rng(1), W, S, T)
    x = np.random.default_rng(2).normal(size=(W, T, 2)).astype(np.float32)
    np.testing.assert_array_equal(move(good, x), dispatched(good, x, W * T * 2))


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_capacity_too_small(plan, op):
    need = int(plan["num_total_recv_tokens"].max())
    rank = int(plan["num_total_recv_tokens"].argmax())
    message = rf"rank {rank} would receive {need} tokens but capacity is {need - 1}. Pass capacity"
    if op == "dispatch":
        expect_on_every_rank(lambda: move(plan, rows(2), capacity=need - 1), message)
    else:
        expect_on_every_rank(lambda: combine_rows(plan, rows(2, num_rows=need - 1)), message)


def test_rank_out_of_range(plan):
    plan["dst_rank"][3, 1, 0] = W
    plan["seq_len"][3, 1] = 1
    expect_on_every_rank(
        lambda: move(plan, rows(2)),
        r"rank 3 slot 1 replica 0 has dst_rank 8; it must be in \[-1, 8\)",
    )


def test_more_rows_named_than_exist(plan):
    plan["seq_len"][2, 0] = T + 1
    plan["dst_rank"][2, 0, 0] = 0
    expect_on_every_rank(
        lambda: move(plan, rows(2)), rf"rank 2 slot 0 names {T + 1} rows from row 0 but the rank"
    )


def test_overlapping_destinations():
    plan = random_plan(np.random.default_rng(0), W, S, T)
    plan["dst_rank"][:, 0] = 0
    plan["seq_len"][:] = 0
    plan["seq_len"][:2, 0] = 4
    plan["dst_offset"][:2, 0] = [[0], [2]]
    plan["num_recv_tokens"][:] = 0
    plan["num_recv_tokens"][0, [0, 1, W]] = 4, 4, 8
    expect_on_every_rank(
        lambda: move(plan, rows(2)), r"rows 2..4 of rank 0 are written by rank 0 and by rank 1"
    )


def test_offset_outside_the_buffer(plan):
    rank, slot, replica = np.argwhere((plan["dst_rank"] == 5) & (plan["seq_len"] > 0)[..., None])[0]
    plan["dst_offset"][rank, slot, replica] = 2**31
    expect_on_every_rank(lambda: move(plan, rows(2)), r"rank 5 would receive 21474836\d\d tokens")


def test_slots_cut_off_by_a_static_bound(plan):
    rank, slot, replica = np.argwhere((plan["dst_rank"] >= 0) & (plan["seq_len"] > 0)[..., None])[0]
    plan["dst_rank"][rank, slot, replica] = -1
    expect_on_every_rank(
        lambda: move(plan, rows(2)), r"num_recv_tokens.*a static bound \(max_recv_seqs"
    )


def test_missing_rank_is_named(plan):
    def local(x, m):
        here = lambda x: dispatch(x, m, axis_name=AXIS, capacity=W * T * 2, deadline=2.0)
        away = lambda x: jnp.zeros_like(jax.eval_shape(here, x)) + 0 * jnp.sum(x)
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 3, away, here, x)

    expect_on_every_rank(
        lambda: jax.block_until_ready(on_ranks(local, mesh_of(W))(rows(2), Metadata(**plan))),
        r"deadline of 2000 ms passed: 7/8 ranks arrived.*missing ranks \[3\]",
    )


def test_error_in_one_of_two_groups():
    rng = np.random.default_rng(5)
    plans = [random_plan(rng, 4, S, T) for _ in range(2)]
    plans[0]["num_recv_tokens"] = plans[0]["num_recv_tokens"] + 1
    metadata = jax.tree.map(lambda *a: np.stack(a), *(Metadata(**plan) for plan in plans))

    def local(x, m):
        m = jax.tree.map(lambda a: a[0, 0], m)
        y = dispatch(x[0, 0], m, axis_name=AXIS, capacity=4 * T)
        return combine(y, m, axis_name=AXIS, num_tokens=T)[None, None]

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", AXIS))
    spec = P("data", AXIS)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    expect_on_every_rank(
        lambda: jax.block_until_ready(run(np.zeros((2, 4, T, 3), np.float32), metadata)),
        r"num_recv_tokens",
    )


def test_errors_of_two_programs_do_not_mix(plan):
    """A failing program and a good one run at the same time from two threads."""
    good = random_plan(np.random.default_rng(3), W, S, T)
    x = np.random.default_rng(4).normal(size=(W, T, 2)).astype(np.float32)
    expected = dispatched(good, x, W * T * 2)
    outcomes = []

    def run_good():
        for _ in range(5):
            outcomes.append(np.array_equal(move(good, x), expected))

    thread = threading.Thread(target=run_good)
    thread.start()
    for _ in range(5):
        with pytest.raises(jax.errors.JaxRuntimeError, match="would receive"):
            move(plan, rows(2), capacity=1)
    thread.join()
    assert outcomes == [True] * 5
