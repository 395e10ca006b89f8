"""Transformations of JAX: derivatives of any order, stages of a pipeline, and `jax.disable_jit`.

Others, of all operations: tests/contract.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import check_qkv, draw_qkv, with_gradients
from dispatch_cases import CAPACITY, F, T, W, check_all_ranks, integers, moves_and_gradients
from in_ci import in_ci
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from movement_oracle import random_plan
from on_mesh import AXIS, collectives_over, mesh_of, permuted_mesh

import jax_cp_dispatch as cp
from jax_cp_dispatch import Documents, Metadata, context_parallel_attention, local_attention

# ---- Attention has one derivative, in reverse mode. Linear operations have all: tests/dispatch.

Q = np.random.default_rng(0).normal(size=(1, 8, 1, 4)).astype(np.float32)
IDS = np.ones((1, 8), np.int32)
PLANNED = Documents(IDS).with_plan(cp.plan_attention(IDS, world_size=2))
WHERE: dict[str, Any] = {"mesh": mesh_of(2), "axis_name": AXIS}


def attention(algorithm, **options):
    return lambda x: context_parallel_attention(x, x, x, algorithm=algorithm, **WHERE, **options)


def local(x):
    start = jnp.zeros(x.shape[:2], jnp.int32)
    return local_attention(x, x, x, start, start + 3)[0]


FUNCTIONS = {
    "balanced": attention("balanced", documents=PLANNED),
    "ring": attention("ring"),
    "local_attention": local,
}


def derivatives(attend):
    """Yields derivatives that attention does not have, with the words of their errors."""
    forward = "forward mode .*supported. Use reverse mode: jax.vjp, jax.grad or jax.jac"
    second = "second derivatives are not supported.*stop_gradient"
    loss = lambda x: (attend(x) ** 2).sum()
    yield lambda x: jax.jvp(attend, (x,), (x,)), forward
    yield lambda x: jax.linearize(attend, x)[1](x), forward
    yield jax.grad(lambda x: jax.grad(loss)(x).sum()), second
    yield lambda x: jax.jvp(jax.grad(loss), (x,), (x,)), f"({second}|{forward})"  # uses both modes
    yield jax.grad(lambda g: jax.vjp(attend, Q)[1](g)[0].sum()), second


@pytest.mark.usefixtures("operations_compiled_once")
@pytest.mark.parametrize(
    "name, has_jit", [*((name, True) for name in FUNCTIONS), ("local_attention", False)]
)
def test_other_derivatives_of_attention_are_rejected_by_name(name, has_jit):
    """Without jit, of few operations, each of which is a program."""
    op = name if name == "local_attention" else "context_parallel_attention"
    for derivative, says in derivatives(FUNCTIONS[name]):
        with pytest.raises(NotImplementedError, match=f"^{op}: {says}"):
            (jax.jit(derivative) if has_jit else derivative)(Q)


def test_the_value_of_a_gradient_may_be_used_in_a_loss():
    loss = lambda x: (local(x) ** 2).sum()
    with_gradient = lambda x: loss(x) + jax.grad(loss)(jax.lax.stop_gradient(x)).sum()
    np.testing.assert_allclose(jax.grad(with_gradient)(Q), jax.grad(loss)(Q), rtol=1e-6)


# ---- `jax.vmap(..., spmd_axis_name=...)`: stages of a pipeline, each at its own mesh index.
#
# The function sees one stage. The leading axis of its arrays stays sharded over the mesh axis.

STAGES = 2
MESH = permuted_mesh((STAGES, W), ("stage", AXIS))


def placed(tree, spec) -> Any:
    return jax.device_put(tree, NamedSharding(MESH, spec))


def stacked(examples) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *examples)


def over_stages(fn: Any, **options) -> Any:
    """Applies `fn`, which handles one stage, to all stages."""
    return jax.vmap(fn, spmd_axis_name="stage", **options)


@pytest.mark.parametrize("algorithm, ids", [("balanced", "of each stage"), ("ring", "of all")])
def test_attention_of_each_stage(algorithm, ids):
    """Forward and backward equal dense attention of the stage; no data leaves a stage."""
    examples = [list(draw_qkv(stage, 1, W * 12)) for stage in range(STAGES)]
    if ids != "of each stage":  # arrays differ between stages, documents do not
        examples[1][4] = examples[0][4]
    *arrays, traced = placed(stacked(examples), P("stage", None, AXIS))
    one = lambda q, k, v, x: context_parallel_attention(
        q, k, v, segment_ids=x, mesh=MESH, axis_name=AXIS, algorithm=algorithm
    )
    in_axes = (0, 0, 0, 0 if ids == "of each stage" else None)
    of_stages = over_stages(one, in_axes=in_axes)

    @jax.jit
    def run(q, k, v, g, traced):
        return with_gradients(of_stages)(q, k, v, g, traced if in_axes[3] == 0 else traced[0])

    compiled = run.lower(*arrays, traced).compile()
    from_each = ["all-reduce"] if ids == "of all" else []  # traced[0] is from the first stage
    assert set(collectives_over(compiled, MESH, "stage")) <= set(from_each)
    results = compiled(*arrays, traced)
    assert all(x.sharding.spec[0] == "stage" for x in results)
    for stage, example in enumerate(examples):
        check_qkv([x[stage] for x in results], example)


@pytest.mark.parametrize(
    "own, where",
    [
        ("arrays", "global arrays"),
        ("arrays and plans", "shard_map"),
        ("plans", "unchecked shard_map"),
    ],
)
def test_movement_of_each_stage(own, where):
    plans = [random_plan(np.random.default_rng(seed), W, 5, T, 2) for seed in range(STAGES)]
    x, y = integers(STAGES, W * T, F, seed=1), integers(STAGES, W * CAPACITY, F, seed=2)
    if "plans" not in own:
        plans = plans[:1] * STAGES
    if "arrays" not in own:
        x, y = x[:1].repeat(STAGES, 0), y[:1].repeat(STAGES, 0)
    metadata = stacked([Metadata(**plan) for plan in plans])
    in_axes = [0 if "arrays" in own else None] * 2 + [0 if "plans" in own else None]
    of_all = *placed((x, y), P("stage", AXIS)), placed(metadata, P("stage"))
    arguments = [
        x if axis == 0 else jax.tree.map(lambda x: x[0], x)
        for x, axis in zip(of_all, in_axes, strict=True)
    ]
    one_stage = partial(moves_and_gradients, mesh=MESH)
    if where != "global arrays":
        one_stage = jax.shard_map(
            moves_and_gradients, mesh=MESH, in_specs=P(AXIS), out_specs=P(AXIS),
            check_vma=where == "shard_map",
        )  # fmt: skip
    run = jax.jit(over_stages(one_stage, in_axes=in_axes)).lower(*arguments).compile()
    results = run(*arguments)
    assert collectives_over(run, MESH, "stage") == []
    assert all(result.sharding.spec[0] == "stage" for result in results)
    for stage, plan in enumerate(plans):
        check_all_ranks([np.asarray(result)[stage] for result in results], x[stage], y[stage], plan)


def test_stages_over_an_explicit_axis_are_rejected(unchecked_types):
    mesh = permuted_mesh((STAGES, W), ("stage", AXIS), AxisType.Explicit)
    x = jax.device_put(np.ones((STAGES, 1, 8, 2, 4), np.float32), NamedSharding(mesh, P("stage")))
    attend = partial(context_parallel_attention, axis_name=AXIS, algorithm="ring")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"'stage'.*AxisType.Auto.*spmd_axis"):
        jax.vmap(attend)(x, x, x)


# ---- `jax.disable_jit`, for debugging: attention gives what it gives under jit.

LENGTHS = [20, 4, 17, 19, 9, 59]
ROWS = np.repeat(np.arange(1, 1 + len(LENGTHS), dtype=np.int32), LENGTHS)[None]


@in_ci  # XLA compiles each operation
@pytest.mark.usefixtures("operations_compiled_once")
@pytest.mark.parametrize("algorithm", ["balanced", "ring"])
def test_without_jit(algorithm):
    """Values, gradients and errors. Without a plan, ids are planned on the host."""
    *arrays, _ = draw_qkv(None, 1, ROWS.shape[1], heads=(2, 1))
    attend = partial(context_parallel_attention, algorithm=algorithm, **WHERE)
    run = lambda: attend(*arrays[:3], segment_ids=ROWS)
    if algorithm == "balanced":
        run = partial(with_gradients(partial(attend, segment_ids=ROWS)), *arrays)
    wanted = run()
    with jax.disable_jit():
        found = run()
        if algorithm == "balanced":
            documents = Documents(ROWS).with_plan(cp.plan_attention(ROWS, world_size=2))
            ids, plans, order = documents.segment_ids[:, ::-1], documents.plans, documents.order
            other = Documents.in_order(
                ids, documents.positions, plans, order=order, columns=ROWS.shape[1]
            )
            with pytest.raises(jax.errors.JaxRuntimeError, match="made for another batch"):
                jax.block_until_ready(attend(*arrays[:3], documents=other))
    # The same operations, which XLA fuses otherwise: they round otherwise.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), found, wanted)
