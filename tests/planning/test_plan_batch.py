"""A plan records its batch: another batch fails on all ranks, or gives NaN with XLA."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, all_fail, mesh_of
from packed_batches import pack

from jax_cp_dispatch import (
    Documents,
    PlanConfig,
    context_parallel_attention,
    plan_attention,
)
from jax_cp_dispatch.masks import Causal, Chunked

W, T = 4, 64
CONFIG = PlanConfig(8, 72, 128, max_q_transfers=16, max_kv_transfers=16, max_pieces=64)
MADE_FOR_ANOTHER = "the plan was made for another batch"


def draw(num_batches=1):
    """Returns queries, keys and values, then segment ids and positions of several batches."""
    rng = np.random.default_rng()
    qkv = [rng.normal(size=(2, T, n, 8)).astype(np.float32) for n in (2, 1, 1)]
    batches = [pack(rng, 2, T, max_length=20) for _ in range(num_batches)]
    return qkv, *batches


def make_plan(segment_ids, positions=None):
    return plan_attention(segment_ids, positions, world_size=W, config=CONFIG)


@partial(jax.jit, static_argnames="implementation")
def attend(qkv, plan, segment_ids, positions=None, implementation=None):
    return context_parallel_attention(
        *qkv,
        mesh=mesh_of(W),
        axis_name=AXIS,
        algorithm="balanced",
        documents=Documents(segment_ids, positions).with_plan(plan),
        implementation=implementation,
    )


def test_the_batch_of_the_plan_is_accepted():
    qkv, (segment_ids, positions) = draw()
    right = attend(qkv, make_plan(segment_ids), segment_ids)
    plan = make_plan(segment_ids, positions)
    for documents in ((segment_ids, positions), (segment_ids, None)):
        np.testing.assert_array_equal(attend(qkv, plan, *documents), right)


def lengths_of(segment_ids):
    """The documents of rows without padding between them."""
    return [np.bincount(row)[1:].tolist() for row in segment_ids]


@pytest.mark.parametrize("made", ["ids", "lengths", "ids and positions", "traced"])
def test_positions_count_from_0_and_those_of_padding_do_not_count(made):
    """Whatever positions the loader gives to padding, in the middle of a rank's columns too."""
    qkv, (segment_ids, positions) = draw()
    rng = np.random.default_rng()
    if made == "lengths":
        ends = np.array([[T - 9], [T - 30]])
        segment_ids = np.where(np.arange(T) < ends, np.cumsum(rng.random((2, T)) < 0.1, 1) + 1, 0)
        first = np.argmax(segment_ids[:, None] == segment_ids[..., None], axis=-1)
        segment_ids, positions = (x.astype(np.int32) for x in (segment_ids, np.arange(T) - first))
    is_padding = segment_ids == 0
    others = [positions + is_padding * rng.integers(-9, 99, positions.shape) for _ in range(3)]
    # Positions that continue over padding, as those of the document before or after it would.
    others.append(np.where(is_padding, np.roll(positions, 1, 1) + 1, positions))
    others.append(np.where(is_padding, np.roll(positions, -1, 1) - 1, positions))
    if made == "ids":
        plan = make_plan(segment_ids)
    elif made == "lengths":
        plan = plan_attention(
            lengths=lengths_of(segment_ids), columns=T, world_size=W, config=CONFIG
        )
    elif made == "traced":
        plan = jax.jit(make_plan)(segment_ids)
    else:
        plan = make_plan(segment_ids, others[0])
    right = attend(qkv, plan, segment_ids)
    for places in others:
        plan.validate(segment_ids, places)
        np.testing.assert_array_equal(attend(qkv, plan, segment_ids, places), right)
    shifted = positions + (segment_ids == segment_ids.max())
    with pytest.raises(ValueError, match="the positions of rank"):
        plan.validate(segment_ids, shifted)
    all_fail(attend(qkv, plan, segment_ids, shifted), "the positions of rank")


def test_another_batch_fails_on_all_ranks():
    """For example, a loader that is one batch ahead, or a single token that differs."""
    qkv, (ours, _), (others, _) = draw(2)
    all_fail(attend(qkv, make_plan(ours), others), MADE_FOR_ANOTHER + ": the segment ids of rank")
    rank = int(np.random.default_rng().integers(W))
    column = rank * T // W + int(np.random.default_rng().integers(T // W))
    changed = ours.copy()
    changed[1, column] = ours.max() + 1
    all_fail(attend(qkv, make_plan(ours), changed), f"the segment ids of rank {rank} have checksum")
    swapped = ours[::-1]
    all_fail(attend(qkv, make_plan(ours), swapped), MADE_FOR_ANOTHER)
    np.asarray(attend(qkv, make_plan(ours), ours))  # the next call is fine


