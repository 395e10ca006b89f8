"""One plan for each group of a sharded batch and for each micro-batch; one axis of ranks or two."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.sharding import AxisType
from on_mesh import AXIS, permuted_mesh
from packed_batches import pack
from sequences import TOLERANCE, Case, dense, relative_errors

from jax_cp_dispatch import (
    Documents,
    PlanConfig,
    context_parallel_attention,
    place_tokens,
    plan_attention,
    stack_plans,
)
from jax_cp_dispatch.masks import SlidingWindow
from jax_cp_dispatch.masks.mask import PACKED, PLACED

D, W, B, T = 2, 2, 2, 48  # groups, ranks of a group, rows of a group, tokens
AXES = ("data", AXIS, "tp")
FREE = PlanConfig()  # capacities that this batch needs
CONFIG = PlanConfig(
    kv_capacity=96, max_kv_transfers=16, max_pieces=16, max_cut_pieces=16, max_linked_pieces=99
)


def draw(seed, rows):
    """q, k, v, a cotangent and segment ids of some rows."""
    rng = np.random.default_rng(seed)
    sizes = ((4, 8), (2, 8), (2, 4), (4, 4))
    arrays = [rng.normal(size=(rows, T, *size)).astype(np.float32) for size in sizes]
    return *arrays, pack(rng, rows, T, max_length=30)[0]


def by_group(x):
    return np.split(np.asarray(x), D)


class Moved:
    """Queries move, as `plan_attention` says."""

    algorithm = "balanced"

    def __init__(self, segment_ids):
        self.plans = [plan_attention(ids, world_size=W) for ids in by_group(segment_ids)]
        self.documents = Documents(segment_ids).with_plan(stack_plans(self.plans))
        self.apply, self.restore = self.documents.apply, self.documents.restore


class Placed:
    """Every group's tokens are placed on its ranks."""

    algorithm = "placed"

    def __init__(self, segment_ids, config=FREE):
        apart = [place_tokens(segment_ids=ids, world_size=W) for ids in by_group(segment_ids)]
        self.plans = [group.plan for group in apart]
        together = place_tokens(segment_ids=segment_ids, world_size=W, num_groups=D, config=config)
        self.documents = together.documents
        self.apply, self.restore = together.apply, together.restore


def function(mesh, **options) -> Any:
    """`(q, k, v, g, documents) -> (out, dq, dk, dv)`"""

    def run(q, k, v, g, documents):
        attend = partial(context_parallel_attention, mesh=mesh, documents=documents, **options)
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(g)

    return run


def program(mesh, **options) -> Any:
    return jax.jit(function(mesh, **options))


def expected(operands):
    case = Case("ring", 1, T, documents="segments", heads=(4, 2), batch=len(operands[0]))
    return dense(case, (*operands, None))


def check_output(out, operands):
    np.testing.assert_allclose(out, expected(operands)[0], rtol=1e-5, atol=1e-5)


def check(results, operands):
    used = (operands[4] > 0)[..., None, None]
    got = [np.where(used, np.asarray(x), 0) for x in results]
    errors = relative_errors(got, expected(operands))
    assert max(errors.values()) <= TOLERANCE["float32"], errors


@pytest.mark.parametrize("plans_of, kind", [(Moved, AxisType.Auto), (Placed, AxisType.Explicit)])
def test_a_plan_for_each_group(plans_of, kind):
    """Of different capacities; each group compares the documents of its own rows."""
    mesh = permuted_mesh((D, W, 2), AXES, kind)
    operands = draw(0, D * B)
    groups = plans_of(operands[4])
    options = {"axis_name": AXIS, "batch_axis": "data", "head_axis": "tp"}
    run = program(mesh, algorithm=groups.algorithm, **options)
    moved, documents = groups.apply(operands[:4]), groups.documents
    results = run(*moved, documents)
    check(groups.restore([np.asarray(x) for x in results]), operands)
    with pytest.raises(jax.errors.JaxRuntimeError, match="made for another batch"):
        # The rows of the other group.
        ids, positions = (np.roll(x, B, 0) for x in (documents.segment_ids, documents.positions))
        others = Documents.in_order(
            ids, positions, documents.plans, order=documents.order, columns=T
        )
        jax.block_until_ready(run(*moved, others))


