"""Attention by plans: extreme batches, plans in several forms, meshes, and plans of other calls.

Values in all other respects: test_values.py.
"""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from array_masks import random_mask
from attention_oracle import attention, attention_gradients
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, all_fail, mesh_of
from packed_batches import causal_ranges, pack

from jax_cp_dispatch import (
    Balanced,
    Documents,
    PlanConfig,
    context_parallel_attention,
    place_tokens,
    plan_attention,
    stack_plans,
)
from jax_cp_dispatch.masks import Causal, PrefixLM, Ranges
from jax_cp_dispatch.masks.mask import PACKED, PLACED

W = 8
CONFIG = PlanConfig(block=16)


def draw(seed, *, batch=1, num_tokens=W * 32):
    """q, k, v, a cotangent and the segment ids of random documents."""
    rng = np.random.default_rng(seed)
    segment_ids, _ = pack(rng, batch, num_tokens, max_length=200)
    arrays = (rng.normal(size=(batch, num_tokens, n, 8)).astype(np.float32) for n in (4, 2, 2, 4))
    return *arrays, segment_ids


def expected(q, k, v, g, segment_ids):
    """Output and gradients in float64 from the oracle."""
    ranges = causal_ranges(segment_ids)
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    out, lse = attention(q, k, v, *ranges)
    return out, *attention_gradients(q, k, v, *ranges, g, np.zeros(lse.shape))


def out_and_gradients(fn, q, k, v, g):
    out, pull_back = jax.vjp(fn, q, k, v)
    return out, *pull_back(g)


def assert_close(results, references, *, relative=1e-5, smallest_scale=1e-30):
    """Compares relative to the largest entry, because gradients of one softmax differ widely.

    If entries are differences of larger numbers, `smallest_scale` is the size of these numbers.
    """
    assert len(results) == len(references)
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, references, strict=False):
        scale = max(np.abs(want).max(), smallest_scale)
        difference = np.abs(np.asarray(got, np.float64) - want).max()
        assert difference <= relative * scale, f"{name}: {difference / scale:.1e}"


def attend(segment_ids, mesh, **options):
    options = {"axis_name": AXIS, "algorithm": Balanced(CONFIG), **options}
    return lambda q, k, v: context_parallel_attention(
        q, k, v, mesh=mesh, segment_ids=segment_ids, **options
    )


def planned(segment_ids, config=CONFIG):
    plan = plan_attention(segment_ids, world_size=W, config=config)
    return Documents(segment_ids).with_plan(plan)


@partial(jax.jit, static_argnames="algorithm")
def attend_by_plan(q, k, v, g, documents, *, algorithm):
    """Output and gradients; one program for all plans of one shape."""
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "algorithm": algorithm}
    attend = partial(context_parallel_attention, documents=documents, **options)
    return out_and_gradients(attend, q, k, v, g)


# Capacities that fit every plan of 8 x 32 rows.
ROOMY = {
    "balanced": PlanConfig(16, 80, 256, max_q_transfers=16, max_kv_transfers=24, max_pieces=64),
    "placed": PlanConfig(
        kv_capacity=256, max_kv_transfers=64, max_pieces=32, max_cut_pieces=32, max_linked_pieces=99
    ),
}
EXTREMES = {
    "one document": [7] * 256,
    "all padding": [0] * 256,
    "first rank empty": [0] * 40 + [1] * 50 + [2] * 3 + [3] * 163,
    "one token each": np.arange(1, 257),
    "all equal": np.repeat(np.arange(1, 9), 32),
    "last row only": [0] * 255 + [1],
}


