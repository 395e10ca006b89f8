"""`jax.vmap(..., spmd_axis_name=...)`: stages of a pipeline, each on its own place of a mesh axis.

The function sees one stage. The axis in front of its arrays stays sharded over the mesh axis.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from movement_oracle import random_plan
from on_mesh import AXIS, collectives_over, permuted_mesh
from sequences import QUICKLY, TOLERANCE, Case, dense, draw, relative_errors
from test_dispatch_places import CAPACITY, F, T, W, check_all_ranks, integers, moves_and_gradients

from jax_cp_dispatch import Metadata, PlanConfig, context_parallel_attention

STAGES = 2
MESH = permuted_mesh((STAGES, W), ("stage", AXIS))


def placed(tree, spec) -> Any:
    return jax.device_put(tree, NamedSharding(MESH, spec))


def stacked(examples) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *examples)


def over_stages(fn, **options):
    """`fn` of one stage, for all of them."""
    return jax.vmap(fn, spmd_axis_name="stage", **options)


# ---- Attention.


CASE = Case("ring", W, 12, documents="segments", heads=(4, 2))


@pytest.mark.parametrize("ids", ["of each stage", "of all", "concrete"])
@pytest.mark.parametrize("algorithm", ["balanced", "ring", "zigzag", "hamilton"])
def test_attention_of_each_stage(algorithm, ids):
    """Forward and backward equal dense attention of the stage, and nothing leaves a stage."""
    examples = [draw(CASE, seed) for seed in range(STAGES)]
    if ids != "of each stage":  # the arrays differ, the documents do not
        examples = [(*example[:4], *examples[0][4:]) for example in examples]
    *arrays, segment_ids, _ = zip(*examples, strict=True)
    arrays = placed([np.stack(x) for x in arrays], P("stage", None, AXIS))
    traced = placed(np.stack(segment_ids), P("stage", None, AXIS))
    options = {"algorithm": algorithm, "config": PlanConfig(block=4)}
    attend = partial(context_parallel_attention, mesh=MESH, axis_name=AXIS, **options)

    @partial(jax.jit, compiler_options=QUICKLY)
    def run(q, k, v, g, traced):
        def attend_stages(q, k, v):
            if ids == "concrete":
                attend_one = partial(attend, segment_ids=segment_ids[0])
                return over_stages(attend_one)(q, k, v)
            attend_one = lambda q, k, v, segment_ids: attend(q, k, v, segment_ids=segment_ids)
            if ids == "of all":
                return over_stages(attend_one, in_axes=(0, 0, 0, None))(q, k, v, traced[0])
            return over_stages(attend_one)(q, k, v, traced)

        out, pull_back = jax.vjp(attend_stages, q, k, v)
        return out, *pull_back(g)

    compiled = run.lower(*arrays, traced).compile()
    from_each = [] if ids != "of all" else ["all-reduce"]  # traced[0] comes from the first stage
    assert set(collectives_over(compiled, MESH, "stage")) <= set(from_each)
    results = compiled(*arrays, traced)
    for x in results:
        assert x.sharding.spec[0] == "stage"
    for stage, example in enumerate(examples):
        is_token = (example[4] > 0)[..., None, None]
        got = [np.where(is_token, np.asarray(x)[stage], 0) for x in results]
        errors = relative_errors(got, dense(CASE, example))
        assert max(errors.values()) <= TOLERANCE["float32"], errors


# ---- Movement.


@pytest.mark.parametrize("own", ["arrays", "plans", "arrays and plans"])
@pytest.mark.parametrize("where", ["global arrays", "shard_map", "unchecked shard_map"])
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
