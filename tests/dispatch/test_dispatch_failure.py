"""A rank does not do its part: all ranks get one error in time, and the process continues."""

import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import (
    Metadata,
    PlanConfig,
    combine,
    compute_metadata,
    dispatch,
    dispatch_qkv,
    plan_attention,
)
from jax_cp_dispatch._ranks.deadline import DEFAULT_DEADLINE

pytestmark = pytest.mark.usefixtures("unchecked_types")

W, S, T, F = 8, 3, 8, 2
CAPACITY = W * T
DEADLINE = 2.0
RNG = np.random.default_rng(0)
PLAN = random_plan(RNG, W, S, T)
METADATA = Metadata(**PLAN)
X = RNG.integers(-8, 9, (W, T, F)).astype(np.float32)
Y = RNG.integers(-8, 9, (W, CAPACITY, F)).astype(np.float32)


def send(x, m, **options):
    return dispatch(x, m, **{"axis_name": AXIS, "capacity": CAPACITY, **options})


def bring(y, m, **options):
    return combine(y, m, axis_name=AXIS, num_tokens=T, **options)


_good = on_ranks(send, mesh_of(W))


def spoiled(plan=PLAN, rank=6):
    """Returns a plan that promises `rank` one token too many, and its error."""
    counts = plan["num_recv_tokens"].copy()
    counts[rank, 1] += 1
    message = f"rank {rank} expects {counts[rank, 1]} tokens from rank 1 .num_recv_tokens. but"
    return Metadata(**{**plan, "num_recv_tokens": counts}), message


def errors_of(fn, *args):
    """Returns each device's error for a result of `fn`, which fails; the next program succeeds."""
    result = jax.tree.leaves(fn(*args))[0]
    errors = []
    for shard in result.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            np.asarray(shard.data)
        errors.append(str(error.value))
    np.testing.assert_array_equal(_good(X, METADATA), dispatched(PLAN, X, CAPACITY))
    return errors


def all_say(fn, *args, match):
    """Every device gets the same error."""
    errors = errors_of(fn, *args)
    assert len(errors) == len(jax.devices())
    assert len(set(errors)) == 1
    assert re.search(match, errors[0]), errors[0]


# ---- Ranks that never arrive, or arrive at another call.


def test_default_deadline_is_a_minute_and_can_be_set():
    assert DEFAULT_DEADLINE == 60
    for deadline, milliseconds in ((None, 60_000), (0.25, 250)):
        run = on_ranks(lambda x, m, d=deadline: send(x, m, deadline=d), mesh_of(W))
        assert f"deadline_ms = {milliseconds} : i64" in run.lower(X, METADATA).as_text()


def test_rank_that_never_comes():
    """All others wait until the deadline."""

    def local(y, m):
        here = lambda y: bring(y, m, deadline=DEADLINE)
        away = lambda y: y[:T] * 0
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 0, away, here, y)

    run = on_ranks(local, mesh_of(W)).lower(Y, METADATA).compile()
    result = run(Y, METADATA)
    for rank, shard in enumerate(result.addressable_shards):
        if rank != 0:  # it has no call that could fail
            with pytest.raises(
                jax.errors.JaxRuntimeError,
                match=r"combine over axis 'cp': deadline of 2000 ms passed: 7/8 ranks arrived, "
                r"ranks \[1, 2, 3, 4, 5, 6, 7\] wait for missing ranks \[0\]\. Every rank of",
            ):
                np.asarray(shard.data)
    np.testing.assert_array_equal(_good(X, METADATA), dispatched(PLAN, X, CAPACITY))