def test_micro_batches_share_a_program():
    """A scan over stacked documents is compiled once."""
    mesh = permuted_mesh((D, W), AXES[:2])
    micro_batches = [draw(seed, D * B) for seed in range(3)]
    placements = [Placed(operands[4], CONFIG) for operands in micro_batches]
    documents = jax.tree.map(lambda *x: np.stack(x), *(x.documents for x in placements))
    assert documents.plan.fingerprint.shape == (3, D, W, 4)
    options = {"axis_name": AXIS, "batch_axis": "data", "algorithm": "placed"}
    run = function(mesh, **options)
    traced = []

    @jax.jit
    def scanned(operands, documents):
        def step(total, batch):
            traced.append(batch)
            results = run(*batch[0], batch[1])
            return total + jnp.sum(results[0]), results

        return jax.lax.scan(step, 0.0, (operands, documents))

    moved = [x.apply(y[:4]) for x, y in zip(placements, micro_batches, strict=True)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *moved)
    total, results = scanned(stacked, documents)
    assert len(traced) == 1
    for i, placement in enumerate(placements):
        check(placement.restore([np.asarray(x[i]) for x in results]), micro_batches[i])
    np.testing.assert_allclose(total, sum(np.sum(x) for x in results[0]), rtol=1e-3)


def test_plans_made_inside_the_program_are_stacked():
    """Of traced segment ids: one plan for each group."""
    mesh = permuted_mesh((D, W), AXES[:2])
    operands = draw(4, D * B)
    options = {"mesh": mesh, "axis_name": AXIS, "batch_axis": "data", "algorithm": "balanced"}

    @jax.jit
    def planned(q, k, v, segment_ids):
        groups = jnp.split(segment_ids, D)
        plan = stack_plans([plan_attention(ids, world_size=W) for ids in groups])
        assert plan.fingerprint.shape == (D, W, 4) and isinstance(plan.fingerprint, Tracer)
        documents = Documents(segment_ids).with_plan(plan)
        return context_parallel_attention(q, k, v, documents=documents, **options)

    check_output(planned(*operands[:3], operands[4]), operands)


@pytest.mark.parametrize("algorithm, implementation", [("placed", "xla"), ("zigzag", None)])
def test_a_sequence_over_two_axes(algorithm, implementation):
    """Ranks count along both, the major axis first."""
    mesh = permuted_mesh((D, W, 2), AXES)
    operands = draw(5, B)
    options = {"axis_name": ("data", AXIS), "head_axis": "tp", "algorithm": algorithm}
    if algorithm != "placed":  # the output moves back to packed order
        attend = partial(context_parallel_attention, mesh=mesh, **options)
        out = jax.jit(attend)(*operands[:3], documents=Documents(operands[4]))
        check_output(out, operands)
        return
    run = program(mesh, implementation=implementation, **options)
    placement = place_tokens(segment_ids=operands[4], world_size=D * W)
    results = run(*placement.apply(operands[:4]), placement.documents)
    check([placement.restore(np.asarray(x)) for x in results], operands)


# ---- Errors.


def attend_abstractly(plan, mesh_shape=(D, W), **options):
    mesh = permuted_mesh(mesh_shape, AXES[:2])
    x = jax.ShapeDtypeStruct((D * B, T, 2, 8), np.float32)
    options = {"mesh": mesh, "axis_name": AXIS, "algorithm": "auto", "head_axis": (), **options}
    ones = np.ones((D * B, T), np.int32)
    order = PLACED if plan is not None and plan.is_placed else PACKED
    plans = () if plan is None else (plan,)
    documents = Documents.in_order(ones, ones, plans, order=order, columns=T)
    return jax.eval_shape(
        partial(context_parallel_attention, documents=documents, **options), x, x, x
    )


