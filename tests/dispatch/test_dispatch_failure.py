"""A rank does not do its part: all ranks get one error in time, and the process continues."""

import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failing import (
    CAPACITY,
    DEADLINE,
    METADATA,
    PLAN,
    F,
    S,
    T,
    W,
    X,
    Y,
    all_say,
    combine_rows,
    errors_of,
    good,
    send,
    spoiled,
)
from jax.sharding import Mesh, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import (
    Metadata,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")

# ---- Ranks that never arrive, or arrive at another call.


def deadline_of(**options):
    run = on_ranks(lambda x, m: send(x, m, **options), mesh_of(W))
    return re.findall(r"deadline_ms = (\d+) : i64", run.lower(X, METADATA).as_text())


def test_default_deadline_is_a_minute_and_can_be_set(monkeypatch):
    assert deadline_of() == ["60000"] and deadline_of(deadline=0.25) == ["250"]
    monkeypatch.setenv("JAX_CP_DISPATCH_DEADLINE", "1.5")
    assert deadline_of() == ["1500"] and deadline_of(deadline=0.25) == ["250"]
    for wrong in "soon", "0", "inf", "nan":
        monkeypatch.setenv("JAX_CP_DISPATCH_DEADLINE", wrong)
        with pytest.raises(ValueError, match=f"DEADLINE is '{wrong}'; it needs to be a positive"):
            deadline_of()


def test_rank_that_never_comes():
    """All others wait until the deadline."""

    def local(y, m):
        here = lambda y: combine_rows(y, m, deadline=DEADLINE)
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
    np.testing.assert_array_equal(good(X, METADATA), dispatched(PLAN, X, CAPACITY))


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


# ---- Failures in different places.


def test_in_the_middle_of_a_loop():
    """Step 2 of 4 fails; the same program runs on good plans before and after."""

    def local(x, plans):
        step = lambda x, m: (x + combine_rows(send(x, m), m), None)
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
        lambda backward, ct: (combine_rows(ct, backward), None, None),
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
    np.testing.assert_array_equal(good(X, METADATA), dispatched(PLAN, X, CAPACITY))


def test_other_programs_run_while_one_waits_until_its_deadline():
    def local(x, m):
        here = lambda x: send(x, m, deadline=3.0)
        away = lambda x: jnp.zeros((CAPACITY, F)) + 0 * x[0]
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 7, away, here, x)

    def run_others():
        while not is_over.is_set() or not outcomes:
            got = good(X, METADATA)
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
