"""A run of batches with other document lengths, and some that do not fit, in one program."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from calls import check_qkv, draw_qkv, with_gradients
from on_mesh import AXIS, mesh_of, permuted_mesh
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
    rng, sizes = np.random.default_rng(0), {"world_size": 4, "columns": 512}
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
def test_refusals(algorithm, fallback, message):
    with pytest.raises(ValueError, match=message):
        documents_of(algorithm, [64], world_size=2, fallback=fallback)
