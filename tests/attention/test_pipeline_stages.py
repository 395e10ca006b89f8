"""`jax.vmap(..., spmd_axis_name=...)`: stages of a pipeline, each at its own index of a mesh axis.

The function sees one stage. The leading axis of its arrays stays sharded over the mesh axis.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, attention_gradients
from dispatch_cases import CAPACITY, F, T, W, check_all_ranks, integers, moves_and_gradients
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from movement_oracle import random_plan
from on_mesh import AXIS, collectives_over, permuted_mesh
from sequences import TOLERANCE, Case, dense, draw, relative_errors

from jax_cp_dispatch import (
    Balanced,
    Documents,
    Metadata,
    PlanConfig,
    context_parallel_attention,
    local_attention,
    plan_attention,
)
from jax_cp_dispatch.attention import chunk_exchange, ring_exchange
from jax_cp_dispatch.cycles import chunk_maps

STAGES = 2
MESH = permuted_mesh((STAGES, W), ("stage", AXIS))


def placed(tree, spec) -> Any:
    return jax.device_put(tree, NamedSharding(MESH, spec))


def stacked(examples) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *examples)


def over_stages(fn: Any, **options) -> Any:
    """Applies `fn`, which handles one stage, to all stages."""
    return jax.vmap(fn, spmd_axis_name="stage", **options)


# ---- Attention.


CASE = Case("ring", W, 12, documents="segments", heads=(4, 2))


@pytest.mark.parametrize(
    "algorithm, ids",
    [
        # All read ids with the same code; those known on the host: the test on each rank.
        *(("balanced", "of each stage"), ("ring", "of all")),
    ],
)
def test_attention_of_each_stage(algorithm, ids):
    """Forward and backward equal dense attention of the stage; no data leaves a stage."""
    examples = [draw(CASE, seed) for seed in range(STAGES)]
    if ids != "of each stage":  # arrays differ between stages, documents do not
        examples = [(*example[:4], *examples[0][4:]) for example in examples]
    *arrays, segment_ids, _ = zip(*examples, strict=True)
    arrays = placed([np.stack(x) for x in arrays], P("stage", None, AXIS))
    traced = placed(np.stack(segment_ids), P("stage", None, AXIS))
    algorithm = Balanced(PlanConfig(block=4)) if algorithm == "balanced" else algorithm
    attend = partial(context_parallel_attention, mesh=MESH, axis_name=AXIS, algorithm=algorithm)

    @jax.jit
    def run(q, k, v, g, traced):
        def attend_stages(q, k, v):
            attend_one = lambda q, k, v, segment_ids: attend(q, k, v, segment_ids=segment_ids)
            if ids == "of all":
                return over_stages(attend_one, in_axes=(0, 0, 0, None))(q, k, v, traced[0])
            return over_stages(attend_one)(q, k, v, traced)

        out, pull_back = jax.vjp(attend_stages, q, k, v)
        return out, *pull_back(g)

    compiled = run.lower(*arrays, traced).compile()
    from_each = [] if ids != "of all" else ["all-reduce"]  # traced[0] is from the first stage
    assert set(collectives_over(compiled, MESH, "stage")) <= set(from_each)
    results = compiled(*arrays, traced)
    for x in results:
        assert x.sharding.spec[0] == "stage"
    check_stages(results, examples)


def check_stages(results, examples):
    for stage, example in enumerate(examples):
        is_token = (example[4] > 0)[..., None, None]
        got = [np.where(is_token, np.asarray(x)[stage], 0) for x in results]
        errors = relative_errors(got, dense(CASE, example))
        assert max(errors.values()) <= TOLERANCE["float32"], errors


# ---- Movement.


@pytest.mark.parametrize(
    "own, where",
    [
        *((own, "global arrays") for own in ("arrays", "plans", "arrays and plans")),
        *(("arrays and plans", "shard_map"), ("plans", "unchecked shard_map")),
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
    arguments = [
        placed(x, P("stage", AXIS)),
        placed(y, P("stage", AXIS)),
        placed(metadata, P("stage")),
    ]
    arguments = [
        x if axis == 0 else jax.tree.map(lambda x: x[0], x)
        for x, axis in zip(arguments, in_axes, strict=True)
    ]
    one_stage = partial(moves_and_gradients, mesh=MESH)
    if where != "global arrays":
        one_stage = jax.shard_map(
            moves_and_gradients,
            mesh=MESH,
            in_specs=P(AXIS),
            out_specs=P(AXIS),
            check_vma=where == "shard_map",
        )
    run = jax.jit(over_stages(one_stage, in_axes=in_axes)).lower(*arguments).compile()
    results = run(*arguments)
    if where != "global arrays" or own == "arrays":
        assert collectives_over(run, MESH, "stage") == []
        assert all(result.sharding.spec[0] == "stage" for result in results)
    for stage, plan in enumerate(plans):
        check_all_ranks([np.asarray(result)[stage] for result in results], x[stage], y[stage], plan)


# ---- Functions of one rank, inside a shard_map with check_vma=False.


def test_attention_on_each_rank():
    examples = [(*draw(CASE, seed)[:4], *draw(CASE)[4:]) for seed in range(STAGES)]
    *arrays, segment_ids, _ = zip(*examples, strict=True)
    arrays = placed([np.stack(x) for x in arrays], P("stage", None, AXIS))
    plan = plan_attention(segment_ids[0], world_size=W, config=PlanConfig(block=4))
    documents = Documents(segment_ids[0]).with_plan(plan)
    specs = documents.specs(AXIS)
    rows = P(None, AXIS)

    @jax.jit
    def run(q, k, v, g):
        on_ranks = jax.shard_map(
            lambda q, k, v, documents: context_parallel_attention(
                q, k, v, documents=documents, algorithm="balanced", axis_name=AXIS
            ),
            mesh=MESH,
            in_specs=(rows, rows, rows, specs),
            out_specs=rows,
            check_vma=False,
        )
        of_stages = stacked([documents] * STAGES)
        attend_stages = lambda *x: over_stages(on_ranks)(*x, of_stages)
        out, pull_back = jax.vjp(attend_stages, q, k, v)
        return out, *pull_back(g)

    compiled = run.lower(*arrays).compile()
    assert collectives_over(compiled, MESH, "stage") == []
    check_stages(compiled(*arrays), examples)


def exchanges(x):
    """One step of a ring, and two chunks on two rings, each the reverse of the other."""
    out_chunk, in_chunk = chunk_maps([list(range(W)), list(range(W))[::-1]])
    chunks = x.reshape(2, -1, F)
    return ring_exchange(x, axis_name=AXIS), chunk_exchange(
        chunks, out_chunk, in_chunk, axis_name=AXIS
    ).reshape(x.shape)


def test_exchanges_of_each_stage():
    x = integers(STAGES, W * T, F)
    on_ranks = jax.shard_map(
        exchanges, mesh=MESH, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )

    @jax.jit
    def run(x):
        (turned, chunks), pull_back = jax.vjp(over_stages(on_ranks), x)
        return turned, chunks, pull_back((x, x))[0]

    results = run(placed(x, P("stage", AXIS)))
    assert all(result.sharding.spec[0] == "stage" for result in results)
    turned, chunks, pulled = (np.asarray(y).reshape(STAGES, W, T, F) for y in results)
    rows = x.reshape(STAGES, W, T, F)
    forth, back = np.roll(rows, 1, axis=1), np.roll(rows, -1, axis=1)
    half = np.arange(T)[:, None] < T // 2  # the other chunk goes in the opposite direction
    np.testing.assert_array_equal(turned, forth)
    np.testing.assert_array_equal(chunks, np.where(half, forth, back))
    np.testing.assert_array_equal(pulled, back + np.where(half, back, forth))


def test_local_attention_of_each_stage():
    """Every device of a stage computes the same result, because no ranks are involved."""
    random = np.random.default_rng(0)
    q, k, v, g = (random.normal(size=(STAGES, 1, 8, 2, 4)).astype(np.float32) for _ in range(4))
    start = jnp.zeros((1, 8), jnp.int32)
    end = jnp.arange(1, 9, dtype=jnp.int32)[None]

    @jax.jit
    def run(q, k, v, g):
        on_each = jax.shard_map(
            lambda q, k, v: local_attention(q, k, v, start, end)[0],
            mesh=MESH,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        out, pull_back = jax.vjp(over_stages(on_each), q, k, v)
        return out, *pull_back(g)

    results = run(*placed([q, k, v, g], P("stage")))
    assert all(x.sharding.spec[0] == "stage" for x in results)
    for stage in range(STAGES):
        want, lse = attention(q[stage], k[stage], v[stage], start, end)
        gradients = attention_gradients(
            q[stage], k[stage], v[stage], start, end, g[stage], np.zeros_like(lse)
        )
        for x, y in zip(results, (want, *gradients), strict=True):
            np.testing.assert_allclose(np.asarray(x)[stage], y, rtol=1e-4, atol=1e-5)


def test_stages_over_an_explicit_axis_are_rejected(unchecked_types):
    mesh = permuted_mesh((STAGES, W), ("stage", AXIS), AxisType.Explicit)
    x = jax.device_put(np.ones((STAGES, 1, 8, 2, 4), np.float32), NamedSharding(mesh, P("stage")))
    attend = partial(context_parallel_attention, axis_name=AXIS, algorithm="ring")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"'stage'.*AxisType.Auto.*spmd_axis"):
        jax.vmap(attend)(x, x, x)
