"""Attention by plans: in several forms, stacked for groups and micro-batches, and of other calls.

Values in all other respects: test_values.py. Batches that do not fit: test_fallbacks.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_masks import random_mask
from calls import check_qkv, draw_qkv, with_gradients
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from mask_oracle import batch_visible
from on_mesh import AXIS, all_fail, mesh_of, permuted_mesh

from jax_cp_dispatch import (
    Documents,
    PlanConfig,
    context_parallel_attention,
    place_tokens,
    plan_attention,
    stack_plans,
)
from jax_cp_dispatch.masks import Causal, PrefixLM, Ranges, SlidingWindow

D, W, B, T = 2, 2, 2, 48  # groups, ranks of a group, rows of a group, tokens
AXES = ("data", AXIS, "tp")
PACKED = Documents(np.ones((1, 2), int)).order
PLACED = place_tokens([[2]], world_size=1).documents.order
FREE = PlanConfig()  # capacities that this batch needs
CONFIG = PlanConfig(
    kv_capacity=96, max_kv_transfers=16, max_pieces=16, max_cut_pieces=16, max_linked_pieces=99
)


def test_each_rank_may_have_the_whole_plan():
    """Its own part: tests/documents."""
    *arrays, segment_ids = operands = draw_qkv(10, 2, 4 * 16)
    plan = plan_attention(segment_ids, world_size=4)
    documents = Documents(segment_ids).with_plan(plan)
    whole = lambda spec: P() if spec == P(AXIS) else spec
    specs = jax.tree.map(whole, documents.specs(AXIS), is_leaf=lambda x: isinstance(x, P))
    rows = P(None, AXIS)
    attend = jax.shard_map(
        lambda q, k, v, documents: context_parallel_attention(
            q, k, v, documents=documents, algorithm="balanced", axis_name=AXIS
        ),
        mesh=mesh_of(4), in_specs=(rows, rows, rows, specs), out_specs=rows,
    )  # fmt: skip
    check_qkv([jax.jit(attend)(*arrays[:3], documents)], operands)


def test_auto_follows_the_plan_on_an_explicit_mesh():
    *arrays, segment_ids = operands = draw_qkv(8, 1, 4 * 24)
    placement = place_tokens(segment_ids=segment_ids, world_size=4)
    rows = NamedSharding(
        jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Explicit,)), P(None, AXIS)
    )
    q, k, v = (jax.device_put(x, rows) for x in placement.apply(arrays[:3]))
    out = context_parallel_attention(
        q, k, v, mesh=rows.mesh, axis_name=AXIS, algorithm="auto", documents=placement.documents
    )
    check_qkv([placement.restore(np.asarray(out))], operands)


def test_a_plan_knows_the_mask_of_arrays_for_which_it_was_made():
    """Another kind is refused in the call; other arrays are, in the step, on all ranks."""
    rng = np.random.default_rng()
    *qkv, _, segment_ids = draw_qkv(3, 1, 4 * 32)
    constructor, arrays, _ = random_mask("blocks", rng, segment_ids)
    mask, config = constructor(*arrays), PlanConfig(8, 48, 136, 16, 48, 64)
    plan = plan_attention(segment_ids, world_size=4, mask=mask, config=config)
    documents = Documents(segment_ids).with_plan(plan)
    options = {"mesh": mesh_of(4), "axis_name": AXIS}

    @partial(jax.jit, static_argnames="implementation")
    def attend(documents, mask, implementation=None):
        given = {"documents": documents, "mask": mask, "implementation": implementation, **options}
        return context_parallel_attention(*qkv, algorithm="balanced", **given)

    explicit = attend(documents, mask)
    np.testing.assert_array_equal(attend(documents, None), explicit)
    message = r"mask is .*, but the documents have a plan for Blocks"
    for other in (PrefixLM(np.ones((1, 128), bool)), Causal()):
        with pytest.raises(ValueError, match=message):
            attend(documents, other)
    rank = int(rng.integers(4))
    block_end = np.array(mask.block_end)
    block_end[0, rank * 32 + int(rng.integers(32))] += 1
    other = jax.tree.unflatten(jax.tree.structure(mask), [block_end])
    message = f"made for another batch: the mask of rank {rank} has checksum"
    all_fail(attend(documents, other), message)
    assert np.isnan(np.asarray(attend(documents, other, "xla"))[segment_ids > 0]).all()
    with pytest.raises(ValueError, match=f"the arrays of the mask of rank {rank} are not those"):
        plan.validate(segment_ids, None, other)
    plan.validate(segment_ids, None, mask)
    ends = np.arange(1, 129)[None]
    causal = Documents(segment_ids).with_plan(plan_attention(segment_ids, world_size=4))
    with pytest.raises(ValueError, match=r"mask is Ranges.* but the documents have a plan"):
        attend(causal, Ranges(0 * ends, ends))


def test_a_placement_for_two_masks_serves_each_of_them():
    """A window, and a mask of arrays over the same tokens; another one is an error on all ranks."""
    rng = np.random.default_rng()
    *arrays, segment_ids = operands = draw_qkv(None, 2, 48)
    constructor, of_mask, sees = random_mask("tree", rng, segment_ids)
    masks = (SlidingWindow(4), constructor(*of_mask))
    placement = place_tokens(segment_ids=segment_ids, world_size=8, masks=masks, layers=(5, 1))
    run = jax.jit(
        lambda q, k, v, documents, mask: context_parallel_attention(
            q, k, v, mesh=mesh_of(8), axis_name=AXIS, algorithm="placed", documents=documents,
            mask=mask,
        )
    )  # fmt: skip
    placed = *placement.apply(arrays[:3]), placement.documents
    out = placement.restore(np.asarray(run(*placed, placement.apply(masks[1]))))
    check_qkv([out], operands, pairs=batch_visible(segment_ids, sees))
    check_qkv([placement.restore(np.asarray(run(*placed, masks[0])))], operands, masks[0])
    constructor, of_mask, _ = random_mask("tree", rng, segment_ids)
    other = run(*placed, placement.apply(constructor(*of_mask)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"the mask of rank \d has checksum"):
        jax.block_until_ready(other)


# ---- One plan for each group of a sharded batch, and for each micro-batch.


def by_group(x):
    return np.split(np.asarray(x), D)


class Moved:
    """Queries move, as `plan_attention` says."""

    def __init__(self, segment_ids):
        self.plans = [plan_attention(ids, world_size=W) for ids in by_group(segment_ids)]
        self.documents = Documents(segment_ids).with_plan(stack_plans(self.plans))


class Placed:
    """Every group's tokens are placed on its ranks."""

    def __init__(self, segment_ids, config=None):
        apart = [place_tokens(segment_ids=ids, world_size=W) for ids in by_group(segment_ids)]
        self.plans = [group.plan for group in apart]
        together = place_tokens(
            segment_ids=segment_ids, world_size=W, num_groups=D, config=config or FREE
        )
        self.documents = together.documents
        self.apply, self.restore = together.apply, together.restore


