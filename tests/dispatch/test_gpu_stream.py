"""Calls for GPUs are placed on XLA's collective stream, in every context; nothing runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from movement_oracle import random_plan
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Metadata, combine, context_parallel_attention, dispatch

W, S, T, CAPACITY = 4, 5, 8, 64
PLAN = Metadata(**random_plan(np.random.default_rng(0), W, S, T, 2))
X = np.zeros((W * T, 3), np.float32)


pytestmark = pytest.mark.usefixtures("cuda")


def lowered(fn, *arguments):
    return jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def on_stream(text):
    """Returns the targets of this package's custom calls on the collective stream, in order."""
    called = re.findall(r'call @(\w+)\(.*_xla_stream_annotation = "collective"', text)
    bodies = {name: text[text.index(f"func.func private @{name}(") :] for name in called}
    return [re.findall(r"custom_call @jax_cp_dispatch\.(\w+)", bodies[name])[0] for name in called]


def there_and_back(x, m):
    y = dispatch(x, m, axis_name=AXIS, capacity=CAPACITY)
    return combine(y, m, axis_name=AXIS, num_tokens=T)


def on_ranks(x, m):
    run = jax.shard_map(there_and_back, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))
    return run(x, m)


def test_calls_of_each_rank_and_their_derivatives():
    assert on_stream(lowered(on_ranks, X, PLAN)) == ["dispatch", "combine"]
    loss = jax.grad(lambda x, m: (on_ranks(x, m) ** 2).sum())
    assert on_stream(lowered(loss, X, PLAN)) == ["dispatch", "combine"] * 2


def test_calls_of_one_device_that_holds_all_ranks():
    assert on_stream(lowered(there_and_back, X, PLAN)) == ["dispatch", "combine"]


def test_examples_are_one_call_and_batched_plans_a_loop_of_calls():
    many = np.zeros((2, W * T, 3), np.float32)
    each = jax.vmap(on_ranks, (0, None))
    assert on_stream(lowered(each, many, PLAN)) == ["dispatch", "combine"]
    plans = jax.tree.map(lambda x: jnp.stack([x, x]), PLAN)
    assert on_stream(lowered(jax.vmap(on_ranks), many, plans)) == ["dispatch", "combine"]


def test_attention():
    q = np.zeros((1, W * T, 2, 8), jnp.bfloat16)
    ids = np.repeat([[1, 2]], W * T // 2, axis=1)
    attend = lambda q: context_parallel_attention(
        q, q, q, mesh=mesh_of(W), axis_name=AXIS, algorithm="balanced", segment_ids=ids
    )
    assert on_stream(lowered(attend, q)) == ["dispatch", "combine"]


def test_an_exported_program():
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in (
        "jax_cp_dispatch.dispatch", "jax_cp_dispatch.combine", "annotate_device_placement",
    )]  # fmt: skip
    program = export.export(jax.jit(on_ranks), platforms=("cuda",), disabled_checks=checks)
    assert on_stream(program(X, PLAN).mlir_module()) == ["dispatch", "combine"]


def test_a_variable_keeps_calls_on_the_stream_of_the_computation(monkeypatch):
    monkeypatch.setenv("JAX_CP_DISPATCH_COLLECTIVE_STREAM", "0")
    text = lowered(lambda *arguments: on_ranks(*arguments), X, PLAN)  # not the cached program
    assert on_stream(text) == [] and "custom_call @jax_cp_dispatch.dispatch" in text
