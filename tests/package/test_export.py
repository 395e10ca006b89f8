"""`jax.export` and meshes without devices: what docs/limits.md says works, and what does not."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from movement_oracle import dispatched, random_plan
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd

W, T, F = 4, 8, 6
PLAN = random_plan(np.random.default_rng(0), W, 5, T, 2)
METADATA = cpd.Metadata(**PLAN)
CAPACITY = int(PLAN["num_total_recv_tokens"].max())
X = np.random.default_rng(1).normal(size=(W * T, F)).astype(np.float32)
ROWS: Any = P(AXIS)

send = partial(cpd.dispatch, axis_name=AXIS, capacity=CAPACITY)


def inside(fn, mesh, in_specs=ROWS, out_specs=ROWS):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def exported(fn, *operands):
    names = ("dispatch", "combine", "gemm")
    checks = [export.DisabledSafetyCheck.custom_call(f"jax_cp_dispatch.{x}") for x in names]
    return export.export(jax.jit(fn), platforms=("cpu",), disabled_checks=checks)(*operands)


def placed(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def test_calls_inside_shard_map_with_our_custom_calls_named():
    mesh = mesh_of(W)
    x, metadata = placed(mesh, X, ROWS), placed(mesh, METADATA, ROWS)
    sent = dispatched(PLAN, X.reshape(W, T, F), CAPACITY).reshape(-1, F)
    for around in (mesh, mesh.abstract_mesh):  # placed arguments determine the devices
        again = exported(inside(send, around), x, metadata)
        np.testing.assert_array_equal(jax.jit(again.call)(x, metadata), sent)
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility"):
        export.export(jax.jit(inside(send, mesh)))(x, metadata)
    with pytest.raises(NotImplementedError):  # around the arrays of all ranks
        exported(send, x, metadata)


def test_attention():
    mesh = mesh_of(W)
    q = placed(mesh, np.random.default_rng(2).normal(size=(1, 32, 2, 8)), P(None, AXIS))
    for around in (mesh, mesh.abstract_mesh):
        attend = partial(
            cpd.context_parallel_attention, axis_name=AXIS, mesh=around, algorithm="balanced"
        )
        again = exported(lambda q, attend=attend: attend(q, q, q), q)
        np.testing.assert_array_equal(jax.jit(again.call)(q), jax.jit(attend)(q, q, q))


def test_without_any_device_only_gemms_inside_shard_map_can_be_lowered():
    mesh = AbstractMesh((W,), (AXIS,))
    without = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(16, 8)).astype("f"), rng.normal(size=(8, 16)).astype("f")
    specs = P(AXIS), P(None, AXIS)
    gather = partial(cpd.all_gather_matmul, axis_name=AXIS, method="ring")
    multiply = inside(gather, mesh, specs, P(None, AXIS))
    again = exported(multiply, *map(without, (x, w), specs))
    operands = (placed(mesh_of(W), *pair) for pair in zip((x, w), specs, strict=True))
    np.testing.assert_allclose(jax.jit(again.call)(*operands), x @ w, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="primitives that require devices"):
        exported(inside(lambda x: send(x, METADATA), mesh), without(X, ROWS))