def test_a_plan_for_each_group():
    """Of different capacities; each group compares the documents of its own rows."""
    mesh = permuted_mesh((D, W, 2), AXES, AxisType.Explicit)
    operands = draw_qkv(0, D * B, T)
    groups = Moved(operands[4])
    options = {"axis_name": AXIS, "batch_axis": "data", "head_axis": "tp", "mesh": mesh}

    @jax.jit
    def run(*operands):
        *arrays, documents = operands
        given = {"documents": documents, "algorithm": "balanced", **options}
        return with_gradients(partial(context_parallel_attention, **given))(*arrays)

    documents = groups.documents
    with jax.set_mesh(mesh):
        check_qkv(run(*operands[:4], documents), operands)
    with jax.set_mesh(mesh), pytest.raises(jax.errors.JaxRuntimeError, match="made for another batch"):
        # The rows of the other group.
        ids, positions = (np.roll(x, B, 0) for x in (documents.segment_ids, documents.positions))
        others = Documents.in_order(
            ids, positions, documents.plans, order=documents.order, columns=T
        )
        jax.block_until_ready(run(*operands[:4], others))


def test_micro_batches_share_a_program():
    """A scan over stacked documents is compiled once."""
    mesh = permuted_mesh((D, W), AXES[:2])
    micro_batches = [draw_qkv(seed, D * B, T) for seed in range(3)]
    placements = [Placed(operands[4], CONFIG) for operands in micro_batches]
    documents = jax.tree.map(lambda *x: np.stack(x), *(x.documents for x in placements))
    assert documents.plan.fingerprint.shape == (3, D, W, 4)
    options: dict[str, Any] = {"axis_name": AXIS, "batch_axis": "data", "mesh": mesh}
    traced = []

    @jax.jit
    def scanned(operands, documents):
        def step(_, batch):
            traced.append(batch)
            qkv, documents = batch
            given = {"algorithm": "placed", "documents": documents, **options}
            return None, context_parallel_attention(*qkv, **given)

        return jax.lax.scan(step, None, (operands, documents))[1]

    moved = [x.apply(y[:3]) for x, y in zip(placements, micro_batches, strict=True)]
    out = scanned(jax.tree.map(lambda *x: np.stack(x), *moved), documents)
    assert len(traced) == 1
    for i, placement in enumerate(placements):
        check_qkv([placement.restore(np.asarray(out[i]))], micro_batches[i])


