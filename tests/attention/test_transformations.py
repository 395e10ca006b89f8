"""Transformations of JAX: derivatives of any order, stages of a pipeline, and `jax.disable_jit`.

Others, of all operations: tests/contract.
"""

from functools import partial
from typing import Any

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import draw_qkv, with_gradients
from in_ci import in_ci
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, collectives_over, mesh_of, permuted_mesh
from operations import CASES

import jax_cp_dispatch as cp
from jax_cp_dispatch import Documents, context_parallel_attention, local_attention

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

STAGES, W = 2, 4
MESH = permuted_mesh((STAGES, W), ("stage", AXIS))


def on_ranks(case, mesh, **options):
    specs = {"in_specs": P(AXIS), "out_specs": P(AXIS)}
    return jax.shard_map(partial(case.call, axis_name=AXIS), mesh=mesh, **specs, **options)


@pytest.mark.parametrize(
    "name, shared, on_mesh",
    [
        ("balanced", (), contract.on_global_arrays),
        ("ring", ("segment_ids",), contract.on_global_arrays),
        ("combine", ("metadata",), contract.on_global_arrays),
        ("combine", (), on_ranks),
        ("combine", ("tokens", "y"), partial(on_ranks, check_vma=False)),
    ],
)
def test_each_stage(name, shared, on_mesh):
    """Results and gradients; no data leaves a stage. Some arrays may be those of all stages."""
    (case,) = (case for case in CASES if case.name == name)
    first, *others = (case.arrays("float32", seed=seed) for seed in range(STAGES))
    stages = [first, *({**x, **{name: first[name] for name in shared}} for x in others)]
    *expected, cotangents = zip(*map(case.expected, stages), strict=True)

    def placed(specs, of_stages):
        """Returns the arrays of all stages, and their axes."""
        stacked = jax.tree.map(lambda *x: np.stack(x), *of_stages)
        arrays = contract.placed(MESH, specs, stacked, lead=("stage",))
        arrays |= {name: first[name] for name in shared if name in stacked}
        return arrays, {name: None if name in shared else 0 for name in arrays}

    parts = zip(*map(contract.split, stages), strict=True)
    operands = *(placed(case.specs, x) for x in parts), placed(case.results, cotangents)
    arrays, in_axes = zip(*operands, strict=True)
    one = contract.with_gradients(on_mesh(case, MESH))
    run = jax.jit(jax.vmap(one, in_axes=in_axes, spmd_axis_name="stage")).lower(*arrays).compile()
    assert collectives_over(run, MESH, "stage") == []
    results = run(*arrays)
    assert all(x.sharding.spec[0] == "stage" for x in jax.tree.leaves(results))
    for stage, wanted in enumerate(zip(*expected, strict=True)):
        contract.check(jax.tree.map(lambda x: x[stage], results), wanted, "float32")  # noqa: B023


def test_stages_over_an_explicit_axis_are_rejected():
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
