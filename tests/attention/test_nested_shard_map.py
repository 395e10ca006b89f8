"""`context_parallel_attention` inside a `jax.shard_map` over another axis, and its derivative.

And inside one over its own axis, while explicit axes shard the rest.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, permuted_mesh
from sequences import TOLERANCE, Case, check, dense, draw, relative_errors

from jax_cp_dispatch import context_parallel_attention, place_tokens

CASE = Case("ring", 2, 8, documents="segments", batch=2, heads=(4, 2))
DATA = P("data")


def attend(q, k, v, segment_ids, **options):
    axes: dict[str, Any] = {"axis_name": AXIS, "batch_axis": (), "head_axis": ()}
    return context_parallel_attention(q, k, v, segment_ids=segment_ids, **axes, **options)


def gradients(fn):
    def run(q, k, v, g, segment_ids):
        out, pull_back = jax.vjp(lambda *qkv: fn(*qkv, segment_ids), q, k, v)
        return out, *pull_back(g)

    return run


def over_data(fn, num_results=None, **options):
    out_specs = DATA if num_results is None else (DATA,) * num_results
    return jax.shard_map(fn, in_specs=DATA, out_specs=out_specs, axis_names={"data"}, **options)


def mesh_of_kind(kind=AxisType.Auto):
    return permuted_mesh((2, 2), ("data", AXIS), kind)


@pytest.mark.parametrize(
    "algorithm, differentiated, kind",
    [
        # Of one that follows a plan, and of one that rotates. Below: inside, automatic axes.
        ("balanced", "inside", AxisType.Explicit),
        ("ring", "outside", AxisType.Explicit),
    ],
)
def test_derivative(algorithm, differentiated, kind):
    operands = draw(CASE)
    fn = partial(attend, algorithm=algorithm)
    inside = differentiated == "inside"
    run = over_data(gradients(fn), 4) if inside else gradients(over_data(fn))
    mesh = mesh_of_kind(kind)

    def program(*operands):
        arrays = jax.device_put(operands[:5], NamedSharding(mesh, P("data", AXIS)))
        return jax.jit(run)(*arrays)

    with jax.set_mesh(mesh):
        check(CASE, operands, program)


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize(
    "algorithm, kinds, spec",
    [
        ("balanced", (EXPLICIT, AUTO), P("data", AXIS)),
        ("ring", (EXPLICIT, EXPLICIT), P(None, AXIS, "data")),
    ],
)
def test_explicit_axes_on_one_rank(algorithm, kinds, spec):
    """They shard the batch, or heads, and stay in the types."""
    fn = partial(attend, algorithm=algorithm)
    specs = {"in_specs": P(None, AXIS), "out_specs": P(None, AXIS), "axis_names": {AXIS}}
    mesh, found = mesh_of_kind(kinds), []

    def program(*operands):
        results = gradients(jax.shard_map(fn, **specs))(*operands)
        found.extend("data" in jax.typeof(x).sharding.spec for x in results)
        return results

    def run(*operands):
        arrays = jax.device_put(operands[:4], NamedSharding(mesh, spec))
        ids = jax.device_put(operands[4], NamedSharding(mesh, P(spec[0], AXIS)))
        return jax.jit(program)(*arrays, ids)

    with jax.set_mesh(mesh):
        check(CASE, draw(CASE), run)
    assert all(found) and len(found) == 4


@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
def test_global_arrays_on_explicit_and_automatic_axes(kinds):
    mesh = mesh_of_kind(kinds)
    fn = lambda q, k, v, ids: context_parallel_attention(
        q, k, v, segment_ids=ids, axis_name=AXIS, algorithm="ring", batch_axis="data", head_axis=()
    )

    def run(*operands):
        arrays = jax.device_put(operands[:5], NamedSharding(mesh, P("data", AXIS)))
        return jax.jit(gradients(fn))(*arrays)

    with jax.set_mesh(mesh):
        check(CASE, draw(CASE), run)


def test_without_jit():
    with jax.set_mesh(mesh_of_kind()):
        run = over_data(gradients(partial(attend, algorithm="ring")), 4)
        check(CASE, draw(CASE), lambda *x: run(*x[:5]))


def test_placed_and_unchecked():
    """A surrounding `shard_map` that does not track the axes over which arrays vary."""
    *arrays, segment_ids, _ = operands = draw(CASE)
    placement = place_tokens(segment_ids=segment_ids, world_size=2, num_groups=2)

    def of_documents(q, k, v, documents):
        return attend(q, k, v, None, algorithm="placed", documents=documents)

    with jax.set_mesh(mesh_of_kind()):
        run = jax.jit(over_data(gradients(of_documents), 4, check_vma=False))
        results = run(*placement.apply(arrays), placement.documents)
    results = placement.restore([np.asarray(x) for x in results])
    errors = relative_errors(results, dense(CASE, operands))
    assert max(errors.values()) <= TOLERANCE["float32"], errors


@pytest.mark.parametrize("algorithm, policy", [("balanced", None), ("zigzag", "context")])
def test_checkpointed_layers_of_a_scan(algorithm, policy):
    """Keys that all layers share, so that JAX would hoist a part of them out of the loop."""
    if policy:
        policy = jax.checkpoint_policies.save_only_these_names(policy)

    def layers(q, k, v, segment_ids):
        fn = jax.checkpoint(partial(attend, algorithm=algorithm), policy=policy)
        return jax.lax.scan(lambda _, q: (None, fn(q, k, v, segment_ids)), None, q[None])[1][0]

    with jax.set_mesh(mesh_of_kind()):
        check(CASE, draw(CASE), lambda *x: jax.jit(over_data(gradients(layers), 4))(*x[:5]))


def test_vmap():
    operands = draw(CASE)
    run = jax.vmap(over_data(gradients(partial(attend, algorithm="ring")), 4))
    with jax.set_mesh(mesh_of_kind()):
        twice = jax.jit(run)(*(np.stack([x, x]) for x in operands[:5]))
    for i in range(2):
        errors = relative_errors([np.asarray(x[i]) for x in twice], dense(CASE, operands))
        assert max(errors.values()) <= TOLERANCE["float32"], errors


def test_operands_that_are_alike_on_all_groups():
    """Their gradients are summed over the groups, in which only the documents differ."""
    q, k, v, g, segment_ids, _ = draw(CASE)
    shared = [x[:1] for x in (q, k, v)]
    fn = partial(attend, algorithm="ring")
    specs = {"in_specs": (P(), P(), P(), DATA), "out_specs": DATA, "axis_names": {"data"}}
    with jax.set_mesh(mesh_of_kind()):
        run = gradients(jax.shard_map(fn, **specs))
        _, *got = jax.jit(run)(*shared, g, segment_ids)
    both = [np.concatenate([x, x]) for x in shared]
    _, *want = dense(CASE, (*both, g, segment_ids, None))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, np.asarray(y).sum(0, keepdims=True), atol=1e-5, rtol=1e-5)