ELSEWHERE = {
    "another call": lambda x, m, d: send(x + 1, m, deadline=d),
    "another operation": lambda x, m, d: bring(jnp.tile(x, (W, 1)), m, deadline=d)[:1] * 0,
    "another dtype": lambda x, m, d: send(x.astype(jnp.int8), m, deadline=d).astype(x.dtype),
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
        return jax.lax.cond(jax.lax.axis_index(AXIS) < 3, other, usual, x)

    few, many = r"\[0, 1, 2\]", r"\[3, 4, 5, 6, 7\]"
    all_say(
        on_ranks(local, mesh_of(W)),
        X,
        METADATA,
        match=rf"(3/8 ranks arrived, ranks {few} wait for missing ranks {many})"
        rf"|(5/8 ranks arrived, ranks {many} wait for missing ranks {few})",
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
    expected = dispatched(PLAN, X, CAPACITY)
    np.testing.assert_array_equal(run(X, METADATA, np.full(W, -1)), expected)
    for error in errors_of(run, X, METADATA, np.full(W, 2)):
        assert "no data on this rank" in error or "wait for missing ranks [2]" in error
    np.testing.assert_array_equal(run(X, METADATA, np.full(W, -1)), expected)


# ---- Invalid plans.


def test_metadata_of_another_plan_on_one_rank():
    """Each rank passes its own slice: here rank 4 passes that of another batch."""
    other = Metadata(**random_plan(np.random.default_rng(7), W, S, T))

    def mixed(mine, others):
        mine = np.array(mine)
        mine[4] = others[4]
        return mine

    all_say(
        on_ranks(send, mesh_of(W)),
        X,
        jax.tree.map(mixed, METADATA, other),
        match=r"rank \d expects \d+ tokens from rank \d \(num_recv_tokens\) but rank \d's slots",
    )


def test_plan_made_under_jit_that_needs_more_slots_than_its_bound():
    """The reverse plan is truncated, which the reverse exchange detects."""

    def there_and_back(x, seq_len, destinations):
        forward, reverse = compute_metadata(seq_len, destinations, max_recv_seqs=W)
        return send(send(x, forward), reverse, capacity=T)

    seq_len = np.full((W, 2), T // 2, np.int32)
    spread = (np.arange(2 * W).reshape(W, 2) % W).astype(np.int32)
    copies = lambda a: np.broadcast_to(a, (W, *a.shape))
    run = on_ranks(there_and_back, mesh_of(W))
    np.testing.assert_array_equal(run(X, copies(seq_len), copies(spread)), X)
    all_say(
        run,
        X,
        copies(seq_len),
        copies(np.full((W, 2), 5, np.int32)),  # rank 5 receives 16 shards; its plan has 8 slots
        match=r"rank \d expects \d tokens from rank 5 .*a static bound \(max_recv_seqs.*too small",
    )


def test_attention_plan_made_under_jit_that_needs_more_rows_than_its_bound():
    config = PlanConfig(block=4, kv_capacity=12)

    def local(x, segment_ids):
        plan = plan_attention(segment_ids, world_size=W, config=config)
        q, kv = dispatch_qkv(
            x,
            x,
            plan.q_metadata,
            plan.kv_metadata,
            axis_name=AXIS,
            q_capacity=plan.q_capacity,
            kv_capacity=plan.kv_capacity,
        )
        return jnp.sum(q) + jnp.sum(kv)

    run = on_ranks(local, mesh_of(W))
    one_each = np.repeat(np.arange(1, W + 1, dtype=np.int32), T)[None]
    copies = lambda a: np.broadcast_to(a, (W, *a.shape))
    run(X, copies(one_each)).block_until_ready()
    all_say(
        run,
        X,
        copies(np.ones_like(one_each)),  # one document over all ranks
        match=r"dispatch_qkv over axis 'cp': rank \d would receive \d+ tokens but "
        r"kv_capacity is 12\. Pass kv_capacity>=",
    )


@pytest.mark.parametrize("bad", [0, 1])
def test_errors_of_queries_and_keys_name_the_plan(bad):
    plans = [METADATA, METADATA]
    plans[bad], message = spoiled()
    run = on_ranks(
        lambda x, m, n: dispatch_qkv(
            *(x, (x, x), m, n), axis_name=AXIS, q_capacity=CAPACITY, kv_capacity=CAPACITY
        ),
        mesh_of(W),
    )
    all_say(run, X, *plans, match=rf"'cp', plan {bad} of 0\.\.1: {message}")


def test_global_arrays_under_plain_jit():
    mesh, (bad, message) = mesh_of(W), spoiled()
    x = jax.device_put(X.reshape(W * T, F), NamedSharding(mesh, P(AXIS)))
    run = jax.jit(lambda x, m: send(x, m, mesh=mesh))
    all_say(run, x, bad, match=message)
    expected = dispatched(PLAN, X, CAPACITY).reshape(-1, F)
    np.testing.assert_array_equal(run(x, METADATA), expected)


# ---- Failures in different places.


def test_in_the_middle_of_a_loop():
    """Step 2 of 4 fails; the same program runs on good plans before and after."""

    def local(x, plans):
        step = lambda x, m: (x + bring(send(x, m), m), None)
        return jax.lax.scan(step, x, plans)[0]

    bad, message = spoiled()
    run = on_ranks(local, mesh_of(W))
    stack = lambda *plans: jax.tree.map(lambda *a: np.stack(a, 1), *plans)
    moved = combined(PLAN, dispatched(PLAN, np.ones_like(X), CAPACITY), T)
    expected = X * (1 + moved) ** 4
    np.testing.assert_array_equal(run(X, stack(*[METADATA] * 4)), expected)
    all_say(run, X, stack(METADATA, METADATA, bad, METADATA), match=message)
    np.testing.assert_array_equal(run(X, stack(*[METADATA] * 4)), expected)


def test_in_the_backward_pass():
    @jax.custom_vjp
    def move(x, m, backward):
        return send(x, m)

    move.defvjp(
        lambda x, m, backward: (send(x, m), backward),
        lambda backward, ct: (bring(ct, backward), None, None),
    )

    def local(x, y, m, backward):
        return jax.value_and_grad(lambda x: jnp.sum(move(x, m, backward) * y))(x)

    run = on_ranks(local, mesh_of(W), check_vma=False)
    bad, message = spoiled()
    _, gradient = run(X, Y, METADATA, METADATA)
    np.testing.assert_array_equal(gradient, combined(PLAN, Y, T))
    all_say(run, X, Y, METADATA, bad, match=f"combine over axis 'cp': {message}")


def test_in_one_of_two_groups():
    """A rank that was missing gets the error at its next call; the other group is done by then."""
    plan = random_plan(np.random.default_rng(3), 4, S, T)
    metadata = jax.tree.map(lambda a: np.stack([a, a]), Metadata(**plan))

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
    x = X.reshape(2, 4, T, F)
    run(x, metadata, is_here).block_until_ready()
    is_here[1, 2] = False
    result = run(x, metadata, is_here)
    for shard in result.addressable_shards:
        if shard.index[0].start == 1:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"3/4 .* missing ranks \[2\]"):
                np.asarray(shard.data)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"3/4 .* missing ranks \[2\]"):
        result.block_until_ready()
    np.testing.assert_array_equal(_good(X, METADATA), dispatched(PLAN, X, CAPACITY))


def test_next_to_an_independent_collective():
    """Failing ranks still join the collective; otherwise XLA would abort the process."""
    bad, message = spoiled()

    def local(x, m):
        sent = [send(x + i, m) for i in range(8)]
        return sent, [jax.lax.psum(jnp.sin(x * i), AXIS) for i in range(4)]

    run = on_ranks(local, mesh_of(W), check_vma=False)
    for _ in range(10):
        all_say(run, X, bad, match=message)
    jax.block_until_ready(run(X, METADATA))


def test_other_programs_run_while_one_waits_until_its_deadline():
    def local(x, m):
        here = lambda x: send(x, m, deadline=3.0)
        away = lambda x: jnp.zeros((CAPACITY, F)) + 0 * x[0]
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 7, away, here, x)

    def run_others():
        while not is_over.is_set() or not outcomes:
            got = _good(X, METADATA)
            outcomes.append(np.array_equal(got, dispatched(PLAN, X, CAPACITY)))

    run = on_ranks(local, mesh_of(W)).lower(X, METADATA).compile()
    is_over, outcomes = threading.Event(), []
    thread = threading.Thread(target=run_others)
    result = run(X, METADATA)
    thread.start()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"deadline of 3000 ms.*missing ranks \[7\]"
    ):
        jax.block_until_ready(result)
    is_over.set()
    thread.join()
    assert all(outcomes)
