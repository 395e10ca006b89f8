"""Attention by plans: in several forms, stacked for groups and micro-batches, and of other calls.

And runs of batches, some of which do not fit, in one program. Other values: test_values.py.
"""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_masks import pack_for, random_mask
from calls import check_qkv, draw_qkv, with_gradients
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec as P
from mask_oracle import batch_visible
from on_mesh import AXIS, all_fail, mesh_of, permuted_mesh
from planner_oracle import deliver
from random_lengths import cut

from jax_cp_dispatch import (
    Documents,
    PlanConfig,
    context_parallel_attention,
    fit_plan_config,
    place_tokens,
    plan_attention,
    stack_plans,
)
from jax_cp_dispatch.masks import Causal, PrefixLM, Ranges, SlidingWindow

D, W, B, T = 2, 2, 2, 48  # groups, ranks of a group, rows of a group, tokens
AXES = ("data", AXIS, "tp")
PACKED = Documents(np.ones((1, 2), int)).order
PLACED = place_tokens([[2]], world_size=1).documents.order
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


def moved_by_group(segment_ids):
    return [plan_attention(ids, world_size=W) for ids in by_group(segment_ids)]


def test_a_plan_for_each_group():
    """Of different capacities; each group compares the documents of its own rows."""
    mesh = permuted_mesh((D, W, 2), AXES, AxisType.Explicit)
    operands = draw_qkv(0, D * B, T)
    documents = Documents(operands[4]).with_plan(stack_plans(moved_by_group(operands[4])))
    options = {"axis_name": AXIS, "batch_axis": "data", "head_axis": "tp", "mesh": mesh}

    @jax.jit
    def run(*operands):
        *arrays, documents = operands
        given = {"documents": documents, "algorithm": "balanced", **options}
        return with_gradients(partial(context_parallel_attention, **given))(*arrays)

    with jax.set_mesh(mesh):
        check_qkv(run(*operands[:4], documents), operands)
        # The rows of the other group.
        ids, positions = (np.roll(x, B, 0) for x in (documents.segment_ids, documents.positions))
        others = Documents.in_order(
            ids, positions, documents.plans, order=documents.order, columns=T
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match="made for another batch"):
            jax.block_until_ready(run(*operands[:4], others))


def test_micro_batches_share_a_program():
    """A scan over stacked documents is compiled once."""
    mesh = permuted_mesh((D, W), AXES[:2])
    micro_batches = [draw_qkv(seed, D * B, T) for seed in range(3)]
    of_each = {"world_size": W, "num_groups": D, "config": CONFIG}
    placements = [place_tokens(segment_ids=operands[4], **of_each) for operands in micro_batches]
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


@pytest.mark.parametrize("kind", ["ranges", "block_diffusion"])
def test_each_rank_plans_for_a_traced_mask(kind):
    """Its arrays vary over the axis of the ranks, which loops of the planner have to keep."""
    rng = np.random.default_rng(0)
    segment_ids, _ = pack_for(kind, rng, B, T, max_length=20)
    constructor, arrays, _ = random_mask(kind, rng, segment_ids)
    q = jnp.zeros((B, T, 2, 4))
    where: Any = {"mesh": permuted_mesh((W,), (AXIS,)), "axis_name": AXIS, "algorithm": "balanced"}

    def attend(segment_ids, *arrays):
        mask = constructor(*arrays)
        return context_parallel_attention(q, q, q, segment_ids=segment_ids, mask=mask, **where)

    assert jax.eval_shape(attend, segment_ids, *arrays).shape == q.shape


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


# ---- Invalid calls.


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


IDS = draw_qkv(0, D * B, T)[4]
MOVED, OF_ALL = plan_attention(IDS, world_size=W), place_tokens(segment_ids=IDS, world_size=W).plan
MOVED_EACH = moved_by_group(IDS)
PLACED_EACH = [place_tokens(segment_ids=ids, world_size=W).plan for ids in by_group(IDS)]


