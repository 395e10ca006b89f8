"""Every kind of error in docs/errors.md is raised, with the message that the page shows."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import metadata_oracle
import numpy as np
import pytest
from on_mesh import AXIS, mesh_of, on_ranks

import jax_cp_dispatch as cpd
from jax_cp_dispatch import buffers
from jax_cp_dispatch.cpu_devices import start_cpu_devices

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
EXAMPLES = dict(re.findall(r"^\| ([a-z ]+) \| `([^`]+)` \|", PAGE, flags=re.M))

W, T = 4, 8
X = np.ones((W * T, 2), np.float32)
Q = np.ones((1, W * T, 2, 8), np.float32)
PLAN, _ = metadata_oracle.plan(np.full((W, 1), T), np.zeros((W, 1), np.int32))
TO_RANK_0 = cpd.Metadata(**PLAN, world_size=W)
TO_RANK_7 = dataclasses.replace(TO_RANK_0, dst_rank=np.full_like(TO_RANK_0.dst_rank, 7))
TWO_DOCUMENTS = np.repeat([[1, 2]], W * T // 2, axis=1)
ONE_DOCUMENT = np.ones_like(TWO_DOCUMENTS)
IN_PIECES = np.tile(TWO_DOCUMENTS[:, ::2], 2)
TOO_SMALL = cpd.PlanConfig(
    q_capacity=W * T, kv_capacity=10, max_q_transfers=8, max_kv_transfers=8, max_pieces=8
)

plan_for = partial(cpd.plan_attention, world_size=W)


def send(x=X, plan=TO_RANK_0, **options):
    given: dict[str, Any] = {"mesh": mesh_of(W), **options}
    return cpd.dispatch(x, plan, axis_name=AXIS, **given)


def attend(q=Q, k=Q, v=Q, **options):
    options = {"algorithm": "ring", **options}
    return cpd.context_parallel_attention(q, k, v, mesh=mesh_of(W), axis_name=AXIS, **options)


def attend_with(plan, segment_ids: np.ndarray = TWO_DOCUMENTS):
    documents = cpd.Documents(segment_ids).with_plan(plan)
    return jax.jit(partial(attend, algorithm="balanced", documents=documents))(Q)


def destroyed_buffer():
    buffer = buffers.create_dispatch_buffer(capacity=W * T)
    buffers.destroy_dispatch_buffer(buffer)
    return send(buffer=buffer)


def plans_of_two_batches():
    of_each = plan_for(TWO_DOCUMENTS), plan_for(ONE_DOCUMENT)
    mixed = jax.tree.map(lambda a, b: np.concatenate([a[:2], b[2:]]), *of_each)
    return attend_with(mixed, ONE_DOCUMENT)  # each rank's columns are those of its plan


def array_out_of_order():
    documents = cpd.Documents(TWO_DOCUMENTS)
    tokens = np.arange(W * T)[None]
    checksums = cpd.sequence.token_checksums(tokens, documents=documents)
    given = {"documents": documents.zigzag(W), "mesh": mesh_of(W), "axis_name": AXIS}
    return jax.jit(partial(cpd.sequence.check_tokens, **given))(tokens, checksums)


def rank_1_does_not_call():
    def step(x, plan):
        call = partial(cpd.dispatch, metadata=plan, axis_name=AXIS, capacity=W * T, deadline=0.2)
        leave = lambda x: jax.numpy.tile(2 * x, (W, 1))
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 1, leave, call, x)

    return on_ranks(step, mesh_of(W))(X.reshape(W, T, 2), TO_RANK_0)


def too_large_a_buffer():
    buffer = buffers.create_comm_overlap_buffer(
        "RS", "RING_EXCHANGE", buffer_shape=(1 << 20, 1 << 22), buffer_dtype="float32", tp_size=W
    )
    w = np.ones((W, 2, 4), np.float32)
    multiply = partial(cpd.matmul_reduce_scatter, axis_name=AXIS, buffer=buffer)
    try:
        return jax.block_until_ready(on_ranks(multiply, mesh_of(W))(X.reshape(W, T, 2), w))
    finally:
        buffers.destroy_comm_overlap_buffer(buffer)


RAISED_BY = {
    "wrong type": lambda: send(mesh=AXIS, capacity=4),
    "invalid value": lambda: send(capacity=4, deadline=-1.0),
    "wrong shape": lambda: attend(k=Q[:, :, [0, 1, 1]], v=Q[:, :, [0, 1, 1]]),
    "not divisible": lambda: send(X[:30], capacity=4),
    "options that exclude each other": send,
    "no mesh or axis": lambda: send(mesh=None, capacity=4),
    "order that the algorithm cannot follow": lambda: attend(algorithm="placed"),
    "plan of another size": lambda: attend_with(plan_for(TWO_DOCUMENTS, world_size=2)),
    "destroyed storage": destroyed_buffer,
    "no such derivative": lambda: jax.hessian(lambda q: attend(q).sum())(Q),
    "not available here": lambda: attend(implementation="cuda_peer"),
    "invalid documents": lambda: plan_for(np.array([[1, 1, 2, 2, 1, 1, 1, 1]])),
    "batch does not fit": lambda: plan_for(TWO_DOCUMENTS, config=cpd.PlanConfig(kv_capacity=4)),
    "invalid plan": lambda: TO_RANK_7.validate(),
    "part instead of the whole": lambda: TO_RANK_0.get_slice(0).get_slice(1),
    "started too late": lambda: start_cpu_devices(64),
    "receive buffer too small": lambda: send(capacity=4),
    "invalid plan at run time": lambda: send(plan=TO_RANK_7, capacity=W * T),
    "plan of another batch": lambda: attend_with(plan_for(TWO_DOCUMENTS), ONE_DOCUMENT),
    "ranks with different plans": plans_of_two_batches,
    "tokens in another order": lambda: jax.jit(lambda ids: attend(segment_ids=ids))(IN_PIECES),
    "mask of other tokens": lambda: jax.jit(
        lambda ids: attend(mask=cpd.masks.SharedPrefix(ONE_DOCUMENT), segment_ids=ids)
    )(ONE_DOCUMENT),
    "array of other documents": array_out_of_order,
    "fallback instead of a plan": lambda: attend_with(
        plan_for(TWO_DOCUMENTS, config=TOO_SMALL, fallback="ring")
    ),
    "missing rank": rank_1_does_not_call,
    "no memory": too_large_a_buffer,
}


def test_the_page_and_this_test_have_the_same_kinds():
    assert list(EXAMPLES) == list(RAISED_BY)


def test_the_code_of_an_error_is_that_of_its_own_program():
    message = "dispatch over axis 'cp': rank 0 would receive 32 tokens"
    failed = jax.jit(partial(send, capacity=4))(X)
    later = failed + 1
    for result, code in (
        (failed, "INVALID_ARGUMENT: "),
        (later, "INTERNAL: Error dispatching computation: "),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            jax.block_until_ready(result)
        assert str(raised.value).startswith(code + message)
        assert f"`{code}dispatch over axis 'cp': " in PAGE


@pytest.mark.parametrize("kind", RAISED_BY)
def test_example(kind):
    parts = [re.escape(part.strip()) for part in EXAMPLES[kind].split("…")]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        jax.block_until_ready(RAISED_BY[kind]())
    of_program = raised.type is jax.errors.JaxRuntimeError
    text = str(raised.value) if of_program else f"{raised.typename}: {raised.value}"
    assert re.fullmatch(r"\s*.+\s*".join(parts), text, flags=re.S), text
