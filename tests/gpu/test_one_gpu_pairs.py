"""Exchanges in two calls, all ranks on one GPU: rows move beside products, and are always right."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inner import num_exchanges_beside_programs
from movement_oracle import dispatched, random_plan
from moving import capacity_of

from jax_cp_dispatch import Metadata, combine, dispatch, dispatch_start, exchange_done
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
    seen = num_exchanges_beside_programs()

    def since():
        nonlocal seen
        before, seen = seen, num_exchanges_beside_programs()
        return seen - before

    return since


def rows(seed):
    """Returns [W * T, FEATURES], all ranks on one device."""
    x = np.random.default_rng(seed).normal(size=(W * T, FEATURES))
    return jnp.asarray(x, jnp.float32)


def are_there(got, x):
    """Compares rows with those that `dispatch` sends."""
    sent = dispatched(PLAN, np.asarray(x).reshape(W, T, -1), CAPACITY)
    np.testing.assert_array_equal(np.asarray(got), sent.reshape(-1, FEATURES))


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


def at_once(x, a):
    """The same by one call."""
    return dispatch(x, METADATA, capacity=CAPACITY, **OURS), products(a)


def back(y):
    return combine(y, METADATA, num_tokens=T, **OURS)


def poison():
    """Fills the free memory of JAX with NaN, so that rows that nobody wrote are seen."""
    held = [jnp.full((1 << 24,), jnp.nan, jnp.float32) for _ in range(8)]
    jax.block_until_ready(held)


def same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_rows_are_right_beside_products(beside):
    a, move = matrix(), jax.jit(sent)
    expected = jax.jit(products)(a)
    for seed in range(20):
        poison()
        got, product = move(x := rows(seed), a)
        are_there(got, x)
        same(product, expected)
    assert beside() == 20


def test_gradients_are_those_of_one_call(beside):
    """They come back beside products, too."""

    def gradients(move):
        def loss(x, a):
            there, a = move(x, a)
            return (there**3).sum() + a.astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(rows(2), matrix())

    same(gradients(sent), gradients(at_once))
    assert beside() == 2


def test_a_loop_of_pairs(beside):
    """The calls of every step use the same memory."""

    def run(move):
        def step(carry, _):
            there, a = move(*carry)
            home = back(there + 1)
            return (home / 8, a), home.sum()

        return jax.jit(lambda *x: jax.lax.scan(step, x, None, length=30))(rows(3), matrix(512))

    same(run(sent), run(at_once))
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
        given = [rows(seed + i) for i in range(3)]
        poison()
        for there, here in zip(move(*given, matrix()), given, strict=True):
            are_there(there, here)
    assert beside() == 20


def test_many_layers_whose_memory_is_reused(beside):
    """XLA gives the arrays of one pair the memory of another one."""

    def layers(move):
        def run(x, a):
            for _ in range(8):
                there, a = move(x, a)
                x = back(jnp.tanh(there))
            return x, a

        return jax.jit(run)

    given, two = (rows(4), matrix(1024)), layers(sent)
    expected = layers(at_once)(*given)
    for _ in range(5):
        poison()
        same(two(*given), expected)
    assert beside() == 40


def test_many_programs_in_flight(beside):
    move, a, given = jax.jit(lambda x, a: sent(x * 2, a)), matrix(), [*map(rows, range(12))]
    results = [move(x, a)[0] for x in given]  # none is waited for
    for got, x in zip(results, given, strict=True):
        are_there(got, 2 * x)
    assert beside() == 12


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_operands_that_are_used_later(beside, donated):
    """A donated operand may be overwritten by what is computed from it, but not too early."""
    move = jax.jit(lambda x, a: (*sent(x, a), x + 1), donate_argnums=donated)
    for seed in range(5):
        got, _, later = move(rows(seed), matrix())
        same(later, rows(seed) + 1)
        are_there(got, rows(seed))
    assert beside() == 5


def test_a_start_without_an_end_here_is_whole(beside):
    """In another branch, or nowhere."""

    def in_a_branch(x, a, flag):
        exchange, a = dispatch_start(x, METADATA, beside=a, capacity=CAPACITY, **OURS)
        a = products(a)
        end = lambda: exchange_done(exchange)[0]
        return jax.lax.cond(flag, end, lambda: jnp.zeros((W * CAPACITY, FEATURES))), a

    x, a = rows(6), matrix()
    move = jax.jit(in_a_branch)
    are_there(move(x, a, True)[0], x)
    same(move(x, a, False)[0], np.zeros((W * CAPACITY, FEATURES)))

    def without_end(x, a):
        return products(dispatch_start(x, METADATA, beside=a, capacity=CAPACITY, **OURS)[1])

    jax.block_until_ready(jax.jit(without_end)(x, a))
    assert beside() == 0


def test_an_invalid_plan_gives_nan_and_raises():
    bad = Metadata(**{**PLAN, "dst_rank": np.where(PLAN["dst_rank"] == 0, W, PLAN["dst_rank"])})
    move = jax.jit(lambda x, m, a: sent(x, a, m)[0])
    x, a = rows(7), matrix()
    assert np.isnan(np.asarray(move(x, bad, a))).all()
    with pytest.raises(RuntimeError, match=r"has dst_rank 4; it must be in \[-1, 4\)"):
        raise_gpu_errors()
    are_there(move(x, METADATA, a), x)
