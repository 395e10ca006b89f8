"""A plan knows its batch, its rank and itself: others fail on all ranks, or give NaN by XLA.

`balanced` follows a plan of tokens in order, `placed` that of a placement.
"""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_mask import any_mask
from hypothesis import given, strategies as st
from on_mesh import AXIS, all_fail, mesh_of
from packed_batches import pack
from properties import examples

import jax_cp_dispatch as cp
from jax_cp_dispatch.masks import Causal, Chunked, SlidingWindow

W, T = 4, 64
MADE_FOR_ANOTHER = "the plan was made for another batch"
ANOTHER_PLAN = "rank 2 follows the plan with checksum .* but rank 0 follows another one"
SIZES: dict[str, dict[str, Any]] = {
    "balanced": {
        **{"q_capacity": 72, "kv_capacity": 128, "max_q_transfers": 16, "max_kv_transfers": 16},
        "max_pieces": 64,
    },
    "placed": {
        **{"kv_capacity": 128, "max_kv_transfers": 32, "max_pieces": 32, "max_cut_pieces": 32},
        "max_linked_pieces": 99,
    },
}
PLACED = cp.place_tokens([[1]], world_size=1).documents.order
each_kind = pytest.mark.parametrize("kind", SIZES)


def draw(num_batches=1) -> Any:
    """Returns queries, keys and values, then segment ids and positions of several batches."""
    rng = np.random.default_rng()
    qkv = [rng.normal(size=(2, T, n, 8)).astype(np.float32) for n in (2, 1, 1)]
    return qkv, *(pack(rng, 2, T, max_length=20) for _ in range(num_batches))


def make(kind, segment_ids, positions=None, mask=None, rank=None, **choices):
    """Returns a plan, and what puts arrays into its order."""
    options: Any = {"world_size": W, "mask": mask, "rank": rank}
    options["config"] = cp.PlanConfig(**SIZES[kind], **choices)
    if kind == "balanced":
        return cp.plan_attention(segment_ids, positions, **options), lambda x: x
    placement = cp.place_tokens(segment_ids=segment_ids, positions=positions, **options)
    return placement.plan, placement.apply


@partial(jax.jit, static_argnames=("kind", "implementation"))
def attend(qkv, plan, segment_ids, positions=None, *, kind, implementation=None):
    """Of arrays in the order of the plan, whether or not a placement made them."""
    if kind == "balanced":
        documents = cp.Documents(segment_ids, positions).with_plan(plan)
    else:
        documents = cp.Documents.in_order(segment_ids, positions, (plan,), order=PLACED, columns=T)
    return cp.context_parallel_attention(
        *qkv, mesh=mesh_of(W), axis_name=AXIS, algorithm=kind, documents=documents,
        implementation=implementation,
    )  # fmt: skip