def test_plans_that_the_call_cannot_follow():
    """Errors name the plans that are needed. Tokens in another order: tests/documents."""
    over_data, over_both = {"batch_axis": "data"}, {"axis_name": ("data", AXIS)}
    rows = [
        (plan_attention(IDS[:, :24], world_size=W), {"batch_axis": ()},
         "a rank holds 4 x 24 = 96 rows but the plan is for 48"),
        (plan_attention(IDS.reshape(8, 24), world_size=W), {"batch_axis": ()},
         r"a rank holds 4 x 24 rows but the plan is for 8 x 12\. P"),
        (MOVED.slice_of(1), {"batch_axis": ()}, r"the plan is the part of 1 of 2 ranks\. Pass"),
        (OF_ALL, {"batch_axis": (), "mask": "full"},
         r"mask is Full\(\), but the documents have a plan for"),
        (MOVED, over_both, "world_size=2 but mesh axes 'data', 'cp' have 4 devices"),
        (None, over_both | over_data, "a mesh axis can shard one dimension only"),
    ]  # fmt: skip
    for whole, of_groups in ((MOVED, MOVED_EACH), (OF_ALL, PLACED_EACH)):
        stack = stack_plans(of_groups)
        single = r"single plan, but batch_axis \('data',\).*stack_plans"
        rows += [
            (whole, over_data, single),
            (of_groups[0], over_data, single),
            (stack, {"batch_axis": ()},
             r"stacked as \[2\], but the batch is not sharded.*batch_axis"),
            (stack_plans([stack]), over_data,
             r"stacked as \[1, 2\], but batch_axis.*jax.lax.scan"),
        ]  # fmt: skip
        with pytest.raises(ValueError, match="Validate each plan before stack_plans"):
            stack.validate(IDS)
        attend_abstractly(stack, **over_data)
        attend_abstractly(stack_plans([whole]), mesh_shape=(1, W), **over_data)
    for plan, options, says in rows:
        with pytest.raises(ValueError, match=says):
            attend_abstractly(plan, **options)


def test_stacked_plans_are_for_the_steps_of_a_scan():
    *qkv, _, ids = draw_qkv(9, 1, 2 * 16)
    stack = stack_plans([plan_attention(ids, world_size=2)] * 2)
    documents = Documents.in_order(ids, ids, (stack,), order=PACKED, columns=32)
    rows, attend = P(None, AXIS), partial(context_parallel_attention, axis_name=AXIS)
    on_ranks = jax.shard_map(
        lambda q, k, v, documents: attend(q, k, v, documents=documents, algorithm="balanced"),
        mesh=mesh_of(2), in_specs=(rows, rows, rows, documents.specs(AXIS)), out_specs=rows,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"got stacked plans, of \[2\]. Pass one of them"):
        jax.eval_shape(on_ranks, *qkv, documents)


@pytest.mark.usefixtures("unchecked_types")
def test_plans_that_cannot_be_stacked():
    moved, placed = MOVED_EACH[0], PLACED_EACH[0]
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


# ---- Batches that do not fit: a ring attends, or all ranks fail.


def ids_of(*rows):
    """Returns segment ids of rows of document lengths."""
    return np.stack([np.repeat(np.arange(1, len(x) + 1, dtype=np.int32), x) for x in rows])


def documents_of(algorithm, lengths, **options):
    if algorithm == "placed":
        return place_tokens([lengths], **options).documents
    plan = plan_attention(lengths=[lengths], **options)
    return Documents(ids_of(lengths)).with_plan(plan)


def planned_or_ring(algorithm, **options):
    """Returns attention by the plan, and by a ring if the plan does not fit."""
    call = partial(context_parallel_attention, axis_name=AXIS, **options)

    def attend(q, k, v, documents):
        planned = partial(call, algorithm=algorithm, documents=documents)
        of_ring = documents.unplaced() if algorithm == "placed" else documents
        ring = partial(call, algorithm="ring", documents=of_ring)
        return jax.lax.cond(documents.fits, planned, ring, q, k, v)

    return attend


def test_many_batches_share_a_program():
    """Output and gradients of both branches, against dense attention."""
    rng = np.random.default_rng(0)
    sizes: Any = {"world_size": 4, "columns": 512}
    sample = [cut(rng, 512, rng.integers(1, 40)).tolist() for _ in range(15)]
    config = fit_plan_config(sample, overflow=0.2, **sizes)
    # Less than the sample needs, so that some batches do not fit.
    plans = [plan_attention(lengths=[x], **sizes) for x in sample]
    needs = [int(plan.kv_metadata.num_seqs.max()) for plan in plans]
    config = dataclasses.replace(config, max_kv_transfers=int(np.quantile(needs, 0.8)))
    step: Any = jax.jit(with_gradients(planned_or_ring("balanced", mesh=mesh_of(4))))
    *arrays, _ = draw_qkv(1, 1, 512, heads=(2, 1))
    seen = {True: 0, False: 0}
    for lengths in sample:
        documents = documents_of("balanced", lengths, **sizes, config=config, fallback="ring")
        results = step(*arrays, documents)
        seen[bool(documents.fits)] += 1
        if seen[bool(documents.fits)] <= 2:
            check_qkv(results, (*arrays, ids_of(lengths)))
    assert 7 < seen[True] < 15
    assert step._cache_size() == 1