def test_other_positions_fail_on_all_ranks():
    qkv, (segment_ids, positions) = draw()
    plan = make_plan(segment_ids, positions)
    all_fail(attend(qkv, plan, segment_ids, positions + 1), "the positions of rank 0 have checksum")
    plan = make_plan(segment_ids)
    all_fail(attend(qkv, plan, segment_ids, positions + 1), "the positions of rank 0 have checksum")


def test_by_xla_another_batch_is_nan():
    qkv, (ours, _), (others, _) = draw(2)
    plan = make_plan(ours)
    assert np.isfinite(attend(qkv, plan, ours, implementation="xla")).all()
    assert np.isnan(attend(qkv, plan, others, implementation="xla")).all()


def test_plans_made_inside_the_program():
    """On each rank, of segment ids of another dtype."""
    qkv, (ours, _), (others, _) = draw(2)

    def local(q, k, v, planned, documents):
        whole = jax.lax.all_gather(planned, AXIS, axis=1, tiled=True)
        documents = documents.with_plan(make_plan(whole))
        return context_parallel_attention(
            q, k, v, algorithm="balanced", axis_name=AXIS, documents=documents
        )

    @jax.jit
    def step(q, k, v, planned, segment_ids):
        documents, rows = Documents(segment_ids), P(None, AXIS)
        specs = (*[rows] * 4, documents.specs(AXIS))
        run = jax.shard_map(local, mesh=mesh_of(W), in_specs=specs, out_specs=rows)
        return run(q, k, v, planned, documents)

    planned = ours.astype(np.int8)
    right = attend(qkv, make_plan(ours), ours)
    np.testing.assert_allclose(step(*qkv, planned, ours), right, rtol=1e-5, atol=1e-6)
    all_fail(step(*qkv, planned, others), MADE_FOR_ANOTHER)


def test_ids_beyond_32_bits_match_the_plan():
    qkv, (segment_ids, _) = draw()
    hashed = np.random.default_rng().permutation(np.arange(1, segment_ids.max() + 1) << 40)
    wide = np.array([0, *hashed])[segment_ids]
    plan = make_plan(wide)
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "algorithm": "balanced"}

    def run(ids):
        documents = Documents(ids).with_plan(plan)
        return context_parallel_attention(*qkv, documents=documents, **options)

    right = run(wide)
    plan.validate(wide)
    with jax.enable_x64(True):
        traced = jax.jit(run)(jnp.asarray(wide))
    np.testing.assert_allclose(traced, right, rtol=1e-5, atol=1e-6)
    all_fail(run(segment_ids), MADE_FOR_ANOTHER)


@pytest.mark.parametrize("mask", [None, Chunked(3)])
def test_ranks_that_follow_plans_of_different_batches(mask):
    """Also plans of one batch with different masks."""
    qkv, (ids, _), (others, _) = draw(2)
    others = ids if mask else others
    others = plan_attention(others, world_size=W, mask=mask, config=CONFIG)
    others = dataclasses.replace(others, mask=Causal())
    ours = make_plan(ids)

    def mixed(mine, theirs):
        mine = np.array(mine)
        mine[2] = theirs[2]
        return mine

    out = attend(qkv, jax.tree.map(mixed, ours, others), ids)
    all_fail(out, "rank 2 follows the plan with checksum .* but rank 0 follows another one")


def test_validate_on_the_host():
    _, (ours, places), (others, _) = draw(2)
    plan = make_plan(ours, places)
    plan.validate(ours)
    plan.validate(ours.astype(np.int64), places)
    plan.validate(jnp.asarray(ours), jnp.asarray(places))
    with pytest.raises(ValueError, match="the segment_ids of rank"):
        plan.validate(others)
    with pytest.raises(ValueError, match="the positions of rank 0 are not those of the plan"):
        plan.validate(ours, places + 1)
    message = "segment_ids has shape (2, 32) but the plan is for 4 ranks of 32 rows"
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.validate(ours[:, :32])
