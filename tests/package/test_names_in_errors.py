"""Errors of a running program name the function that was called, in both passes."""

import jax
import metadata_oracle
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks

import jax_cp_dispatch as cp
from jax_cp_dispatch.attention import chunk_exchange, ring_exchange

W, T = 2, 4
RAISED = (jax.errors.JaxRuntimeError, ValueError)  # the latter where a program has one device
TO_RANK_0, _ = metadata_oracle.plan(np.full((W, 1), T), np.zeros((W, 1), np.int32))
PLAN = cp.Metadata(**TO_RANK_0, world_size=W)


def late(x):
    """Rank 1 takes the branch without an exchange, so the others wait."""
    return jax.lax.axis_index(AXIS) == 1


def said(run, *operands):
    with pytest.raises(RAISED) as error:
        jax.block_until_ready(run(*operands))
    return str(error.value)


@pytest.mark.parametrize(
    "name, call",
    [
        ("ring_exchange", lambda x: ring_exchange(x, axis_name=AXIS, deadline=0.2)),
        (
            "chunk_exchange",
            lambda x: chunk_exchange(
                x[None], *cp.cycles.chunk_maps([[0, 1]]), axis_name=AXIS, deadline=0.2
            )[0],
        ),
        (
            "context_parallel_attention",
            lambda x: cp.context_parallel_attention(
                x, x, x, algorithm="ring", axis_name=AXIS, deadline=0.2
            ),
        ),
    ],
)
def test_a_missing_rank(name, call):
    x = np.ones((W, 1, T, 1, 8), np.float32)
    run = on_ranks(lambda x: jax.lax.cond(late(x), lambda x: 2 * x, call, x), mesh_of(W))
    assert f"{name} over axis 'cp': deadline of 200 ms passed" in said(run, x)


def test_a_plan_that_exceeds_the_capacity():
    x = np.ones((W, T), np.float32)
    send = lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=T)
    too_few = "rank 0 would receive 8 tokens but capacity is 4"
    assert f": dispatch over axis 'cp': {too_few}" in said(on_ranks(send, mesh_of(W)), x, PLAN)

    def send_both(x, m):
        return cp.dispatch_qkv(x, x, m, m, axis_name=AXIS, q_capacity=T, kv_capacity=2 * T)

    q_too_few = too_few.replace("capacity", "q_capacity")
    assert f": dispatch_qkv over axis 'cp': {q_too_few}" in said(
        on_ranks(send_both, mesh_of(W)), x, PLAN
    )

    def gradient(y, m):
        combine_rows = lambda y: cp.combine(y, m, axis_name=AXIS, num_tokens=T)
        (dy,) = jax.linear_transpose(combine_rows, y)(0 * y)
        return dy

    assert f"the transpose of combine over axis 'cp': {too_few}" in said(
        on_ranks(gradient, mesh_of(W)), np.ones((W, T), np.float32), PLAN
    )


def test_a_plan_that_attention_cannot_carry_out():
    q = np.random.default_rng(0).normal(size=(1, W * T, 1, 8)).astype(np.float32)
    plan = cp.plan_attention(np.ones((1, W * T), np.int32), world_size=W)

    object.__setattr__(plan, "kv_capacity", 2)
    documents = cp.Documents(np.ones((1, W * T), np.int32)).with_plan(plan)

    def attend(q, documents):
        return cp.context_parallel_attention(
            q, q, q, documents=documents, algorithm="balanced", axis_name=AXIS
        )

    rows = P(None, AXIS)
    specs = rows, documents.specs(AXIS)
    run = jax.jit(jax.shard_map(attend, mesh=mesh_of(W), in_specs=specs, out_specs=rows))
    message = said(run, q, documents)
    assert ": context_parallel_attention over axis 'cp': rank" in message
    assert "PlanConfig.kv_capacity is 2" in message


def test_a_program_on_one_device_raises_value_error():
    """JAX has a faster path for such programs; docs/errors.md says how to catch both errors."""
    plan, _ = cp.compute_metadata(np.array([[T]]), np.array([[0]]))
    run = on_ranks(lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=1), mesh_of(1))
    assert "would receive 4 tokens but capacity is 1" in said(run, np.ones((1, T)), plan)


@pytest.mark.parametrize("algorithm", ["ring", "balanced"])
def test_no_deadline_is_the_default_one(algorithm):
    q = np.random.default_rng(0).normal(size=(1, W * T, 1, 8)).astype(np.float32)
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "algorithm": algorithm}
    out = cp.context_parallel_attention(q, q, q, deadline=None, **options)
    np.testing.assert_array_equal(out, cp.context_parallel_attention(q, q, q, **options))