def test_plans_made_inside_a_program_can_be_stacked():
    """Of traced segment ids: one plan for each group."""
    mesh, operands = permuted_mesh((D, W), AXES[:2]), draw_qkv(4, D * B, T)
    options: dict[str, Any] = {"axis_name": AXIS, "batch_axis": "data", "mesh": mesh}

    def planned(q, k, v, segment_ids):
        plan = stack_plans([plan_attention(x, world_size=W) for x in jnp.split(segment_ids, D)])
        assert plan.fingerprint.shape == (D, W, 4) and isinstance(plan.fingerprint, Tracer)
        given = {"documents": Documents(segment_ids).with_plan(plan), "algorithm": "balanced"}
        return context_parallel_attention(q, k, v, **given, **options)

    q, k, v, g, segment_ids = operands
    assert jax.eval_shape(planned, q, k, v, segment_ids).shape == g.shape


def test_a_sequence_over_two_axes():
    """Ranks count along both, the major axis first."""
    operands = draw_qkv(5, B, T)
    placement = place_tokens(segment_ids=operands[4], world_size=D * W)
    attend = partial(
        context_parallel_attention, mesh=permuted_mesh((D, W, 2), AXES), algorithm="placed",
        axis_name=("data", AXIS), head_axis="tp",
    )  # fmt: skip
    out = jax.jit(attend)(*placement.apply(operands[:3]), documents=placement.documents)
    check_qkv([placement.restore(np.asarray(out))], operands)


def test_fixed_capacities_give_equal_shapes():
    """So processes that each plan one group compile the same program."""
    segment_ids = draw_qkv(3, D * B, T)[4]
    plans = [
        place_tokens(segment_ids=x, world_size=W, config=CONFIG).plan for x in by_group(segment_ids)
    ]
    stack = stack_plans(plans)
    shapes = [jax.tree.map(np.shape, plan) for plan in plans]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    assert jax.tree.structure(plans[0]) == jax.tree.structure(plans[1])
    assert isinstance(jax.tree.leaves(stack)[0], np.ndarray)


# ---- Invalid calls.


