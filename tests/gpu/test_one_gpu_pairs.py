"""Exchanges in two calls, all ranks on one GPU: rows move beside products, and are always right."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from movement_oracle import combined, dispatched, random_plan
from moving import capacity_of

from jax_cp_dispatch import (
    Metadata,
    combine,
    combine_start,
    dispatch,
    dispatch_start,
    exchange_done,
)
from jax_cp_dispatch._ranks import runtime  # inner: counts exchanges
from jax_cp_dispatch.buffers import create_dispatch_buffer, destroy_dispatch_buffer
from jax_cp_dispatch.gpu import raise_gpu_errors

W, S, T, FEATURES = 4, 6, 40, 256
OURS: dict[str, Any] = {"axis_name": "cp", "implementation": "cuda_peer", "deadline": 5.0}
PLAN = random_plan(np.random.default_rng(0), W, S, T, 3)
CAPACITY = capacity_of(PLAN)
METADATA = Metadata(**PLAN)


@pytest.fixture(autouse=True)
def no_errors():
    yield
    raise_gpu_errors()


@pytest.fixture
def beside():
    """Returns how many exchanges went on beside their program since the last call."""
    seen = runtime.cuda.num_exchanges_beside_programs()

    def since():
        nonlocal seen
        before, seen = seen, runtime.cuda.num_exchanges_beside_programs()
        return seen - before

    return since


def flat(x):
    """Returns [W, rows, ...] as arrays of all ranks on one device."""
    return jnp.asarray(np.asarray(x).reshape(-1, *np.shape(x)[2:]))


def rows(seed, num_rows=T, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(W, num_rows, FEATURES)).astype(dtype)


def matrix(size=2048, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(size, size)), jnp.bfloat16)


def products(a, num=6):
    """Some milliseconds of work."""
    for _ in range(num):
        a = (a @ a) * jnp.bfloat16(0.01)
    return a


def sent(x, a, metadata=METADATA, **options):
    """Returns the rows that `dispatch_start` sends beside products, and these."""
    options = {**OURS, "capacity": CAPACITY, **options}
    exchange, a = dispatch_start(x, metadata, beside=a, **options)
    return exchange_done(exchange, beside=products(a))


def poison():
    """Fills the free memory of JAX with NaN, so that rows that nobody wrote are seen."""
    held = [jnp.full((1 << 24,), jnp.nan, jnp.float32) for _ in range(8)]
    jax.block_until_ready(held)


def test_rows_are_right_beside_products(beside):
    a, move = matrix(), jax.jit(sent)
    expected_products = np.asarray(jax.jit(products)(a))
    for seed in range(20):
        x = rows(seed)
        poison()
        got, product = move(flat(x), a)
        np.testing.assert_array_equal(np.asarray(got).reshape(W, CAPACITY, -1),
                                      dispatched(PLAN, x, CAPACITY))  # fmt: skip
        np.testing.assert_array_equal(np.asarray(product), expected_products)
    assert beside() == 20


def test_combine(beside):
    def returned(y, a):
        exchange, a = combine_start(y, METADATA, beside=a, num_tokens=T, **OURS)
        return exchange_done(exchange, beside=products(a))

    y, move = rows(1, CAPACITY), jax.jit(returned)
    for _ in range(5):
        poison()
        got, _ = move(flat(y), matrix())
        exact = combined(PLAN, y, T, np.float32)
        np.testing.assert_array_equal(np.asarray(got).reshape(W, T, -1), exact)
    assert beside() == 5


def test_gradients_are_those_of_one_call(beside):
    def loss(x, a, in_two_calls):
        if in_two_calls:
            there, a = sent(x, a)
        else:
            there, a = dispatch(x, METADATA, capacity=CAPACITY, **OURS), products(a)
        return (there**3).sum() + a.astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    x, a = flat(rows(2)), matrix()
    for two, one in zip(grad(x, a, True), grad(x, a, False), strict=True):
        np.testing.assert_array_equal(np.asarray(two), np.asarray(one))
    assert beside() == 2


def test_a_loop_of_pairs(beside):
    """The calls of every step use the same memory."""

    def step(carry, _):
        x, a = carry
        there, a = sent(x, a)
        home = combine(there + 1, METADATA, num_tokens=T, **OURS)
        return (home / 8, a), home.sum()

    def plain(carry, _):
        x, a = carry
        there = dispatch(x, METADATA, capacity=CAPACITY, **OURS)
        home = combine(there + 1, METADATA, num_tokens=T, **OURS)
        return (home / 8, products(a)), home.sum()

    run = lambda body: jax.jit(lambda x, a: jax.lax.scan(body, (x, a), None, length=30))
    got, expected = (run(body)(flat(rows(3)), matrix(512)) for body in (step, plain))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert beside() == 30


def test_two_pairs_of_one_channel_in_flight(beside):
    """They end in the other order; a call in one piece on the same channel is between them."""

    def both(x, y, z, a):
        one, a = dispatch_start(x, METADATA, beside=a, capacity=CAPACITY, **OURS)
        two, (a, y) = dispatch_start(y, METADATA, beside=(a, y), capacity=CAPACITY, **OURS)
        a = products(a)
        middle, a = jax.lax.optimization_barrier(
            (dispatch(z, METADATA, capacity=CAPACITY, **OURS), a)
        )
        y, a = exchange_done(two, beside=a)
        x, a = exchange_done(one, beside=products(a))
        return x, y, middle

    move = jax.jit(both)
    for seed in range(10):
        x, y, z = rows(seed), rows(seed + 1), rows(seed + 2)
        poison()
        got = move(flat(x), flat(y), flat(z), matrix())
        for there, here in zip(got, (x, y, z), strict=True):
            np.testing.assert_array_equal(np.asarray(there).reshape(W, CAPACITY, -1),
                                          dispatched(PLAN, here, CAPACITY))  # fmt: skip
    assert beside() == 20


def test_many_layers_whose_memory_is_reused(beside):
    """XLA gives the arrays of one pair the memory of another one."""

    def layers(x, a):
        for _ in range(8):
            there, a = sent(x, a)
            x = combine(jnp.tanh(there), METADATA, num_tokens=T, **OURS)
        return x, a

    def plain(x, a):
        for _ in range(8):
            there = dispatch(x, METADATA, capacity=CAPACITY, **OURS)
            x, a = combine(jnp.tanh(there), METADATA, num_tokens=T, **OURS), products(a)
        return x, a

    x, a = flat(rows(4)), matrix(1024)
    two, one = jax.jit(layers), jax.jit(plain)
    expected = one(x, a)
    for _ in range(5):
        poison()
        jax.tree.map(np.testing.assert_array_equal, two(x, a), expected)
    assert beside() == 40


def test_many_programs_in_flight(beside):
    move, a, x = jax.jit(lambda x, a: sent(x * 2, a)), matrix(), [rows(seed) for seed in range(12)]
    results = [move(flat(one), a)[0] for one in x]  # none is waited for
    for got, one in zip(results, x, strict=True):
        np.testing.assert_array_equal(
            np.asarray(got).reshape(W, CAPACITY, -1), dispatched(PLAN, one * 2, CAPACITY)
        )
    assert beside() == 12


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_operands_that_are_used_later(beside, donated):
    """A donated operand may be overwritten by what is computed from it, but not too early."""
    move = jax.jit(lambda x, a: (*sent(x, a), x + 1), donate_argnums=donated)
    for seed in range(5):
        x = rows(seed)
        got, _, later = move(flat(x), matrix())
        np.testing.assert_array_equal(np.asarray(later), x.reshape(-1, FEATURES) + 1)
        np.testing.assert_array_equal(
            np.asarray(got).reshape(W, CAPACITY, -1), dispatched(PLAN, x, CAPACITY)
        )
    assert beside() == 5


def test_a_start_without_an_end_here_is_whole(beside):
    """In another branch, or nowhere."""

    def in_a_branch(x, a, flag):
        exchange, a = dispatch_start(x, METADATA, beside=a, capacity=CAPACITY, **OURS)
        a = products(a)
        end = lambda: exchange_done(exchange)[0]
        return jax.lax.cond(flag, end, lambda: jnp.zeros((W * CAPACITY, FEATURES))), a

    x, a = rows(6), matrix()
    expected = dispatched(PLAN, x, CAPACITY).reshape(-1, FEATURES)
    move = jax.jit(in_a_branch)
    np.testing.assert_array_equal(np.asarray(move(flat(x), a, True)[0]), expected)
    np.testing.assert_array_equal(np.asarray(move(flat(x), a, False)[0]), 0)

    def without_end(x, a):
        return products(dispatch_start(x, METADATA, beside=a, capacity=CAPACITY, **OURS)[1])

    jax.block_until_ready(jax.jit(without_end)(flat(x), a))
    assert beside() == 0


def test_an_invalid_plan_gives_nan_and_raises():
    bad = Metadata(**{**PLAN, "dst_rank": np.where(PLAN["dst_rank"] == 0, W, PLAN["dst_rank"])})
    move = jax.jit(lambda x, m, a: sent(x, a, m))
    x, a = flat(rows(7)), matrix()
    assert np.isnan(np.asarray(move(x, bad, a)[0])).all()
    with pytest.raises(RuntimeError, match=r"has dst_rank 4; it must be in \[-1, 4\)"):
        raise_gpu_errors()
    assert not np.isnan(np.asarray(move(x, METADATA, a)[0])).any()


def test_a_destroyed_buffer():
    buffer = create_dispatch_buffer(capacity=CAPACITY)
    move = jax.jit(lambda x, a: sent(x, a, capacity=None, buffer=buffer)[0])
    x, a = rows(8), matrix()
    expected = dispatched(PLAN, x, CAPACITY).reshape(-1, FEATURES)
    np.testing.assert_array_equal(np.asarray(move(flat(x), a)), expected)
    destroy_dispatch_buffer(buffer)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"buffer {buffer} has been destroyed"):
        jax.block_until_ready(move(flat(x), a))


def test_batched_rows(beside):
    x = np.stack([rows(9), rows(10)])
    move = jax.jit(jax.vmap(lambda x, a: sent(x, a)[0], (0, None)))
    got = move(jnp.asarray(x.reshape(2, W * T, FEATURES)), matrix())
    for there, here in zip(np.asarray(got), x, strict=True):
        np.testing.assert_array_equal(there.reshape(W, CAPACITY, -1),
                                      dispatched(PLAN, here, CAPACITY))  # fmt: skip
    assert beside() == 1
