"""`Documents`: positions, orders, plans, and what a program keeps of them."""

import copy
import dataclasses
import pickle
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from calls import check_qkv, draw_qkv
from jax.sharding import NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of, permuted_mesh
from packed_batches import pack

import jax_cp_dispatch as cpd
from jax_cp_dispatch import Documents
from jax_cp_dispatch.masks import Causal, PrefixLM, Ranges, SlidingWindow

W, B, T = 4, 2, 48


def drawn(seed=0):
    return pack(np.random.default_rng(seed), B, T, max_length=20)


def counted(segment_ids):
    """The position of each token in its run of one id, by a loop."""
    positions = np.zeros_like(segment_ids)
    for row, ids in zip(positions, segment_ids, strict=True):
        for t in range(1, T):
            row[t] = row[t - 1] + 1 if ids[t] == ids[t - 1] and ids[t] else 0
    return positions


@pytest.mark.parametrize("call", [Documents, jax.jit(Documents)], ids=["host", "traced"])
def test_positions_are_counted(call):
    segment_ids, _ = drawn()
    documents = call(segment_ids)
    np.testing.assert_array_equal(documents.positions, counted(segment_ids))
    np.testing.assert_array_equal(documents.segment_ids, segment_ids)


def test_zigzag_moves_ids_positions_arrays_and_masks():
    segment_ids, positions = drawn()
    mask = PrefixLM(np.ones((B, T), bool) & (positions < 2) & (segment_ids > 0))
    packed = Documents(segment_ids, positions, mask)
    documents: Any = packed.zigzag(W)
    half = T // (2 * W)
    blocks = np.arange(T).reshape(2 * W, half)
    order = np.concatenate([[blocks[r], blocks[-1 - r]] for r in range(W)]).reshape(-1)
    x = np.random.default_rng(1).normal(size=(B, T, 3))
    moved, moved_mask = documents.apply((x, mask))
    np.testing.assert_array_equal(moved, x[:, order])
    np.testing.assert_array_equal(moved_mask.prefix_end, mask.prefix_end[:, order])
    assert moved_mask.order == documents.order != mask.order
    np.testing.assert_array_equal(documents.segment_ids, segment_ids[:, order])
    np.testing.assert_array_equal(documents.positions, positions[:, order])
    np.testing.assert_array_equal(documents.mask.prefix_end, moved_mask.prefix_end)
    back, back_mask = documents.restore((moved, moved_mask))
    np.testing.assert_array_equal(back, x)
    assert back_mask.order == mask.order
    assert packed.zigzag(1).order == packed.order  # nothing moves over one rank


def test_a_placement_has_documents():
    segment_ids, positions = drawn()
    masks = [Causal(), SlidingWindow(5)]
    placement = cpd.place_tokens(
        segment_ids=segment_ids, positions=positions, world_size=W, masks=masks
    )
    documents = placement.documents
    np.testing.assert_array_equal(documents.segment_ids, placement.apply(segment_ids))
    live = placement.apply(segment_ids) > 0
    np.testing.assert_array_equal(documents.positions[live], placement.apply(positions)[live])
    assert [plan.mask for plan in documents.plans] == masks and bool(documents.fits)
    documents.plan.validate(documents.segment_ids, documents.positions)
    of_lengths = cpd.place_tokens([[20, 9], [30]], columns=T, world_size=W).documents
    of_lengths.plan.validate(of_lengths.segment_ids, of_lengths.positions)
    own = placement.slice_of(2).documents
    np.testing.assert_array_equal(own.segment_ids, np.split(documents.segment_ids, W, axis=1)[2])
    groups = cpd.place_tokens(segment_ids=segment_ids, world_size=W, num_groups=2)
    np.testing.assert_array_equal(groups.documents.segment_ids, groups.apply(segment_ids))