@pytest.mark.usefixtures("unchecked_types")
def test_plan_for_other_ranks_or_rows_is_rejected():
    *qkv, _, segment_ids = draw_qkv(12, 1, 8 * 16)

    def attend(plan):
        documents = Documents(segment_ids).with_plan(plan)
        options = {"mesh": mesh_of(8), "axis_name": AXIS, "documents": documents}
        return context_parallel_attention(*qkv, algorithm="balanced", **options)

    plan = plan_attention(segment_ids, None, world_size=4)
    with pytest.raises(ValueError, match="world_size=4 but mesh axis 'cp' has 8 devices"):
        attend(plan)
    plan = plan_attention(segment_ids[:, :64], None, world_size=8)
    with pytest.raises(ValueError, match="a rank holds 1 x 16 = 16 rows but the plan is for 8"):
        attend(plan)
    plan = plan_attention(segment_ids.reshape(2, 64), None, world_size=8)
    with pytest.raises(ValueError, match=r"a rank holds 1 x 16 rows but the plan is for 2 x 8\. P"):
        attend(plan)


def test_plans_are_for_their_own_mask_and_rows():
    """Of tokens in another order: tests/documents."""
    q, k, v, _, segment_ids = draw_qkv(9, 1, 2 * 16)
    place = lambda ids, **options: place_tokens(segment_ids=ids, world_size=2, **options).documents
    packed, placed = Documents(segment_ids), place(segment_ids)
    moved = plan_attention(segment_ids, world_size=2)
    attend = partial(context_parallel_attention, q, k, v, mesh=mesh_of(2), axis_name=AXIS)
    with pytest.raises(ValueError, match=r"mask is Full\(\), but the documents have a plan for"):
        attend(algorithm="placed", documents=placed, mask="full")
    for other, rows in (
        (place(segment_ids[:, :16]), 1),
        (place(segment_ids.reshape(2, 16)), 2),
        (place(segment_ids, rank=1), 1),
    ):
        with pytest.raises(ValueError, match=rf"segment_ids has shape \({rows}, 16\) but q has"):
            attend(algorithm="placed", documents=other)
    with pytest.raises(ValueError, match=r"the plan is the part of 1 of 2 ranks\. Pass"):
        attend(algorithm="balanced", documents=packed.with_plan(moved.slice_of(1)))


def test_stacked_plans_are_for_the_steps_of_a_scan():
    *qkv, _, segment_ids = draw_qkv(9, 1, 2 * 16)
    moved = Documents(segment_ids).with_plan(plan_attention(segment_ids, world_size=2))
    documents = Documents.in_order(
        moved.segment_ids, moved.positions, (stack_plans([moved.plan] * 2),), order=moved.order,
        columns=moved.columns,
    )  # fmt: skip
    rows, attend = P(None, AXIS), partial(context_parallel_attention, axis_name=AXIS)
    on_ranks = jax.shard_map(
        lambda q, k, v, documents: attend(q, k, v, documents=documents, algorithm="balanced"),
        mesh=mesh_of(2), in_specs=(rows, rows, rows, documents.specs(AXIS)), out_specs=rows,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"got stacked plans, of \[2\]. Pass one of them"):
        jax.eval_shape(on_ranks, *qkv, documents)


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
    segment_ids = draw_qkv(0, D * B, T)[4]
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


@pytest.mark.usefixtures("unchecked_types")
def test_plans_that_cannot_be_stacked():
    moved, placed = (
        Moved(draw_qkv(0, D * B, T)[4]).plans[0],
        Placed(draw_qkv(0, D * B, T)[4]).plans[0],
    )
    window = place_tokens([[T], [T]], world_size=W, mask=SlidingWindow(5)).plan
    rows: Any = (
        ([], ValueError, "got an empty list"),
        (placed, TypeError, r"got Plan\. Pass a list of plans\."),
        ([moved, placed], TypeError, "others move queries.*place_tokens"),
        ([placed, window], ValueError, r"mask is \[Causal\(\), SlidingWindow\(left=5, right=0\)\]"),
        ([placed, stack_plans([placed])], ValueError, "fingerprints of shapes"),
        ([placed, place_tokens([[T]], world_size=W).plan], ValueError, r"num_tokens is \[48, 24\]"),
    )
    for plans, error, match in rows:
        with pytest.raises(error, match=match):
            stack_plans(plans)