def test_groups_of_rows_fall_back_together():
    """A ring cannot read the tokens of a group that was placed: of one document, nothing shows."""
    config = PlanConfig(
        kv_capacity=64, max_kv_transfers=8, max_pieces=20, max_cut_pieces=8, max_linked_pieces=99
    )
    mesh = permuted_mesh((2, 2), ("data", AXIS))
    step: Any = jax.jit(planned_or_ring("placed", mesh=mesh, batch_axis="data"))
    arrays = draw_qkv(2, 2, 64)[:4]
    for lengths, fits in (([[64], [1] * 64], False), ([[64], [60, 4]], True)):
        options = {"world_size": 2, "columns": 64, "config": config, "fallback": "ring"}
        placement = place_tokens(lengths, num_groups=2, **options)
        documents = placement.documents
        assert bool(documents.fits) == fits
        assert fits or "group 1 of 2" in str(placement.reason)
        out = placement.restore(np.asarray(step(*placement.apply(arrays[:3]), documents)))
        check_qkv([out], (*arrays, ids_of(*lengths)))
        apart = stack_plans([place_tokens([row], **options).plan for row in lengths])
        ids, positions = documents.segment_ids, documents.positions
        other = Documents.in_order(ids, positions, (apart,), order=documents.order, columns=64)
        if not fits:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"a fallback|for another batch"):
                jax.block_until_ready(step(*arrays[:3], other))
    assert step._cache_size() == 1


@pytest.mark.parametrize("algorithm", ["placed", "balanced"])
def test_a_plan_that_does_not_fit_is_not_computed(algorithm):
    """The error says that the plan is a fallback, and what the batch needs."""
    options: dict[str, Any] = {"world_size": 2, "config": PlanConfig(1, 64, 40, 8, 8, 8, 8, 99)}
    with pytest.raises(ValueError, match="kv_capacity>=64"):
        documents_of(algorithm, [64], **options)
    options["fallback"] = "ring"
    half = 32 * 33 / 2
    if algorithm == "placed":
        placement = place_tokens([[64]], **options)
        assert placement.reason is not None and "kv_capacity>=64" in placement.reason
        np.testing.assert_array_equal(placement.permutation, np.arange(64))
        with pytest.raises(ValueError, match="kv_capacity>=64"):
            _ = placement.needs
    else:
        plan = plan_attention(lengths=[64], **options)
        assert plan.needs.kv_capacity == 64 and "kv_capacity 40: it needs 64" in plan.describe()
        np.testing.assert_allclose(plan.pairs_before, [half, half + 32 * 32])
        part = plan_attention(lengths=[64], **options, rank=1)
        jax.tree.map(np.testing.assert_array_equal, part, plan.slice_of(1))
    documents = documents_of(algorithm, [64], **options)
    assert not documents.plan.fits
    np.testing.assert_allclose(documents.plan.pairs, [half, half + 32 * 32])
    attend = attention(algorithm, documents)
    says = "the plan is a fallback: .*64 tokens but PlanConfig.kv_capacity is 40"
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(attend())
    if algorithm == "placed":  # both give NaN in the same way
        assert np.isnan(attend(implementation="xla")).all()
    with pytest.raises(ValueError, match="this plan is a fallback"):
        documents.plan.validate(np.ones((1, 64), np.int32))


def attention(algorithm, documents):
    q = np.zeros((*documents.segment_ids.shape, 1, 4), np.float32)
    options = {"algorithm": algorithm, "documents": documents}
    return partial(context_parallel_attention, q, q, q, mesh=mesh_of(2), axis_name=AXIS, **options)


@pytest.mark.parametrize(
    "algorithm, config",
    [("placed", PlanConfig(None, None, 512, None, 1, 64, 64, 64)),
     ("balanced", PlanConfig(None, 512, 512, 1, 64, 64))],
)  # fmt: skip
def test_a_fallback_whose_rows_fit_fails_too(algorithm, config):
    """The error refers to `describe`, which names what exceeds a limit."""
    options = {"world_size": 2, "config": config, "fallback": "ring"}
    documents = documents_of(algorithm, [90, 7, 31, 60, 60, 8], **options)
    assert re.search(r"max_(q_|kv_)transfers 1: it needs \d", documents.plan.describe())
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"fallback.*`describe` says what"):
        jax.block_until_ready(attention(algorithm, documents)())


