"""A placed plan knows the batch that was placed: another one fails on all ranks, or is NaN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_mask import any_mask
from hypothesis import given, strategies as st
from on_mesh import AXIS, all_fail, mesh_of
from packed_batches import pack
from properties import examples

from jax_cp_dispatch import Documents, PlanConfig, context_parallel_attention, place_tokens
from jax_cp_dispatch.documents.fingerprint import ID_STEP, POSITION_STEP, checksums
from jax_cp_dispatch.masks.mask import PLACED

W, T = 4, 64
CONFIG = PlanConfig(
    kv_capacity=128, max_kv_transfers=32, max_pieces=32, max_cut_pieces=32, max_linked_pieces=99
)
MADE_FOR_ANOTHER = "the plan was made for another batch"


def draw(num_batches=1):
    """Rows of queries, keys and values, then segment ids and positions of some batches."""
    rng = np.random.default_rng()
    qkv = [rng.normal(size=(2, T, n, 8)).astype(np.float32) for n in (2, 1, 1)]
    return qkv, *(pack(rng, 2, T, max_length=20) for _ in range(num_batches))


def place(segment_ids, positions=None, **options):
    return place_tokens(
        segment_ids=segment_ids, positions=positions, world_size=W, config=CONFIG, **options
    )


def stored(plan, segment_ids, positions=None):
    """Documents with these arrays, in the order of the plan or not."""
    return Documents.in_order(segment_ids, positions, (plan,), order=PLACED, columns=T)


@partial(jax.jit, static_argnames="implementation")
def attend(qkv, documents, implementation=None):
    return context_parallel_attention(
        *qkv,
        mesh=mesh_of(W),
        axis_name=AXIS,
        algorithm="placed",
        documents=documents,
        implementation=implementation,
    )


@given(data=st.data())
@examples(8)
def test_the_fingerprint_is_that_of_the_placed_arrays(data):
    """Worked out from pieces on the host, it is what the arrays say, in NumPy and on a device."""
    world_size, columns = data.draw(st.sampled_from([(1, 1), (2, 24), (3, 15), (6, 60)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    segment_ids, positions = pack(rng, 2, columns, max_length=columns)
    mask = data.draw(any_mask(columns))
    options = {"world_size": world_size, "mask": mask}
    given = data.draw(st.none() | st.just(positions + 5 * segment_ids))
    placement = place_tokens(segment_ids=segment_ids, positions=given, **options)
    seen = placement.apply((segment_ids, positions if given is None else given))
    placement.plan.validate(*seen)
    if world_size == 3:  # each shape is a program
        placement.plan.validate(jnp.asarray(seen[0]), jnp.asarray(seen[1]))
    ids, places = seen
    own = (
        checksums(ids, world_size, step=ID_STEP),
        checksums(places, world_size, step=POSITION_STEP, counts=ids > 0),
    )
    np.testing.assert_array_equal(placement.plan.fingerprint[:, 2:], np.stack(own, 1))
    others = np.array(ids)
    others[rng.integers(2), rng.integers(columns)] += 1
    with pytest.raises(ValueError, match=MADE_FOR_ANOTHER + ": the segment_ids of rank"):
        placement.plan.validate(others)


def test_lengths_number_the_documents_of_each_row():
    lengths = [[20, 0, 7, 30], [64]]
    segment_ids = np.zeros((2, T), np.int32)
    for row, sizes in enumerate(lengths):
        segment_ids[row, : sum(sizes)] = np.repeat(1 + np.arange(len(sizes)), sizes)
    placement = place_tokens(lengths, world_size=W, columns=T)
    placement.plan.validate(placement.apply(segment_ids))
    with pytest.raises(ValueError, match=MADE_FOR_ANOTHER):
        placement.plan.validate(segment_ids)


def test_the_placed_batch_is_taken_and_another_fails_on_all_ranks():
    qkv, (ours, positions), (others, _) = draw(2)
    placement = place(ours)
    ids, places = placement.apply((ours, positions))
    right = attend(qkv, placement.documents)
    of_plan = partial(stored, placement.plan)
    for documents in ((ids, None), (ids, places + (ids == 0)), (ids, places)):
        np.testing.assert_array_equal(attend(qkv, of_plan(*documents)), right)
    match = MADE_FOR_ANOTHER + ": the segment ids of rank"
    all_fail(attend(qkv, of_plan(placement.apply(others))), match)
    all_fail(attend(qkv, of_plan(ours)), match)  # as it was before
    all_fail(attend(qkv, of_plan(ids, places + 1)), "the positions of rank")
    np.asarray(attend(qkv, of_plan(ids)))  # the next call is fine


def test_ranks_that_follow_placements_of_different_batches():
    qkv, (ours, _), (others, _) = draw(2)
    mix = lambda mine, theirs: np.concatenate([mine[:2], theirs[2:3], mine[3:]])
    mine, theirs = place(ours).documents, place(others).documents
    plan = jax.tree.map(mix, mine.plan, theirs.plan)
    match = "rank 2 follows the plan with checksum .* but rank 0 follows another"
    all_fail(attend(qkv, stored(plan, mine.segment_ids)), match)


def test_by_xla_another_batch_is_nan_and_gradients_compare_too():
    qkv, (ours, _), (others, _) = draw(2)
    placement = place(ours)
    ids = placement.apply(ours)

    def loss(qkv, ids):
        return (attend(qkv, stored(placement.plan, ids), implementation="xla") ** 2).sum()

    run = jax.jit(jax.value_and_grad(loss))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run(qkv, ids)))
    wrong = placement.apply(others)
    out = attend(qkv, stored(placement.plan, wrong), implementation="xla")
    assert np.isnan(np.asarray(out)[ids > 0]).all()
    _, (dq, *_) = run(qkv, wrong)
    assert np.isnan(np.asarray(dq)[ids > 0]).all()