def test_programs_keep_the_order():
    """Through jit, scan over stacked documents, and shard_map by `specs`."""
    documents = Documents(*drawn()).zigzag(W)
    through = jax.jit(lambda x: x)(documents)
    assert through.order == documents.order and through.columns == T
    stacked = jax.tree.map(lambda *x: np.stack(x), documents, Documents(*drawn(1)).zigzag(W))
    order = lambda _, x: (None, x.segment_ids.sum() + (x.order == documents.order))
    _, sums = jax.lax.scan(order, None, stacked)
    np.testing.assert_array_equal(sums, stacked.segment_ids.sum((1, 2)) + 1)

    plans = cpd.place_tokens(segment_ids=drawn()[0], world_size=W).documents
    specs = plans.specs(AXIS)
    place = partial(NamedSharding, mesh_of(W))
    held = jax.device_put(plans, jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P)))

    def rank(x):
        assert x.order == plans.order and x.segment_ids.shape == (B, T // W)
        return x.segment_ids

    mapped = jax.shard_map(rank, mesh=mesh_of(W), in_specs=(specs,), out_specs=P(None, AXIS))
    np.testing.assert_array_equal(jax.jit(mapped)(held), plans.segment_ids)


def test_groups_of_a_sharded_batch_through_specs():
    """In `shard_map`, each group has one of stacked plans; attention and a layer take it."""
    *qkv, _, segment_ids = operands = draw_qkv(2, B, T)
    mesh = permuted_mesh((2, W), ("data", AXIS))
    moved = [cpd.plan_attention(x, world_size=W) for x in np.split(segment_ids, 2)]
    packed = Documents(segment_ids).with_plan(cpd.stack_plans(moved))
    placed = cpd.place_tokens(segment_ids=segment_ids, world_size=W, num_groups=2).documents
    shift = partial(cpd.sequence.shift, offset=1, axis_name=AXIS)

    def calls(qkv, packed, placed):
        options = {"axis_name": AXIS, "algorithm": "balanced"}
        out = cpd.context_parallel_attention(*qkv, documents=packed, **options)
        return out, shift(qkv[0], documents=placed)

    sharded = P("data", AXIS)
    specs = sharded, *(x.specs(AXIS, batch_axis="data") for x in (packed, placed))
    mapped = jax.shard_map(calls, mesh=mesh, in_specs=specs, out_specs=sharded)
    out, shifted = jax.jit(mapped)(tuple(qkv), packed, placed)
    check_qkv([out], operands)
    wanted = shift(qkv[0], documents=placed, mesh=mesh, batch_axis="data")
    np.testing.assert_array_equal(shifted, wanted)


PLAIN = Documents(*drawn())
ZIGZAG = PLAIN.zigzag(W)
PLACEMENT = cpd.place_tokens(segment_ids=drawn()[0], world_size=W)
PLAN = cpd.plan_attention(drawn()[0], world_size=W)
PREFIX = PrefixLM(np.zeros((B, T), bool))
RANGES: Any = Ranges(np.zeros((B, T), int), np.full((B, T), T))


@pytest.mark.parametrize("made", [ZIGZAG, PLACEMENT.documents, ZIGZAG.apply(RANGES)])
def test_copies_keep_the_order(made):
    for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert jax.tree.structure(copied) == jax.tree.structure(made)
    assert made.order != PLAIN.order


def test_replaced_fields_of_packed_documents():
    """Positions that were counted are counted again; other ones are not taken for these."""
    other = dataclasses.replace(Documents(drawn()[0]), segment_ids=drawn(1)[0], positions=None)
    np.testing.assert_array_equal(other.positions, counted(drawn(1)[0]))
    own = dataclasses.replace(other, positions=other.positions + 1, counted=False)
    np.testing.assert_array_equal(own.positions, other.positions + 1)
    assert other.counted and not dataclasses.replace(PLAIN, mask="full").counted
    assert dataclasses.replace(RANGES, k_end=RANGES.k_end - 1).order == PLAIN.order


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: ZIGZAG.zigzag(W), "tokens are in zigzag order of 4 ranks"),
        (lambda: PLAIN.zigzag(5), "48 tokens cannot be split over 5 ranks"),
        (lambda: PLAIN.zigzag(0), "num_ranks is 0; it needs to be at least 1"),
        (lambda: ZIGZAG.with_plan(PLAN), "this plan is for packed order"),
        (lambda: PLAIN.unplaced(), "tokens are in packed order. Call it on Placement.documents"),
        (lambda: PLACEMENT.documents.apply(PREFIX), "only the placement knows where. Call Plac"),
        (lambda: ZIGZAG.apply(np.zeros((B, T + 1))), r"shape \[2, 49\] but the documents"),
        (lambda: ZIGZAG.apply(ZIGZAG.apply(PREFIX)), "are in zigzag.*but the tokens in packed"),
        (lambda: ZIGZAG.restore(PREFIX), "are in packed order, but the tokens in zigzag"),
        (lambda: PLACEMENT.apply(ZIGZAG.apply(PREFIX)), "are in zigzag.*the tokens in packed"),
        (lambda: PLACEMENT.restore(PREFIX), "are in packed order, but the tokens in placed"),
        (lambda: Documents(np.array([[1, 2, 1]])), "segment 1 occurs in separate runs"),
        (lambda: Documents(np.array([[-1, 2]])), "it needs to be at least 0"),
        (lambda: Documents(*drawn(), mask="no"), "mask is 'no'; it needs to be"),
        (lambda: Documents(*drawn(), mask=ZIGZAG.apply(PREFIX)), "are in zigzag order"),
        (lambda: dataclasses.replace(Documents(drawn()[0]), positions=drawn()[0]), "counted=False"),
        (lambda: dataclasses.replace(ZIGZAG, mask=Causal()), "replace of one in zigzag order of 4"),
        (lambda: dataclasses.replace(PLACEMENT.documents), "Documents: .*replace of one in placed"),
        (lambda: dataclasses.replace(ZIGZAG.apply(RANGES)), "Ranges: .*replace of one in zigzag"),
    ],
)
def test_refusals(call, says):
    with pytest.raises((ValueError, TypeError), match=says):
        call()