def test_errors_name_the_plans_that_are_needed():
    segment_ids = draw(0, D * B)[4]
    whole = [
        plan_attention(segment_ids, world_size=W),
        place_tokens(segment_ids=segment_ids, world_size=W).plan,
    ]
    of_groups: list[Any] = [Moved(segment_ids), Placed(segment_ids)]
    for plan, groups in zip(whole, of_groups, strict=True):
        for single in (plan, groups.plans[0]):
            with pytest.raises(
                ValueError, match=r"single plan, but batch_axis \('data',\).*stack_plans"
            ):
                attend_abstractly(single, batch_axis="data")
        stack = stack_plans(groups.plans)
        with pytest.raises(
            ValueError, match=r"stacked as \[2\], but the batch is not sharded.*batch_axis"
        ):
            attend_abstractly(stack, batch_axis=())
        with pytest.raises(ValueError, match=r"stacked as \[1, 2\], but batch_axis.*jax.lax.scan"):
            attend_abstractly(stack_plans([stack]), batch_axis="data")
        with pytest.raises(ValueError, match="Validate each plan before stack_plans"):
            stack.validate(segment_ids)
        attend_abstractly(stack, batch_axis="data")
        attend_abstractly(stack_plans([plan]), mesh_shape=(1, W), batch_axis="data")
    with pytest.raises(ValueError, match=r"world_size=2 but mesh axes 'data', 'cp' have 4 devices"):
        attend_abstractly(whole[0], axis_name=("data", AXIS))
    with pytest.raises(ValueError, match="a mesh axis can shard one dimension only"):
        attend_abstractly(None, axis_name=("data", AXIS), batch_axis="data")


def test_plans_that_cannot_be_stacked():
    moved, placed = Moved(draw(0, D * B)[4]).plans[0], Placed(draw(0, D * B)[4]).plans[0]
    window = place_tokens([[T], [T]], world_size=W, mask=SlidingWindow(5)).plan
    for plans, error, match in (
        ([], ValueError, "got an empty list"),
        ([moved, placed], TypeError, "others move queries.*place_tokens"),
        ([placed, window], ValueError, r"mask is \[Causal\(\), SlidingWindow\(left=5, right=0\)\]"),
        ([placed, stack_plans([placed])], ValueError, "fingerprints of shapes"),
        ([placed, place_tokens([[T]], world_size=W).plan], ValueError, r"num_tokens is \[48, 24\]"),
    ):
        with pytest.raises(error, match=match):
            stack_plans(plans)


def test_one_plan_is_no_list(unchecked_types):
    plan: Any = place_tokens([[T]], world_size=W).plan
    with pytest.raises(TypeError, match=r"got Plan\. Pass a list of plans\."):
        stack_plans(plan)


def test_fixed_capacities_give_equal_shapes():
    """So processes that each plan one group compile the same program."""
    segment_ids = draw(3, D * B)[4]
    plans = [
        place_tokens(segment_ids=x, world_size=W, config=CONFIG).plan for x in by_group(segment_ids)
    ]
    stack = stack_plans(plans)
    shapes = [jax.tree.map(np.shape, plan) for plan in plans]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    assert jax.tree.structure(plans[0]) == jax.tree.structure(plans[1])
    assert isinstance(jax.tree.leaves(stack)[0], np.ndarray)


@pytest.mark.parametrize("plans_of", [Moved, Placed])
def test_summaries_of_stacked_plans(plans_of):
    plans: list[Any] = plans_of(draw(4, D * B)[4]).plans
    stack = stack_plans(plans)
    assert stack.imbalance == max(plan.imbalance for plan in plans)
    assert stack.num_kv_tokens_moved == sum(plan.num_kv_tokens_moved for plan in plans)
