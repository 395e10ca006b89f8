"""`jax.disable_jit`, for debugging: attention gives what it gives under jit."""

from typing import Any

import jax
import numpy as np
import pytest
from in_ci import in_ci
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import (
    Documents,
    context_parallel_attention,
    plan_attention,
)

pytestmark = pytest.mark.usefixtures("operations_compiled_once")

W, LENGTHS = 2, [20, 4, 17, 19, 9, 59]
IDS = np.repeat(np.arange(1, 1 + len(LENGTHS), dtype=np.int32), LENGTHS)[None]
PLAN = plan_attention(lengths=LENGTHS, world_size=W)
DOCUMENTS = Documents(IDS).with_plan(PLAN)
OF_ANOTHER_BATCH = Documents.in_order(
    IDS[:, ::-1], DOCUMENTS.positions, DOCUMENTS.plans, order=DOCUMENTS.order, columns=IDS.shape[1]
)


def on_each_rank(qkv, documents):
    rows = P(None, AXIS)

    def local(q, k, v, documents):
        options = {"documents": documents, "axis_name": AXIS}
        return context_parallel_attention(q, k, v, algorithm="balanced", **options)

    in_specs = rows, rows, rows, documents.specs(AXIS)
    mapped = jax.shard_map(local, mesh=mesh_of(W), in_specs=in_specs, out_specs=rows)
    q, k, v = qkv
    return mapped(q, k, v, documents)


def drawn() -> Any:
    rng = np.random.default_rng()
    return [rng.normal(size=(1, sum(LENGTHS), n, 8)).astype(np.float32) for n in (2, 1, 1)]


# XLA compiles each operation by itself. Placed attention takes fewer operations, none others.
def test_values_gradients_and_errors():
    qkv = drawn()

    def loss(qkv):
        out = on_each_rank(qkv, DOCUMENTS)
        return (out**2).sum(), out

    step = jax.value_and_grad(loss, has_aux=True)
    wanted = jax.jit(step)(qkv)
    with jax.disable_jit():
        found = step(qkv)
        with pytest.raises(jax.errors.JaxRuntimeError, match="made for another batch"):
            jax.block_until_ready(on_each_rank(qkv, OF_ANOTHER_BATCH))
    # The same operations, which XLA fuses otherwise: they round otherwise.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), found, wanted)


@in_ci
def test_rings():
    """Of two ranks: between the first and the last step of a ring there is none."""
    q = np.random.default_rng().normal(size=(1, 16, 1, 8)).astype(np.float32)
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "algorithm": "ring"}
    step = lambda x: context_parallel_attention(x, x, x, **options)
    wanted = jax.jit(step)(q)
    with jax.disable_jit():
        found = step(q)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_ids_are_planned():
    """Without a plan, on the host; the operations have the shapes of the tests above."""
    q, k, v = drawn()
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "segment_ids": IDS}
    wanted = context_parallel_attention(q, k, v, algorithm="balanced", **options)
    with jax.disable_jit():
        found = context_parallel_attention(q, k, v, algorithm="balanced", **options)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