@pytest.mark.parametrize("algorithm", ROOMY)
def test_extreme_documents(algorithm):
    """One program serves all, and repeats bit for bit."""
    q, k, v, g, _ = draw(0)
    for ids in EXTREMES.values():
        segment_ids, config = np.array([ids]), ROOMY[algorithm]
        documents = moves = Documents(segment_ids)
        if algorithm == "balanced":
            documents = planned(segment_ids, config)
        else:
            moves = place_tokens(segment_ids=segment_ids, world_size=W, config=config)
            documents = moves.documents
        run = partial(attend_by_plan, *moves.apply((q, k, v, g)), algorithm=algorithm)
        results = run(documents)
        jax.tree.map(np.testing.assert_array_equal, run(documents), results)
        results = moves.restore([np.asarray(x) for x in results])
        # A single token has dq = p (g v - g out) k with out = v.
        is_alone = np.unique(segment_ids[segment_ids > 0], return_counts=True)[1].max(initial=1) < 2
        smallest_scale = float(np.prod([np.abs(x).max() for x in (g, v, k)])) if is_alone else 1e-30
        assert_close(results, expected(q, k, v, g, segment_ids), smallest_scale=smallest_scale)
        for result in results:
            assert not result[segment_ids == 0].any()


def test_plan_made_inside_the_program_serves_all_batches_with_one_program():
    mesh = mesh_of(W)
    traces = []

    @jax.jit
    def fn(q, k, v, segment_ids, positions):
        traces.append(1)
        options = {"axis_name": AXIS, "algorithm": Balanced(CONFIG), "mesh": mesh}
        return context_parallel_attention(
            q, k, v, segment_ids=segment_ids, positions=positions, **options
        )

    for seed in range(3):
        rng = np.random.default_rng(seed)
        q, k, v, g, _ = draw(seed)
        segment_ids, positions = pack(rng, 1, W * 32, max_length=150)
        got = fn(q, k, v, segment_ids, positions)
        assert_close([got], expected(q, k, v, g, segment_ids)[:1])
    assert len(traces) == 1


@pytest.mark.parametrize("form, check_vma", [("global", True), ("slice", False)])
def test_inside_shard_map(form, check_vma):
    q, k, v, g, segment_ids = draw(10, batch=2)
    documents = planned(segment_ids)
    specs = documents.specs(AXIS)
    if form == "global":  # each rank gets the whole plan
        whole = lambda spec: P() if spec == P(AXIS) else spec
        specs = jax.tree.map(whole, specs, is_leaf=lambda x: isinstance(x, P))
    rows = P(None, AXIS)
    fn = jax.shard_map(
        lambda q, k, v, documents: context_parallel_attention(
            q, k, v, documents=documents, algorithm="balanced", axis_name=AXIS
        ),
        mesh=mesh_of(W),
        in_specs=(rows, rows, rows, specs),
        out_specs=rows,
        check_vma=check_vma,
    )
    results = jax.jit(lambda *x: out_and_gradients(lambda q, k, v: fn(q, k, v, documents), *x))(
        q, k, v, g
    )
    assert_close(results, expected(q, k, v, g, segment_ids))


def test_mesh_with_an_axis_that_only_replicates():
    """Groups of devices along an unnamed axis compute the same result independently."""
    q, k, v, g, segment_ids = draw(13, num_tokens=4 * 32)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "idle"))
    results = jax.jit(lambda *x: out_and_gradients(attend(segment_ids, mesh), *x))(q, k, v, g)
    assert_close(results, expected(q, k, v, g, segment_ids))


def test_auto_follows_the_plan_on_an_explicit_mesh():
    q, k, v, g, segment_ids = draw(8, num_tokens=4 * 24)
    want = expected(q, k, v, g, segment_ids)[:1]
    placement = place_tokens(segment_ids=segment_ids, world_size=4)
    mesh = Mesh(np.array(jax.devices()[:4]), (AXIS,), axis_types=(AxisType.Explicit,))
    q, k, v = placement.apply((q, k, v))
    q, k, v = (jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in (q, k, v))
    out = context_parallel_attention(
        q, k, v, mesh=mesh, axis_name=AXIS, algorithm="auto", documents=placement.documents
    )
    out = placement.restore(np.asarray(out))
    assert_close([out], want)