@each_kind
def test_the_batch_of_the_plan_is_taken_and_another_fails_on_all_ranks(kind):
    """For example, a loader that is one batch ahead, or a single token that differs."""
    qkv, (ours, positions), (others, _) = draw(2)
    plan, order = make(kind, ours)
    ids, places = order((ours, positions))
    run = partial(attend, qkv, plan, kind=kind)
    right = run(ids)
    for documents in ((ids, places), (ids, places + (ids == 0))):
        np.testing.assert_array_equal(run(*documents), right)
    all_fail(run(order(others)), MADE_FOR_ANOTHER + ": the segment ids of rank")
    rank, changed = 2, np.array(ids)
    changed[1, rank * T // W + 5] = ours.max() + 1
    all_fail(run(changed), f"the segment ids of rank {rank} have checksum")
    all_fail(run(ids, places + 1), "the positions of rank 0 have checksum")
    unlike = ours[::-1] if kind == "balanced" else ours  # rows swapped; as it was before
    all_fail(run(unlike), MADE_FOR_ANOTHER)
    np.testing.assert_array_equal(run(ids), right)  # the next call is fine


@partial(jax.jit, static_argnames="kind")
def attend_by_xla(qkv, plan, segment_ids, *, kind):
    """Returns the output, and gradients with respect to the queries, keys and values."""
    run = partial(attend, plan=plan, segment_ids=segment_ids, kind=kind, implementation="xla")
    out, pull = jax.vjp(run, qkv)
    return out, *pull(jnp.ones_like(out))[0]


@each_kind
def test_by_xla_another_batch_is_nan_also_in_gradients(kind):
    qkv, (ours, _), (others, _) = draw(2)
    plan, order = make(kind, ours)
    ids, wrong = order(ours), order(others)
    assert all(np.isfinite(x).all() for x in attend_by_xla(qkv, plan, ids, kind=kind))
    for x in attend_by_xla(qkv, plan, wrong, kind=kind):
        assert np.isnan(np.asarray(x)[ids > 0]).all()


def plan_ids(segment_ids, positions, mask=None):
    config = cp.PlanConfig(8, **SIZES["balanced"])
    return cp.plan_attention(segment_ids, positions, world_size=W, mask=mask, config=config)


plan_inside = jax.jit(plan_ids, static_argnames="mask")


@pytest.mark.parametrize("made", ["ids", "ids and positions", "traced"])
def test_positions_count_from_0_and_those_of_padding_do_not_count(made):
    """Whatever positions the loader gives to padding, in the middle of a rank's columns too."""
    qkv, (segment_ids, positions) = draw()
    rng = np.random.default_rng()
    is_padding = segment_ids == 0
    others = [positions + is_padding * rng.integers(-9, 99, positions.shape) for _ in range(3)]
    # Positions that continue over padding, as those of the document before or after it would.
    others.append(np.where(is_padding, np.roll(positions, 1, 1) + 1, positions))
    others.append(np.where(is_padding, np.roll(positions, -1, 1) - 1, positions))
    run = plan_inside if made == "traced" else plan_ids
    plan = run(segment_ids, others[0] if made == "ids and positions" else None)
    for places in others:
        plan.validate(segment_ids, places)
    plan.validate(jnp.asarray(segment_ids), jnp.asarray(others[0]))
    shifted = positions + (segment_ids == segment_ids.max())
    with pytest.raises(ValueError, match="the positions of rank"):
        plan.validate(segment_ids, shifted)
    message = "segment_ids has shape (2, 32) but the plan is for 4 ranks of 32 rows"
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.validate(segment_ids[:, :32])
    on_devices = partial(attend, qkv, plan, segment_ids, kind="balanced")
    right = on_devices(positions)
    for places in others:
        np.testing.assert_array_equal(on_devices(places), right)
    all_fail(on_devices(shifted), "the positions of rank")


@given(data=st.data())
@examples(8)
def test_the_fingerprint_of_a_placement_is_that_of_the_placed_arrays(data):
    """Worked out from pieces on the host, it is what the arrays say, in NumPy and on a device."""
    world_size, columns = data.draw(st.sampled_from([(1, 1), (2, 24), (3, 15), (6, 60)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    segment_ids, positions = pack(rng, 2, columns, max_length=columns)
    options: Any = {"world_size": world_size, "mask": data.draw(any_mask(columns))}
    given = data.draw(st.none() | st.just(positions + 5 * segment_ids))
    placement = cp.place_tokens(segment_ids=segment_ids, positions=given, **options)
    ids, places = placement.apply((segment_ids, positions if given is None else given))
    placement.plan.validate(ids, places)
    if world_size == 3:  # each shape is a program
        placement.plan.validate(jnp.asarray(ids), jnp.asarray(places))
    others = np.array(ids)
    others[rng.integers(2), rng.integers(columns)] += 1
    with pytest.raises(ValueError, match=MADE_FOR_ANOTHER + ": the segment_ids of rank"):
        placement.plan.validate(others)


# ---- Ranks that follow different plans.


@each_kind
@pytest.mark.parametrize(
    "choices",
    [
        {},  # another batch
        {"mask": Chunked(3)},
        {"balance_tolerance": 0.3},
        {"num_heads": 8, "backward": True},  # the plans of tokens in order send the same counts
        {"rank_speeds": (1.0, 1.5, 1.0, 1.0)},
    ],
    ids=str,
)
def test_ranks_that_follow_different_plans(kind, choices):
    qkv, (ids, _), (others, _) = draw(2)
    ours, order = make(kind, ids)
    theirs, _ = make(kind, ids if choices else others, **choices)
    theirs = dataclasses.replace(theirs, mask=Causal())
    mix = lambda mine, theirs: np.concatenate([mine[:2], theirs[2:3], mine[3:]])
    mixed = jax.tree.map(mix, ours, theirs)
    ids = order(ids)
    all_fail(attend(qkv, mixed, ids, kind=kind), ANOTHER_PLAN)
    assert np.isnan(np.asarray(attend_by_xla(qkv, mixed, ids, kind=kind)[0])[ids > 0]).all()


@each_kind
def test_parts_of_processes_in_another_order(kind):
    """Documents of equal length: each rank sends what another one expects."""
    qkv, _ = draw()
    ids = np.repeat([np.arange(1, 1 + W)] * 2, T // W, axis=1)
    whole, order = make(kind, ids)
    swapped = [whole.slice_of(rank) for rank in (1, 0, 2, 3)]
    swapped = jax.tree.map(lambda *x: np.concatenate(x), *swapped)
    all_fail(attend(qkv, swapped, order(ids), kind=kind), "this is the part of rank 1, on rank 0")
    assert np.isnan(attend_by_xla(qkv, swapped, order(ids), kind=kind)[0]).all()


def test_every_choice_and_the_mask_are_in_the_checksum():
    """Also inside a program, whose plan has no pieces to compare."""
    ids = np.repeat([np.arange(1, W + 1, dtype=np.int32)] * 2, T // W, axis=1)
    checksum = lambda plan: int(plan.fingerprint[0, 0])
    choices: list[dict[str, Any]] = [{}, {"backward": True}, {"balance_tolerance": 0.2}]
    choices += [{"block": 8}, {"rank_speeds": (1.0, 1.5, 1.0, 1.0)}]
    options: list[dict[str, Any]] = [{"config": cp.PlanConfig(**x)} for x in choices]
    options += [{"mask": x} for x in (SlidingWindow(3), SlidingWindow(4), Chunked(4), "full")]
    of_each = [checksum(cp.plan_attention(ids, world_size=W, **x)) for x in options]
    assert len(set(of_each)) == len(options)
    assert of_each == [checksum(cp.plan_attention(ids, world_size=W, **x)) for x in options]
    inside = [plan_inside(ids, None, mask) for mask in (None, SlidingWindow(3))]
    assert checksum(inside[0]) != checksum(inside[1])
    assert inside[0].fingerprint.shape == (W, 4)
    # The estimate of a sample changes no plan; a process may read its config as NumPy's numbers.
    same: Any = {0: {"expected_overflow": 0.1}, 2: {"balance_tolerance": np.float64(0.2)}}
    for number, config in same.items():
        plan = cp.plan_attention(ids, world_size=W, config=cp.PlanConfig(**config))
        assert checksum(plan) == of_each[number]
