"""dispatch_qkv and combine_qkv: two plans in one exchange, the same as two calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import Metadata, combine, combine_qkv, dispatch, dispatch_qkv

W, S, TQ, TKV = 4, 5, 8, 12
_RNG = np.random.default_rng(0)
PLANS = random_plan(_RNG, W, S, TQ), random_plan(_RNG, W, S + 2, TKV, 3)
METADATA = tuple(Metadata(**plan) for plan in PLANS)
Q_ROWS, KV_ROWS = (int(plan["num_total_recv_tokens"].max()) + 1 for plan in PLANS)

SEND = {"axis_name": AXIS, "q_capacity": Q_ROWS, "kv_capacity": KV_ROWS}
COMBINE = {"axis_name": AXIS, "q_num_tokens": TQ, "kv_num_tokens": TKV}


def tokens(num_q, num_kv, *, seed, dtype=np.float32):
    """Returns q and the pair (k, v) [W, rows, ...]: small integers, so sums are exact."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-8, 9, (W, *shape)).astype(dtype)
    return draw(num_q, 4), (draw(num_kv, 2, 3), draw(num_kv, 2))


def sent(q, kv):
    return dispatched(PLANS[0], q, Q_ROWS), tuple(dispatched(PLANS[1], x, KV_ROWS) for x in kv)


def returned(q, kv):
    home = lambda plan, y, num_tokens: combined(plan, y, num_tokens).astype(y.dtype)
    return home(PLANS[0], q, TQ), tuple(home(PLANS[1], y, TKV) for y in kv)


def expect_equal(got, expected):
    """Compares structure, dtype and value, with or without a separate rank dimension."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.reshape(one, other.shape), other)


def all_ranks(tree):
    """Returns [W, rows, ...] as arrays of all ranks."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)


def test_dispatch_qkv_and_combine_qkv_are_two_calls_in_one():
    def together(q, kv, q_back, kv_back, mq, mkv):
        there = dispatch_qkv(q, kv, mq, mkv, **SEND)
        return there, combine_qkv(q_back, kv_back, mq, mkv, **COMBINE)

    def apart(q, kv, q_back, kv_back, mq, mkv):
        q = dispatch(q, mq, axis_name=AXIS, capacity=Q_ROWS)
        kv = dispatch(kv, mkv, axis_name=AXIS, capacity=KV_ROWS)
        q_back = combine(q_back, mq, axis_name=AXIS, num_tokens=TQ)
        kv_back = combine(kv_back, mkv, axis_name=AXIS, num_tokens=TKV)
        return (q, kv), (q_back, kv_back)

    x = tokens(TQ, TKV, seed=1, dtype=jnp.bfloat16)
    y = tokens(Q_ROWS, KV_ROWS, seed=2, dtype=jnp.bfloat16)
    for fn, num_exchanges in (together, 2), (apart, 4):
        lowered = on_ranks(fn, mesh_of(W, [2, 0, 3, 1])).lower(*x, *y, *METADATA)
        assert lowered.as_text().count("custom_call @jax_cp_dispatch") == num_exchanges
        expect_equal(lowered.compile()(*x, *y, *METADATA), (sent(*x), returned(*y)))


@pytest.mark.parametrize(
    "implementation, kind", [("in_process", AxisType.Explicit), ("xla", AxisType.Auto)]
)
def test_on_arrays_of_all_ranks_with_gradients(implementation, kind):
    """Under plain jit; <dispatch_qkv(x), y> = <x, combine_qkv(y)>; each VJP is the other one.

    Without them by XLA, which lowers the same exchanges.
    """
    split = NamedSharding(permuted_mesh((2, W), ("tp", AXIS), kind), P(AXIS))
    x, y = tokens(TQ, TKV, seed=3), tokens(Q_ROWS, KV_ROWS, seed=4)

    @jax.jit
    def run(x, y):
        send = lambda q, kv: dispatch_qkv(q, kv, *METADATA, **SEND, implementation=implementation)
        combine_rows = lambda q, kv: combine_qkv(
            q, kv, *METADATA, **COMBINE, implementation=implementation
        )
        if implementation == "xla":
            return send(*x), combine_rows(*y)
        (there, pull_there), (home, pull_home) = jax.vjp(send, *x), jax.vjp(combine_rows, *y)
        return there, home, pull_there(there), pull_home(home)

    there, home, *pulled = run(*jax.device_put(all_ranks((x, y)), split))
    expect_equal((there, home), (sent(*x), returned(*y)))
    if pulled:
        expect_equal(tuple(pulled), (returned(*sent(*x)), sent(*returned(*y))))
    inner = lambda *trees: sum(map(np.vdot, *map(jax.tree.leaves, trees)))
    assert inner(there, all_ranks(y)) == inner(all_ranks(x), home)


