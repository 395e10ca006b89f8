"""Attention has one derivative, in reverse mode; linear operations have all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from moving import capacity_of
from on_mesh import AXIS, mesh_of, on_ranks

import jax_cp_dispatch as cp

W, T = 2, 4
Q = np.random.default_rng(0).normal(size=(1, W * T, 1, 4)).astype(np.float32)
IDS = np.ones((1, W * T), np.int32)
DOCUMENTS = cp.Documents(IDS).with_plan(cp.plan_attention(IDS, world_size=W))


def inside(algorithm):
    rows = P(None, AXIS)
    attend = jax.shard_map(
        lambda x, documents: cp.context_parallel_attention(
            x, x, x, axis_name=AXIS, algorithm=algorithm, documents=documents
        ),
        mesh=mesh_of(W),
        in_specs=(rows, DOCUMENTS.specs(AXIS)),
        out_specs=rows,
    )
    return lambda x: attend(x, DOCUMENTS)


def outside(algorithm):
    return lambda x: cp.context_parallel_attention(
        x, x, x, mesh=mesh_of(W), axis_name=AXIS, algorithm=algorithm
    )


def local(x):
    start = jnp.zeros(x.shape[:2], jnp.int32)
    return cp.local_attention(x, x, x, start, start + 3)[0]


DOOR = "context_parallel_attention"
FUNCTIONS = {
    "balanced": inside("balanced"),
    "ring on global arrays": outside("ring"),
    "local_attention": local,
}


FORWARD = r"^{op}: forward mode .*supported. Use reverse mode: jax.vjp, jax.grad or jax.jac"
SECOND = r"^{op}: second derivatives are not supported.*stop_gradient"


def check_forward_mode(attend, op, compiled):
    for derivative in (
        lambda x: jax.jvp(attend, (x,), (x,)),
        lambda x: jax.linearize(attend, x)[1](x),
    ):
        with pytest.raises(NotImplementedError, match=FORWARD.format(op=op)):
            compiled(derivative)(Q)


def check_second_derivatives(attend, op, compiled):
    loss = lambda x: (attend(x) ** 2).sum()
    second = SECOND.format(op=op)
    with pytest.raises(NotImplementedError, match=second):
        compiled(jax.grad(lambda x: jax.grad(loss)(x).sum()))(Q)
    # Forward over reverse uses both modes.
    with pytest.raises(NotImplementedError, match=rf"{second}|{FORWARD.format(op=op)}"):
        compiled(lambda x: jax.jvp(jax.grad(loss), (x,), (x,)))(Q)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_derivatives_of_attention_are_rejected_by_name(name):
    op = name if name == "local_attention" else DOOR
    check_forward_mode(FUNCTIONS[name], op, jax.jit)
    check_second_derivatives(FUNCTIONS[name], op, jax.jit)
    of_cotangents = jax.grad(lambda g: jax.vjp(FUNCTIONS[name], Q)[1](g)[0].sum())
    with pytest.raises(NotImplementedError, match=SECOND.format(op=op)):
        jax.jit(of_cotangents)(Q)


@pytest.mark.usefixtures("operations_compiled_once")
def test_other_derivatives_are_rejected_without_jit():
    """Of few operations, each of which is a program: second derivatives compute the first."""
    as_it_is = lambda function: function
    check_forward_mode(FUNCTIONS["ring on global arrays"], DOOR, as_it_is)
    check_forward_mode(local, "local_attention", as_it_is)
    check_second_derivatives(local, "local_attention", as_it_is)


def test_the_value_of_a_gradient_may_be_used_in_a_loss():
    loss = lambda x: (local(x) ** 2).sum()
    with_gradient = lambda x: loss(x) + jax.grad(loss)(jax.lax.stop_gradient(x)).sum()
    np.testing.assert_allclose(jax.grad(with_gradient)(Q), jax.grad(loss)(Q), rtol=1e-6)


def test_dispatch_and_combine_have_all_derivatives():
    """They are linear: the tangent is the same movement, also for a gradient."""
    rng = np.random.default_rng(1)
    plan = random_plan(rng, W, 3, T, num_replicas=2)
    capacity = capacity_of(plan)
    x, dx = rng.normal(size=(2, W, T, 2)).astype(np.float32)
    metadata = cp.Metadata(**plan)
    send = on_ranks(lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity), mesh_of(W))
    combine_rows = on_ranks(lambda y, m: cp.combine(y, m, axis_name=AXIS, num_tokens=T), mesh_of(W))
    _, sent = jax.jvp(lambda x: send(x, metadata), (x,), (dx,))
    np.testing.assert_array_equal(sent, dispatched(plan, dx, capacity))
    _, tangent = jax.jvp(lambda y: combine_rows(y, metadata), (sent,), (sent,))
    np.testing.assert_allclose(tangent, combined(plan, np.asarray(sent), T), rtol=1e-5, atol=1e-6)
    # The gradient of half the squared norm of dispatch(x) is combine(dispatch(x)), linear in x.
    square = jax.grad(lambda x: 0.5 * (send(x, metadata) ** 2).sum())
    _, product = jax.jvp(square, (x,), (dx,))
    np.testing.assert_allclose(
        product, combined(plan, dispatched(plan, dx, capacity), T), rtol=1e-5, atol=1e-6
    )
