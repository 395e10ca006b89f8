"""A run of batches with other document lengths, and some that do not fit, in one program."""

import dataclasses
import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from calls import check_qkv, draw_qkv
from on_mesh import AXIS, mesh_of, permuted_mesh

from jax_cp_dispatch import (
    Documents,
    PlanConfig,
    context_parallel_attention,
    fit_plan_config,
    place_tokens,
    plan_attention,
    stack_plans,
)

WORLD_SIZE, COLUMNS, SCALE = 4, 512, 512
LENGTHS = Path(__file__).parents[1] / "data" / "packed"


def batches(num):
    """Lengths of one row each, drawn from published ones, 1/512 as long."""
    known = [
        max(length // SCALE, 1)
        for path in sorted(LENGTHS.glob("*.json"))
        for batch in json.loads(path.read_text())
        for length in batch["lengths"]
    ]
    draw = random.Random(0).choice
    for _ in range(num):
        row, left = [], COLUMNS
        while left > 0:
            row.append(min(draw(known), left))
            left -= row[-1]
        yield row


def ids_of(*rows):
    """Returns segment ids of rows of document lengths."""
    return np.stack([np.repeat(np.arange(1, len(x) + 1, dtype=np.int32), x) for x in rows])


class Placed:
    """Tokens are placed."""

    for_ring = Documents.unplaced

    def __init__(self, lengths, **options):
        self.documents = place_tokens(lengths, **options).documents


class Balanced:
    """Queries move."""

    for_ring = staticmethod(lambda documents: documents)

    def __init__(self, lengths, **options):
        plan = plan_attention(lengths=lengths, **options)
        self.documents = Documents(ids_of(lengths)).with_plan(plan)


def sent(made):
    """The most ranges of keys that a rank sends."""
    return int(made.documents.plan.kv_metadata.num_seqs.max())


def branches(kind, documents, **options):
    """Returns attention by the plan, and by a ring, if the plan does not fit."""
    call = partial(context_parallel_attention, axis_name=AXIS, **options)
    planned = partial(call, algorithm=kind.__name__.lower(), documents=documents)
    return planned, partial(call, algorithm="ring", documents=kind.for_ring(documents))


def test_many_batches_compile_once():
    """Output and gradients of both branches, by one program, against dense attention."""
    mesh = mesh_of(WORLD_SIZE)
    sizes: dict[str, Any] = {"world_size": WORLD_SIZE, "columns": COLUMNS}
    sample = list(batches(15))
    config = fit_plan_config(sample, overflow=0.2, **sizes)
    # Less than the sample needs, so that some batches do not fit.
    needs = [sent(Balanced(x, **sizes)) for x in sample]
    config = dataclasses.replace(config, max_kv_transfers=int(np.quantile(needs, 0.8)))
    compiled = []

    @jax.jit
    def step(q, k, v, g, documents):
        compiled.append(1)  # runs only while JAX traces
        planned, ring = branches(Balanced, documents, mesh=mesh)
        out, pull_back = jax.vjp(partial(jax.lax.cond, documents.fits, planned, ring), q, k, v)
        return out, *pull_back(g)

    *arrays, _ = draw_qkv(1, 1, COLUMNS, heads=(2, 1))
    seen = {True: 0, False: 0}
    for lengths in sample:
        made = Balanced(lengths, **sizes, config=config, fallback="ring")
        results = step(*arrays, made.documents)
        fits = bool(made.documents.fits)
        seen[fits] += 1
        if seen[fits] <= 2:
            check_qkv(results, (*arrays, ids_of(lengths)))
    assert 7 < seen[True] < 15
    assert len(compiled) == 1
    assert step._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_groups_of_rows_fall_back_together():
    """A ring cannot read the tokens of a group that was placed: of one document, nothing shows."""
    mesh, columns = permuted_mesh((2, 2), ("data", AXIS)), 64
    config = PlanConfig(
        kv_capacity=64, max_kv_transfers=8, max_pieces=20, max_cut_pieces=8, max_linked_pieces=99
    )

    @jax.jit
    def step(q, k, v, documents):
        planned, ring = branches(Placed, documents, mesh=mesh, batch_axis="data")
        return jax.lax.cond(documents.fits, planned, ring, q, k, v)

    rng = np.random.default_rng(2)
    arrays = [rng.normal(size=(2, columns, 1, 4)).astype(np.float32) for _ in range(3)]
    for lengths, fits in (([[64], [1] * 64], False), ([[64], [60, 4]], True)):
        options = {"world_size": 2, "columns": columns, "config": config, "fallback": "ring"}
        placement = place_tokens(lengths, num_groups=2, **options)
        documents = placement.documents
        assert bool(documents.fits) == fits
        assert fits or "group 1 of 2" in str(placement.reason)
        out = placement.restore(np.asarray(step(*placement.apply(arrays), documents)))
        check_qkv([out], (*arrays, arrays[0], ids_of(*lengths)))
        apart = stack_plans([place_tokens([row], **options).plan for row in lengths])
        other = Documents.in_order(
            documents.segment_ids,
            documents.positions,
            (apart,),
            order=documents.order,
            columns=columns,
        )
        if not fits:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"a fallback|for another batch"):
                jax.block_until_ready(step(*arrays, other))
    assert step._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_placement_that_does_not_fit_is_not_computed():
    config = PlanConfig(
        kv_capacity=40, max_kv_transfers=8, max_pieces=8, max_cut_pieces=8, max_linked_pieces=99
    )
    placement = place_tokens([[64]], world_size=2, config=config, fallback="ring")
    assert not placement.plan.fits
    assert placement.reason is not None and "kv_capacity>=64" in placement.reason
    assert np.array_equal(placement.permutation, np.arange(64))
    half = 32 * 33 / 2
    np.testing.assert_allclose(placement.plan.pairs, [half, half + 32 * 32])
    with pytest.raises(ValueError, match="kv_capacity>=64"):
        _ = placement.needs
    all_ranks_fail("placed", placement.documents, "64 tokens but PlanConfig.kv_capacity is 40")