def test_gradient_of_one_side_alone():
    """Only the keys are used; segment ids move with the keys and have no tangent."""
    q, (k, _) = tokens(TQ, TKV, seed=5)
    ids = np.arange(W * TKV, dtype=np.int32).reshape(W, TKV)

    def local(q, k, ids, mq, mkv):
        def loss(q, k):
            _, (k, tags) = dispatch_qkv(q, (k, ids), mq, mkv, **SEND)
            return jnp.sum(k * tags[:, None, None])

        return jax.grad(loss, argnums=(0, 1))(q, k)

    got = on_ranks(local, mesh_of(W))(q, k, ids, *METADATA)
    weights = dispatched(PLANS[1], ids, KV_ROWS)[..., None, None] * np.ones(k.shape[2:])
    expect_equal(got, (np.zeros_like(q), combined(PLANS[1], weights, TKV).astype(np.float32)))


@pytest.mark.parametrize(
    "implementation, empty",
    [
        ("in_process", "no capacity"),
        ("in_process", "no features"),
        ("xla", "no rows"),
    ],
)
def test_one_side_moves_nothing(implementation, empty):
    q, kv = tokens(TQ, TKV, seed=6)
    num_kv, kv_rows = TKV, KV_ROWS
    plan: dict[str, Any] = {name: np.zeros_like(value) for name, value in PLANS[1].items()}
    plan |= {"world_size": W, "dst_rank": plan["dst_rank"] - 1}
    if empty == "no rows":
        num_kv, kv = 0, tuple(x[:, :0] for x in kv)
    elif empty == "no capacity":
        kv_rows = 0
    else:
        kv = tuple(x[..., :0] for x in kv)
        plan = PLANS[1]

    def local(q, kv, mq, mkv):
        options = {"axis_name": AXIS, "implementation": implementation}
        there = dispatch_qkv(q, kv, mq, mkv, q_capacity=Q_ROWS, kv_capacity=kv_rows, **options)
        home = combine_qkv(*there, mq, mkv, q_num_tokens=TQ, kv_num_tokens=num_kv, **options)
        return there, home

    there, home = on_ranks(local, mesh_of(W))(q, kv, METADATA[0], Metadata(**plan))
    nothing = tuple(np.zeros((W, kv_rows, *x.shape[2:]), x.dtype) for x in kv)
    q_there = dispatched(PLANS[0], q, Q_ROWS)
    expect_equal(there, (q_there, nothing))
    q_home = combined(PLANS[0], q_there, TQ).astype(np.float32)
    expect_equal(home, (q_home, tuple(np.zeros_like(x) for x in kv)))


def test_donated_storage_is_written_in_place():
    split = NamedSharding(mesh_of(W), P(AXIS))
    x = tokens(TQ, TKV, seed=7)
    # Created by XLA: a device array that shares memory with NumPy cannot be donated.
    poison = lambda: jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan), all_ranks(sent(*x)))
    storage = jax.jit(poison, out_shardings=split)()
    places = lambda tree: [
        shard.data.unsafe_buffer_pointer()
        for array in jax.tree.leaves(tree)
        for shard in array.addressable_shards
    ]
    before = places(storage)

    def move(q, kv, q_out, kv_out):
        return dispatch_qkv(q, kv, *METADATA, **SEND, q_out=q_out, kv_out=kv_out)

    run = jax.jit(move, donate_argnums=(2, 3))
    got = run(*jax.device_put(all_ranks(x), split), *storage)
    expect_equal(got, sent(*x))
    assert places(got) == before


# ---- Invalid calls.


@pytest.mark.parametrize("bad, name", [(0, "q"), (1, "kv")])
def test_the_invalid_plan_is_named(unchecked_types, bad, name):
    """It also stops the other plan: both fail on every rank."""
    x, y = tokens(TQ, TKV, seed=8), tokens(Q_ROWS, KV_ROWS, seed=9)
    run = on_ranks(lambda q, kv, *m: dispatch_qkv(q, kv, *m, **SEND), mesh_of(W))
    combine_rows = on_ranks(lambda q, kv, *m: combine_qkv(q, kv, *m, **COMBINE), mesh_of(W))
    metadata = list(METADATA)
    metadata[bad] = Metadata(**{**PLANS[bad], "seq_len": PLANS[bad]["seq_len"] + 100})
    for op, fn, rows in ("dispatch", run, x), ("combine", combine_rows, y):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=rf"{op}.*, plan {bad} of 0\.\.1: rank"
        ):
            jax.block_until_ready(fn(*rows, *metadata))
    expect_equal(run(*x, *METADATA), sent(*x))
    expect_equal(combine_rows(*y, *METADATA), returned(*y))
