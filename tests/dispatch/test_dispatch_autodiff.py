"""dispatch and combine are each other's transpose, under every transformation of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import Metadata, combine, dispatch

W, S, T = 8, 5, 16


@pytest.fixture
def plan():
    return random_plan(np.random.default_rng(3), W, S, T, 3)


def operations(plan, check_vma=True):
    """Linear functions on [W, T, ...] and [W, capacity, ...]: dispatch and combine of one plan."""
    metadata = Metadata(**plan)
    capacity = int(plan["num_total_recv_tokens"].max()) + 1
    mesh = mesh_of(W)
    send = on_ranks(
        lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=capacity), mesh, check_vma=check_vma
    )
    combine_rows = on_ranks(
        lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=T), mesh, check_vma=check_vma
    )
    return (lambda x: send(x, metadata)), (lambda y: combine_rows(y, metadata)), capacity


def integers(rng, *shape):
    """Small integers as floats: their sums are exact, so results compare without tolerance."""
    return rng.integers(-8, 9, shape).astype(np.float32)


@pytest.mark.parametrize("check_vma, num_replicas", [(True, 3), (False, 1)])
def test_adjoint(check_vma, num_replicas):
    """<dispatch(x), y> = <x, combine(y)>, and the VJPs are the adjoints."""
    rng = np.random.default_rng(0)
    plan = random_plan(rng, W, S, T, num_replicas)
    send, combine_rows, capacity = operations(plan, check_vma)
    x, y = integers(rng, W, T, 3), integers(rng, W, capacity, 3)
    assert np.vdot(send(x), y) == np.vdot(x, combine_rows(y))
    np.testing.assert_array_equal(jax.vjp(send, x)[1](y)[0], combined(plan, y, T))
    np.testing.assert_array_equal(jax.vjp(combine_rows, y)[1](x)[0], dispatched(plan, x, capacity))


def test_forward_mode_is_the_operation_itself(plan):
    rng = np.random.default_rng(1)
    send, combine_rows, capacity = operations(plan)
    x, y = integers(rng, 2, W, T, 3), integers(rng, 2, W, capacity, 3)
    _, tangent = jax.jvp(send, (x[0],), (x[1],))
    np.testing.assert_array_equal(tangent, dispatched(plan, x[1], capacity))
    _, tangent = jax.jvp(combine_rows, (y[0],), (y[1],))
    np.testing.assert_array_equal(tangent, combined(plan, y[1], T))


def test_second_order(plan):
    """d/dx of |grad f|^2 for f(x) = sum(w * dispatch(x)^3), against the chain rule by hand."""
    rng = np.random.default_rng(2)
    send, _, capacity = operations(plan)
    x, w = integers(rng, W, T, 3) / 8, integers(rng, W, capacity, 3)
    gradient = jax.grad(lambda x: jnp.sum(w * send(x) ** 3))
    got = jax.grad(lambda x: jnp.sum(gradient(x) ** 2))(x)
    y = dispatched(plan, x, capacity).astype(np.float64)
    first = combined(plan, 3 * w * y**2, T)
    expected = combined(plan, 6 * w * y * dispatched(plan, 2 * first, capacity), T)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_integers_travel_with_floats_and_have_no_gradient(plan):
    rng = np.random.default_rng(3)
    _, _, capacity = operations(plan)
    x, w = integers(rng, W, T, 3), integers(rng, W, capacity, 3)
    tags = rng.integers(0, 5, (W, T)).astype(np.int32)

    def loss(x, tags, w, m):
        y, arrived = dispatch((x, tags), m, axis_name=AXIS, capacity=capacity)
        return jax.lax.psum(jnp.sum(y * w * arrived[:, None]), AXIS)

    def local(x, tags, w, m):
        return jax.grad(loss)(x[0], tags[0], w[0], m)[None]

    grad = jax.shard_map(local, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))
    got = jax.jit(grad)(x, tags, w, Metadata(**plan))
    scaled = w * dispatched(plan, tags, capacity)[..., None]
    np.testing.assert_array_equal(got, combined(plan, scaled, T))


def test_vmap_with_one_plan_is_one_call_with_wider_rows(plan):
    rng = np.random.default_rng(5)
    metadata = Metadata(**plan)
    capacity = int(plan["num_total_recv_tokens"].max())
    x = integers(rng, W, 4, T, 3)

    def local(x, m):
        move = lambda x: dispatch(x, m, axis_name=AXIS, capacity=capacity)
        return jax.vmap(move)(x)

    run = on_ranks(local, mesh_of(W))
    expected = np.stack([dispatched(plan, x[:, b], capacity) for b in range(4)], axis=1)
    np.testing.assert_array_equal(run(x, metadata), expected)
    assert run.lower(x, metadata).as_text().count("jax_cp_dispatch.dispatch") == 1


def test_vmap_with_a_plan_per_example():
    rng = np.random.default_rng(6)
    plans = [random_plan(rng, W, S, T, 2) for _ in range(3)]
    capacity = max(int(plan["num_total_recv_tokens"].max()) for plan in plans)
    metadata = jax.tree.map(lambda *a: np.stack(a, 1), *(Metadata(**plan) for plan in plans))
    x = integers(rng, W, T, 3)

    def local(x, m):
        def move(m):
            y = dispatch(x, m, axis_name=AXIS, capacity=capacity)
            return y, combine(y, m, axis_name=AXIS, num_tokens=T)

        return jax.vmap(move)(m)

    got, home = on_ranks(local, mesh_of(W))(x, metadata)
    for b, plan in enumerate(plans):
        y = dispatched(plan, x, capacity)
        np.testing.assert_array_equal(got[:, b], y)
        np.testing.assert_array_equal(home[:, b], combined(plan, y, T))


def test_bfloat16_gradients_round_once():
    """Nine copies of one row return as their float32 sum, not as a chain of bfloat16 sums."""
    plan = random_plan(np.random.default_rng(7), W, S, T, 9)
    send, _, capacity = operations(plan)
    y = np.random.default_rng(8).normal(size=(W, capacity, 3)).astype(jnp.bfloat16)
    x = jnp.zeros((W, T, 3), jnp.bfloat16)
    got = jax.vjp(send, x)[1](y)[0]
    expected = combined(plan, y, T, np.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn"])
def test_gradients_of_dtypes_that_move_as_others(plan, dtype):
    """Complex numbers are summed as pairs, 8-bit floats in float32, rounded once."""
    rng = np.random.default_rng(9)
    send, _, capacity = operations(plan)
    x = jnp.zeros((W, T, 3), dtype)
    y = integers(rng, W, capacity, 3).astype(dtype)
    if dtype == "complex64":
        y = y + 1j * integers(rng, W, capacity, 3)
    y = jnp.asarray(y, dtype)
    got = jax.vjp(send, x)[1](y)[0]
    wide = np.complex64 if dtype == "complex64" else np.float32
    expected = combined(plan, np.asarray(y), T, wide).astype(x.dtype)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got).astype(wide), expected.astype(wide))
