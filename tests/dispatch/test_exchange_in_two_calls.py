"""`dispatch_start`, `combine_start` and `exchange_done` on CPU devices: one call in two parts.

Values and contexts: tests/contract. Two custom calls on GPUs: test_gpu_lowering.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import CAPACITY, METADATA, PLAN, F, T, W, X
from jax.sharding import PartitionSpec as P
from movement_oracle import dispatched
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import dispatch, dispatch_start, exchange_done


def start(x, metadata, **options):
    return dispatch_start(x, metadata, axis_name=AXIS, capacity=CAPACITY, **options)


def on_ranks(fn):
    return jax.shard_map(fn, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))


def in_two_calls(arrays, metadata):
    exchange, beside = start(arrays, metadata, beside={"y": arrays["x"]})
    there, beside = exchange_done(exchange, beside=beside)
    return there, beside["y"]


def in_one_call(arrays, metadata):
    there = dispatch(arrays, metadata, axis_name=AXIS, capacity=CAPACITY)
    return there, arrays["x"]


def test_arrays_of_all_kinds_are_those_of_one_call():
    """Integers, arrays without elements, and 8-bit floats, whose adjoint is one exchange.

    Mapped over examples of one plan.
    """

    def total(x, metadata, move):
        narrow = x.astype("float8_e4m3fn")
        arrays = {"ids": jnp.arange(T), "none": jnp.zeros((T, 0)), "x": x, "narrow": narrow}
        there, beside = move(arrays, metadata)
        squares = lambda x: (x.astype(jnp.float32) ** 2).sum()
        value = squares(there["x"]) + squares(there["narrow"]) + squares(beside)
        return jax.lax.psum(value, AXIS), there

    def both(move):
        grad = jax.grad(lambda x, m: total(x, m, move), has_aux=True)
        run = jax.shard_map(
            jax.vmap(grad, (0, None)), mesh=mesh_of(W), in_specs=(P(None, AXIS), P(AXIS)),
            out_specs=P(None, AXIS),
        )  # fmt: skip
        return jax.jit(run)(np.stack([X, X / 2]), METADATA)

    (two, there), (one, _) = both(in_two_calls), both(in_one_call)
    np.testing.assert_array_equal(two, one)
    ids = dispatched(PLAN, np.tile(np.arange(T), (W, 1)), CAPACITY)
    np.testing.assert_array_equal(there["ids"], [ids.reshape(-1)] * 2)
    sent = dispatched(PLAN, X.reshape(W, T, F), CAPACITY).reshape(-1, F)
    np.testing.assert_array_equal(there["x"], [sent, sent / 2])
    assert there["none"].shape == (2, W * CAPACITY, 0)


def test_an_exchange_ends_once():
    def twice(x, metadata):
        exchange, _ = start(x, metadata)
        exchange_done(exchange)
        return exchange_done(exchange)[0]

    with pytest.raises(ValueError, match=r"exchange_done: this exchange of dispatch_start is done"):
        jax.eval_shape(lambda x: on_ranks(twice)(x, METADATA), X)
    with pytest.raises(TypeError, match=r"exchange_done: got tuple; it needs the first result of"):
        exchange_done((X, None))