def test_a_plan_that_does_not_fit_is_not_computed():
    config = PlanConfig(1, 64, 40, 8, 8, 8)
    plan = plan_attention(lengths=[64], world_size=2, config=config, fallback="ring")
    assert not plan.fits
    assert plan.needs.kv_capacity == 64 and "kv_capacity 40: it needs 64" in plan.describe()
    half = 32 * 33 / 2
    np.testing.assert_allclose(plan.pairs_before, [half, half + 32 * 32])
    np.testing.assert_allclose(plan.pairs, plan.pairs_before)
    part = plan_attention(lengths=[64], world_size=2, config=config, fallback="ring", rank=1)
    jax.tree.map(np.testing.assert_array_equal, part, plan.slice_of(1))
    with pytest.raises(ValueError, match="kv_capacity>=64"):
        plan_attention(lengths=[64], world_size=2, config=config)
    documents = Documents(ids_of([64])).with_plan(plan)
    all_ranks_fail("balanced", documents, "64 tokens but PlanConfig.kv_capacity is 40")


def all_ranks_fail(algorithm, documents, needs):
    """The error says that the plan is a fallback, and what the batch needs."""
    q = np.zeros((1, 64, 1, 4), np.float32)
    options = {
        "mesh": mesh_of(2),
        "axis_name": AXIS,
        "algorithm": algorithm,
        "documents": documents,
    }
    attend = partial(context_parallel_attention, q, q, q, **options)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"the plan is a fallback: .*{needs}"):
        jax.block_until_ready(attend())
    if algorithm == "placed":  # both give NaN in the same way
        assert np.isnan(attend(implementation="xla")).all()
    with pytest.raises(ValueError, match="this plan is a fallback"):
        documents.plan.validate(np.ones((1, 64), np.int32))


PLACED_CONFIG = PlanConfig(
    kv_capacity=512, max_kv_transfers=1, max_pieces=64, max_cut_pieces=64, max_linked_pieces=64
)
MOVED_CONFIG = PlanConfig(
    q_capacity=512, kv_capacity=512, max_q_transfers=1, max_kv_transfers=64, max_pieces=64
)


@pytest.mark.parametrize("kind, config", [(Placed, PLACED_CONFIG), (Balanced, MOVED_CONFIG)])
def test_a_fallback_whose_rows_fit_fails_too(kind, config):
    """The error refers to `describe`, which names what exceeds a limit."""
    lengths = [90, 7, 31, 60, 60, 8]
    documents = kind(lengths, world_size=2, config=config, fallback="ring").documents
    assert re.search(r"max_(q_|kv_)transfers 1: it needs \d", documents.plan.describe())
    q = np.zeros((1, 256, 1, 4), np.float32)
    planned, _ = branches(kind, documents, mesh=mesh_of(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"fallback.*`describe` says what"):
        jax.block_until_ready(planned(q, q, q))


@pytest.mark.parametrize(
    "fallback, message",
    [
        ("dense", "fallback is 'dense'; it needs to be 'ring' or None"),
        ("ring", r"config has no .*kv_capacity, max_.*. Pass a config .* from fit_"),
    ],
)
def test_refusals(fallback, message):
    with pytest.raises(ValueError, match=message):
        place_tokens([[64]], world_size=2, fallback=fallback)
    with pytest.raises(ValueError, match=message):
        plan_attention(lengths=[64], world_size=2, fallback=fallback)
