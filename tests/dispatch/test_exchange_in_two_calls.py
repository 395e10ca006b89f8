"""`dispatch_start`, `combine_start` and `exchange_done`: the values and derivatives of one call on
CPU; on GPUs two custom calls, wherever XLA keeps them together. Nothing runs on GPUs here."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from movement_oracle import dispatched, random_plan
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import (
    Metadata,
    combine,
    combine_start,
    dispatch,
    dispatch_start,
    exchange_done,
)

W, S, T, CAPACITY = 4, 5, 8, 64
PLAN = random_plan(np.random.default_rng(0), W, S, T, 2)
METADATA = Metadata(**PLAN)
NAME: dict[str, Any] = {"axis_name": AXIS}
RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(W * T, 6)).astype(np.float32)
WEIGHTS = [RANDOM.normal(size=(6, n)).astype(np.float32) for n in (3, 5)]


def pair(x, wk, wq, metadata):
    exchange, x = dispatch_start(
        (x @ wk, 2 * x @ wk), metadata, beside=x, capacity=CAPACITY, **NAME
    )
    (k, v), q = exchange_done(exchange, beside=jnp.sin(x @ wq))
    exchange, k = combine_start(k * v, metadata, beside=k, num_tokens=T, **NAME)
    home, k = exchange_done(exchange, beside=jnp.cos(k))
    return q, v, home, k


def plain(x, wk, wq, metadata):
    k, v = dispatch((x @ wk, 2 * x @ wk), metadata, capacity=CAPACITY, **NAME)
    home = combine(k * v, metadata, num_tokens=T, **NAME)
    return jnp.sin(x @ wq), v, home, jnp.cos(k)


def on_ranks(fn):
    specs = P(AXIS), P(), P(), P(AXIS)
    return jax.shard_map(fn, mesh=mesh_of(W), in_specs=specs, out_specs=P(AXIS))


def squares(outs):
    """Their sum, and the outputs."""
    return sum((y**2).sum() for y in outs), outs


def assert_equal(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_rows_arrive_and_what_is_beside_is_unchanged():
    def send(x, metadata, y):
        exchange, y = dispatch_start(x, metadata, beside={"y": y}, capacity=CAPACITY, **NAME)
        return exchange_done(exchange, beside=y)

    run = jax.shard_map(send, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))
    y = np.arange(W * 3, dtype=np.int32)
    there, beside = jax.jit(run)(X, METADATA, y)
    expected = dispatched(PLAN, X.reshape(W, T, -1), CAPACITY)
    np.testing.assert_array_equal(np.asarray(there).reshape(expected.shape), expected)
    np.testing.assert_array_equal(beside["y"], y)


def test_values_and_gradients_are_those_of_one_call():
    def both(fn):
        total = lambda *x: squares(on_ranks(fn)(*x))
        return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))

    assert_equal(*(both(fn)(X, *WEIGHTS, METADATA) for fn in (pair, plain)))
    assert_equal(*(on_ranks(fn)(X, *WEIGHTS, METADATA) for fn in (pair, plain)))  # without jit


def test_examples_and_examples_of_plans():
    many = np.stack([X, 2 * X])
    plans = jax.tree.map(lambda x: jnp.stack([x, x]), METADATA)
    for axes, plan in (((0, None, None, None), METADATA), ((0, None, None, 0), plans)):

        def both(fn, axes=axes):
            total = lambda *x: squares(jax.vmap(on_ranks(fn), axes)(*x))
            return jax.jit(jax.value_and_grad(total, has_aux=True))

        two, one = (both(fn)(many, *WEIGHTS, plan) for fn in (pair, plain))
        assert_equal(two[0][1], one[0][1])
        np.testing.assert_allclose(two[1], one[1], rtol=1e-6)


def test_arrays_of_all_ranks():
    run = lambda fn: lambda x: fn(x, *WEIGHTS, METADATA)
    for mesh in (None, mesh_of(W)):
        with jax.set_mesh(mesh) if mesh else jax.disable_jit(False):
            assert_equal(*(jax.jit(run(fn))(X) for fn in (pair, plain)))


def test_integers_and_arrays_without_elements_move():
    def send(x, metadata):
        arrays = {"ids": jnp.arange(T), "none": jnp.zeros((T, 0)), "x": x}
        exchange, _ = dispatch_start(arrays, metadata, capacity=CAPACITY, **NAME)
        return exchange_done(exchange)[0]

    run = jax.shard_map(send, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))
    there = jax.jit(run)(X, METADATA)
    expected = dispatched(PLAN, np.tile(np.arange(T), (W, 1))[..., None], CAPACITY)
    np.testing.assert_array_equal(np.asarray(there["ids"]).reshape(W, -1), expected[..., 0])
    grads = jax.grad(lambda x: (run(x, METADATA)["x"] ** 2).sum())(X)
    assert grads.shape == X.shape and there["none"].shape == (W * CAPACITY, 0)


def test_gradients_of_8_bit_floats():
    """Their sum is wider: its adjoint is one exchange."""

    def total(x, is_pair):
        x = x.astype("float8_e4m3fn")
        if is_pair:
            exchange, _ = dispatch_start(x, METADATA, capacity=CAPACITY, **NAME)
            there, _ = exchange_done(exchange)
        else:
            there = dispatch(x, METADATA, capacity=CAPACITY, **NAME)
        return (there.astype(jnp.float32) ** 2).sum()

    with jax.set_mesh(mesh_of(W)):
        two, one = (
            jax.jit(jax.grad(total), static_argnums=1)(X, is_pair) for is_pair in (True, False)
        )
    np.testing.assert_array_equal(two, one)


# ---- The refusals of `exchange_done`. The other two refuse what `dispatch` and `combine` do.


def test_an_exchange_ends_once():
    def twice(x, metadata):
        exchange, _ = dispatch_start(x, metadata, capacity=CAPACITY, **NAME)
        exchange_done(exchange)
        return exchange_done(exchange)[0]

    with pytest.raises(ValueError, match=r"exchange_done: this exchange of dispatch_start is done"):
        jax.eval_shape(lambda x: on_two(twice)(x, METADATA), X)
    with pytest.raises(TypeError, match=r"exchange_done: got tuple; it needs the first result of"):
        exchange_done((X, None))


def on_two(fn):
    return jax.shard_map(fn, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))


# ---- Lowered for GPUs.


def calls(fn, *arguments):
    text = jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @jax_cp_dispatch\.(\w+)", text)


def sent(x, metadata):
    exchange, x = dispatch_start(x, metadata, beside=x, capacity=CAPACITY, **NAME)
    return exchange_done(exchange, beside=2 * x)[0]


FORWARD, BACKWARD = ["dispatch_start", "exchange_done"], ["combine_start", "exchange_done"]


@pytest.mark.usefixtures("cuda")
def test_two_calls_and_two_for_the_derivative():
    send = on_two(sent)
    assert calls(send, X, METADATA) == FORWARD
    squares = lambda x, m: (send(x, m) ** 2).sum()
    assert calls(jax.grad(squares), X, METADATA) == FORWARD + BACKWARD
    steps = lambda x, m: jax.lax.scan(
        lambda c, _: (c + send(c, m)[: W * T], None), x, None, length=3
    )
    assert calls(steps, X, METADATA) == FORWARD
    assert calls(sent, X, METADATA) == FORWARD  # one device with all ranks
    assert calls(jax.vmap(send, (0, None)), np.stack([X, X]), METADATA) == FORWARD


@pytest.mark.usefixtures("cuda")
def test_no_second_call_in_another_loop_or_branch():
    """The first one is then the whole exchange; see csrc/gpu_schedule/exchange_pairs.h."""

    def in_a_branch(x, metadata):
        exchange, _ = dispatch_start(x, metadata, capacity=CAPACITY, **NAME)
        end = lambda: exchange_done(exchange)[0]
        return jax.lax.cond(x[0, 0] > 0, end, lambda: jnp.zeros((CAPACITY, x.shape[1])) + x[0])

    assert calls(on_two(in_a_branch), X, METADATA) == ["dispatch_start"]
    plans = jax.tree.map(lambda x: jnp.stack([x, x]), METADATA)
    assert calls(jax.vmap(on_two(sent)), np.stack([X, X]), plans) == ["dispatch_start"]


@pytest.mark.usefixtures("cuda")
def test_arrays_of_several_devices_and_other_implementations_move_in_one_call():
    with jax.set_mesh(mesh_of(W)):
        assert calls(sent, X, METADATA) == []  # that of each device, made when it is partitioned
    by_xla = lambda x, m: dispatch_start(x, m, capacity=CAPACITY, implementation="xla", **NAME)[
        0
    ].done(None)[0][0]
    assert calls(on_two(by_xla), X, METADATA) == []