def test_a_plan_knows_the_mask_of_arrays_for_which_it_was_made():
    """Another kind is refused in the call; other arrays are, in the step, on all ranks."""
    rng = np.random.default_rng()
    *qkv, _, segment_ids = draw(3, num_tokens=4 * 32)
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
    made = {"segment_ids": segment_ids, "mask": mask, **options}  # the call makes the same plan
    out = context_parallel_attention(*qkv, algorithm=Balanced(config), **made)
    np.testing.assert_array_equal(out, explicit)
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
    with pytest.raises(ValueError, match=f"the arrays of the mask of rank {rank} are not those"):
        plan.validate(segment_ids, None, other)
    plan.validate(segment_ids, None, mask)
    assert np.isnan(attend(documents, other, implementation="xla")).all()
    ends = np.arange(1, 129)[None]
    causal = Documents(segment_ids).with_plan(plan_attention(segment_ids, world_size=4))
    with pytest.raises(ValueError, match=r"mask is Ranges.* but the documents have a plan"):
        attend(causal, Ranges(0 * ends, ends))


# ---- Invalid calls.


@pytest.mark.usefixtures("unchecked_types")
def test_plan_for_other_ranks_or_rows_is_rejected():
    *qkv, _, segment_ids = draw(12, num_tokens=W * 16)

    def attend(plan):
        documents = Documents(segment_ids).with_plan(plan)
        options = {"mesh": mesh_of(W), "axis_name": AXIS, "documents": documents}
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


def test_capacity_too_small_for_a_traced_plan_fails_on_all_ranks():
    q, k, v, _, segment_ids = draw(12, num_tokens=W * 16)
    config = dataclasses.replace(CONFIG, kv_capacity=16)
    fn = jax.jit(lambda ids: attend(ids, mesh_of(W), algorithm=Balanced(config))(q, k, v))
    message = r"would receive \d+ tokens but PlanConfig.kv_capacity is 16. Pass PlanConfig.kv_capa"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(fn(np.ones_like(segment_ids)))


def test_plans_are_for_their_own_algorithm():
    q, k, v, _, segment_ids = draw(9, num_tokens=2 * 16)
    place = lambda ids, **options: place_tokens(segment_ids=ids, world_size=2, **options).documents
    packed, placed = Documents(segment_ids), place(segment_ids)
    moved = plan_attention(segment_ids, world_size=2)
    attend = partial(context_parallel_attention, q, k, v, mesh=mesh_of(2), axis_name=AXIS)
    for documents, order in (
        (None, "packed"),
        (packed, "packed"),
        (packed.with_plan(moved), "packed"),
        (packed.zigzag(2), "zigzag"),
    ):
        with pytest.raises(ValueError, match=f"'placed' needs tokens in placed order; got {order}"):
            attend(algorithm="placed", documents=documents)
    with pytest.raises(ValueError, match="'balanced' needs tokens in packed order; got placed"):
        attend(algorithm="balanced", documents=placed)
    for algorithm in ("ring", "zigzag", "hamilton", "ulysses"):
        with pytest.raises(ValueError, match=f"algorithm='{algorithm}' cannot follow. Pass alg"):
            attend(algorithm=algorithm, documents=placed)
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
    q, k, v, _, segment_ids = draw(9, num_tokens=2 * 16)
    placed = place_tokens(segment_ids=segment_ids, world_size=2).documents
    moved = Documents(segment_ids).with_plan(plan_attention(segment_ids, world_size=2))
    rows = P(None, AXIS)
    for algorithm, whole, order in (("placed", placed, PLACED), ("balanced", moved, PACKED)):
        documents = Documents.in_order(
            whole.segment_ids, whole.positions, (stack_plans([whole.plan] * 2),), order=order,
            columns=whole.columns,
        )  # fmt: skip
        attend = jax.shard_map(
            lambda q, k, v, documents, algorithm=algorithm: context_parallel_attention(
                q, k, v, documents=documents, algorithm=algorithm, axis_name=AXIS
            ),
            mesh=mesh_of(2),
            in_specs=(rows, rows, rows, documents.specs(AXIS)),
            out_specs=rows,
        )
        with pytest.raises(ValueError, match=r"got stacked plans, of \[2\]. Pass one of them"):
            jax.eval_shape(attend, q, k, v, documents)