@pytest.mark.parametrize("algorithm", ["placed", "balanced"])
@pytest.mark.parametrize(
    "fallback, message",
    [
        ("dense", "fallback is 'dense'; it needs to be 'ring' or None"),
        ("ring", r"config has no .*kv_capacity, max_.*. Pass a config .* from fit_"),
    ],
)
def test_other_fallbacks_are_refused(algorithm, fallback, message):
    with pytest.raises(ValueError, match=message):
        documents_of(algorithm, [64], world_size=2, fallback=fallback)


# ---- Plans of more than 65,536 tokens: columns beyond 16 bits, and more than 2**32 pairs.
#
# The oracle is arithmetic on lengths, in 64-bit integers; rows of a rank exceed 16 bits, too.

# A document of more than 2**32 pairs, and documents of 2**16 tokens and one more.
LENGTHS = [100_001, 65_537, 65_536, 1, 30_000]
PADDING = 1069
NUM_TOKENS = sum(LENGTHS) + PADDING


def check_ranges(plan, queries, rows, window):
    """Each query is computed once, with its keys; returns the exact pairs of each rank.

    Args:
      queries: the token of each row of queries of each rank, -1 for none.
      rows: the token of each row that the ranks send from.
    """
    starts = np.repeat(np.cumsum(LENGTHS) - LENGTHS, LENGTHS)
    keys = deliver(plan.kv_metadata, rows, plan.kv_capacity)
    computed, pairs = np.zeros(len(starts), int), []
    for rank in range(plan.world_size):
        k_start, k_end = (np.asarray(x).astype(np.int64) for x in plan.local_ranges(rank))
        row = np.flatnonzero((queries[rank] >= 0) & (queries[rank] < len(starts)))
        query = queries[rank][row]
        first = np.maximum(starts[query], query + 1 - window)
        consecutive = np.cumsum(np.diff(keys[rank], prepend=-9) != 1)
        k_start, k_end = k_start[row], k_end[row]
        np.testing.assert_array_equal(k_end - k_start, query + 1 - first)
        np.testing.assert_array_equal(keys[rank][k_start], first)
        np.testing.assert_array_equal(consecutive[k_start], consecutive[k_end - 1])
        np.add.at(computed, query, 1)
        pairs.append(int((k_end - k_start).sum()))
    assert (computed == 1).all()
    every = (np.minimum(np.arange(1, n + 1), window).sum(dtype=np.int64) for n in LENGTHS)
    assert sum(pairs) == sum(every)
    return pairs


@pytest.mark.parametrize("kind", ["moved", "in a window", "placed", "inside jit"])
def test_plans_of_long_rows(kind):
    """Pairs are counted in 64 bits, and rounded to float32 once; inside jit scaled to 32 bits."""
    window = 65_537 if kind == "in a window" else NUM_TOKENS
    rows = np.arange(NUM_TOKENS).reshape(W, -1)
    if kind == "placed":
        placement = place_tokens([LENGTHS], columns=NUM_TOKENS, world_size=W)
        plan, rows = placement.plan, np.asarray(placement.permutation).reshape(W, -1)
    elif kind == "inside jit":
        config = PlanConfig(block=4096)
        planned = jax.jit(partial(plan_attention, world_size=W, config=config))
        plan = planned(np.repeat([1, 2, 3, 4, 5, 0], [*LENGTHS, PADDING]).astype(np.int32)[None])
    else:
        mask = SlidingWindow(window)
        plan = plan_attention(lengths=[LENGTHS], columns=NUM_TOKENS, world_size=W, mask=mask)
    queries = rows if kind == "placed" else deliver(plan.q_metadata, rows, plan.q_capacity)
    pairs = check_ranges(plan, queries, rows, window)
    assert max(pairs) > 2**31
    if kind == "inside jit":
        np.testing.assert_allclose(plan.pairs, pairs, rtol=0, atol=1e-4 * sum(pairs) / W)
        assert max(pairs) <= 1.1 * np.mean(pairs)
    else:
        np.testing.assert_array_equal(plan.pairs, np.array(pairs, np.float32))
        assert max(pairs) <= 1.02 * np.mean(pairs)
