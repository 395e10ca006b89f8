"""Many exchanges in flight, and ranks that fail: all ranks get one error, and the process goes on.

A missing rank is named by all operations: tests/contract.
"""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import metadata_oracle
import numpy as np
import pytest
from dispatch_cases import (
    CAPACITY,
    METADATA,
    PLAN,
    SENT,
    X_OF_RANKS as X,
    F,
    S,
    T,
    W,
    check_next_program,
    combine_rows,
    fails,
    milliseconds_of,
    send,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import Metadata, compute_metadata

DEADLINE = 2.0


# ---- In flight.


def test_many_independent_calls_in_one_program_and_loops_with_collectives():
    """More open exchanges than threads: a handler that waits for its peers would deadlock here."""

    def local(x, m):
        calls = [send(x + i, m) for i in range(24)]

        def step(carry, _):
            home = combine_rows(send(carry, m), m)
            turned = jax.lax.ppermute(home, AXIS, [(r, (r + 1) % W) for r in range(W)])
            return turned + jax.lax.pmean(home, AXIS), None

        return sum(calls), jax.lax.scan(step, x, None, length=5)[0]

    run = on_ranks(local, mesh_of(W, [2, 0, 3, 1]))
    got, looped = run(X, METADATA)
    expected = sum(dispatched(PLAN, X + i, CAPACITY) for i in range(24))
    np.testing.assert_array_equal(got, expected)
    carry = X.astype(np.float64)
    for _ in range(5):
        home = combined(PLAN, dispatched(PLAN, carry, CAPACITY), T)
        carry = np.roll(home, 1, axis=0) + home.mean(0)
    np.testing.assert_allclose(looped, carry, rtol=1e-5, atol=1e-5)


def test_a_long_chain_of_programs_that_donate_their_argument():
    """Every result has the shape, and possibly the memory, of the donated argument."""
    # Every rank sends two rows to each.
    to = (np.arange(W)[:, None] + np.arange(T) + 3) % W
    plan = {**metadata_oracle.plan(np.ones((W, T), int), to)[0], "world_size": W}
    place = NamedSharding(mesh_of(W), P(AXIS))
    metadata = jax.device_put(Metadata(**plan), place)
    step = jax.jit(lambda x, m: send(x, m, capacity=T), donate_argnums=0)
    # Created by XLA: a device array that shares memory with NumPy cannot be donated.
    x = first = jax.jit(
        lambda: jnp.arange(W * T * F, dtype=jnp.float32).reshape(-1, F), out_shardings=place
    )()
    expected = np.array(x).reshape(W, T, F)
    for _ in range(100):
        x = step(x, metadata)
        expected = dispatched(plan, expected, T)
    np.testing.assert_array_equal(np.asarray(x).reshape(W, T, F), expected)
    assert first.is_deleted()


def test_different_programs_from_several_threads():
    rng = np.random.default_rng(0)
    plans = [random_plan(rng, W, S, T) for _ in range(3)]
    meshes = [mesh_of(W), mesh_of(W, [3, 2, 1, 0]), mesh_of(W, [3, 1, 0, 2])]
    outcomes = [[] for _ in plans]

    def work(number):
        plan, metadata = plans[number], Metadata(**plans[number])
        capacity = CAPACITY + number

        def there_and_back(x, m):
            y = send(x, m, capacity=capacity)
            return y + number, combine_rows(y, m)

        run = on_ranks(there_and_back, meshes[number])
        in_flight = [run(X + i, metadata) for i in range(8)]
        for i, (sent, home) in enumerate(in_flight):
            y = dispatched(plan, X + i, capacity)
            is_right = np.array_equal(sent, y + number)
            outcomes[number].append(is_right and np.array_equal(home, combined(plan, y, T)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [[True] * 8] * len(plans)


# ---- A plan that does not fit the batch. Of all kinds: test_dispatch.py.


def test_plan_made_under_jit_that_needs_more_slots_than_its_bound():
    """The reverse plan is truncated, which the reverse exchange detects."""

    def there_and_back(x, seq_len, destinations):
        forward, reverse = compute_metadata(seq_len, destinations, max_recv_seqs=W)
        return send(send(x, forward, capacity=W * T), reverse, capacity=T)

    seq_len = np.full((W, 2), T // 2, np.int32)
    spread = (np.arange(2 * W).reshape(W, 2) % W).astype(np.int32)
    copies = lambda a: np.broadcast_to(a, (W, *a.shape))
    run = on_ranks(there_and_back, mesh_of(W))
    np.testing.assert_array_equal(run(X, copies(seq_len), copies(spread)), X)
    to_rank_2 = copies(np.full((W, 2), 2, np.int32))  # 8 shards; its plan has 4 slots
    fails(
        run(X, copies(seq_len), to_rank_2),
        r"rank \d expects \d tokens from rank 2 .*a static bound \(max_recv_seqs.*too small",
    )


# ---- Ranks that never arrive, or arrive at another call.


def test_default_deadline_is_a_minute_and_can_be_set(monkeypatch):
    assert milliseconds_of() == ["60000"] and milliseconds_of(deadline=0.25) == ["250"]
    monkeypatch.setenv("JAX_CP_DISPATCH_DEADLINE", "1.5")
    assert milliseconds_of() == ["1500"] and milliseconds_of(deadline=0.25) == ["250"]
    for wrong in "soon", "0", "inf", "nan":
        monkeypatch.setenv("JAX_CP_DISPATCH_DEADLINE", wrong)
        with pytest.raises(ValueError, match=f"DEADLINE is '{wrong}'; it needs to be a positive"):
            milliseconds_of()


ELSEWHERE = {
    "another operation": lambda x, m, d: combine_rows(jnp.tile(x, (W, 1)), m, deadline=d)[:1] * 0,
    "a larger buffer": lambda x, m, d: send(x, m, capacity=CAPACITY + 8, deadline=d),
    "fewer slots": lambda x, m, d: send(x, fewer_slots(m), deadline=d),
}


def fewer_slots(m):
    """Returns a rank's view without its last slot."""
    cut = {name: getattr(m, name)[:-1] for name in ("dst_rank", "dst_offset", "seq_len")}
    return dataclasses.replace(m, **cut)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_ranks_that_arrive_at_another_call(kind):
    """A program can do so only by branching on the rank; each call misses the other's ranks."""

    def local(x, m):
        usual = lambda x: send(x, m, deadline=DEADLINE)
        other = lambda x: jnp.resize(ELSEWHERE[kind](x, m, DEADLINE), (CAPACITY, F))
        return jax.lax.cond(jax.lax.axis_index(AXIS) < 1, other, usual, x)

    few, many = r"\[0\]", r"\[1, 2, 3\]"
    fails(
        on_ranks(local, mesh_of(W))(X, METADATA),
        rf"(1/4 ranks arrived, ranks {few} wait for missing ranks {many})"
        rf"|(3/4 ranks arrived, ranks {many} wait for missing ranks {few})",
    )


def test_rank_that_fails_before_the_call():
    """Its own error is reported too; the others name it."""

    def check(x, rank, bad_rank):
        if rank == bad_rank:
            raise ValueError("no data on this rank")
        return x

    def local(x, m, bad_rank):
        rank = jax.lax.axis_index(AXIS)
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return send(jax.pure_callback(check, like, x, rank, bad_rank), m, deadline=DEADLINE)

    run = on_ranks(local, mesh_of(W), check_vma=False)
    np.testing.assert_array_equal(run(X, METADATA, np.full(W, -1)), SENT)
    for shard in run(X, METADATA, np.full(W, 2)).addressable_shards:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"no data on this rank|wait for missing ranks \[2\]"
        ):
            np.asarray(shard.data)
    np.testing.assert_array_equal(run(X, METADATA, np.full(W, -1)), SENT)


# ---- Failures in different places.


def test_in_one_of_two_groups():
    """A rank that was missing gets the error at its next call; the other group is done by then."""
    metadata = jax.tree.map(lambda a: np.stack([a, a]), METADATA)

    def local(x, m, is_here):
        m = jax.tree.map(lambda a: a[0, 0], m)
        here = lambda x: send(x, m, deadline=DEADLINE)
        away = lambda x: jnp.zeros((CAPACITY, F)) + 0 * x[0]
        y = jax.lax.cond(is_here[0, 0], here, away, x[0, 0])
        return send(y[:T], m)[None, None]

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", AXIS))
    spec = P("data", AXIS)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    is_here = np.ones((2, 4), bool)
    x = np.stack([X, X])
    run(x, metadata, is_here).block_until_ready()
    is_here[1, 2] = False
    result = run(x, metadata, is_here)
    for shard in result.addressable_shards:
        if shard.index[0].start == 1:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"3/4 .* missing ranks \[2\]"):
                np.asarray(shard.data)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"3/4 .* missing ranks \[2\]"):
        result.block_until_ready()
    check_next_program()


def test_other_programs_run_while_one_waits_until_its_deadline():
    def local(x, m):
        here = lambda x: send(x, m, deadline=3.0)
        away = lambda x: jnp.zeros((CAPACITY, F)) + 0 * x[0]
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 3, away, here, x)

    def run_others():
        while not is_over.is_set() or not outcomes:
            outcomes.append(np.array_equal(good(X, METADATA), SENT))

    good = on_ranks(send, mesh_of(W))
    run = on_ranks(local, mesh_of(W)).lower(X, METADATA).compile()
    is_over, outcomes = threading.Event(), []
    thread = threading.Thread(target=run_others)
    result = run(X, METADATA)
    thread.start()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"deadline of 3000 ms.*missing ranks \[3\]"
    ):
        jax.block_until_ready(result)
    is_over.set()
    thread.join()
    assert all(outcomes)
