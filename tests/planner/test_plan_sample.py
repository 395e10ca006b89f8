"""Capacities from a sample of batches, and what plans and placements needed."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_cp_dispatch import (
    PlacementConfig,
    PlanConfig,
    fit_placement_config,
    fit_plan_config,
    place_tokens,
    plan_attention,
)

WORLD_SIZE, COLUMNS = 4, 2048
CAPACITIES = {
    PlacementConfig: (
        *("kv_capacity", "max_transfers", "max_pieces", "max_cut_pieces", "max_linked_pieces"),
    ),
    PlanConfig: (
        "q_capacity",
        "kv_capacity",
        "max_q_transfers",
        "max_kv_transfers",
        "max_pieces",
    ),
}
FIT = {PlacementConfig: fit_placement_config, PlanConfig: fit_plan_config}
KINDS = pytest.mark.parametrize("kind", CAPACITIES)


def draw(rng):
    """Lengths of one batch row, log-normal, the last one cut."""
    ends = rng.lognormal(4.5, 1.2, 200).astype(int).cumsum()
    return np.diff([0, *ends[ends < COLUMNS], COLUMNS]).tolist()


def plan_of(lengths, config):
    """Static sizes and needs of the plan of a batch, in the order of the capacities."""
    options = {"world_size": WORLD_SIZE, "columns": COLUMNS, "config": config}
    if isinstance(config, PlanConfig):
        plan = plan_attention(lengths=lengths, **options)
        slots = [x.seq_len.shape[1] for x in (plan.q_metadata, plan.kv_metadata)]
        sizes = [plan.q_capacity, plan.kv_capacity, *slots, plan.run_row.shape[1]]
        return sizes, [getattr(plan.needs, name) for name in CAPACITIES[PlanConfig]]
    plan = place_tokens(lengths, **options).plan
    sizes = [plan.kv_capacity, plan.kv_metadata.seq_len.shape[1], plan.run_row.shape[1]]
    sizes += [plan.max_cut_pieces, plan.cut_pieces.shape[1] - plan.max_cut_pieces]
    return sizes, [getattr(plan.needs, name) for name in CAPACITIES[PlacementConfig]]


def fits(batch, config):
    try:
        plan_of(batch, config)
    except ValueError as error:
        assert any(name in str(error) for name in CAPACITIES[type(config)])
        return False
    return True


@KINDS
def test_needs_are_the_least_capacities(kind):
    batch = draw(np.random.default_rng(0))
    _, needs = plan_of(batch, kind())
    smallest = kind(**dict(zip(CAPACITIES[kind], needs, strict=True)))
    assert plan_of(batch, smallest) == (needs, needs)
    for name, need in zip(CAPACITIES[kind], needs, strict=True):
        if not name.endswith("_capacity"):  # these are kept by another plan if possible
            with pytest.raises(ValueError, match=name):
                plan_of(batch, dataclasses.replace(smallest, **{name: need - 1}))


@KINDS
def test_fit_plan_config_and_fit_placement_config_keep_the_expected_rate(kind):
    rng = np.random.default_rng(1)
    sample = [draw(rng) for _ in range(60)]

    def config_for(overflow):
        config = FIT[kind](sample, world_size=WORLD_SIZE, columns=COLUMNS, overflow=overflow)
        assert config.expected_overflow is not None and config.kv_capacity is not None
        return config, config.expected_overflow

    config, expected = config_for(0.02)
    assert 0 < expected <= 0.02
    assert all(fits(batch, config) for batch in sample)
    rare, expected = config_for(1e-6)
    assert expected <= 1e-6
    assert all(getattr(rare, name) >= getattr(config, name) for name in CAPACITIES[kind])
    assert rare.kv_capacity <= 3 * WORLD_SIZE * COLUMNS
    rate = np.mean([not fits(draw(rng), config) for _ in range(150)])
    assert rate <= 0.05


@KINDS
def test_other_choices_and_given_capacities_are_kept(kind):
    rng = np.random.default_rng(2)
    ids = [np.repeat(np.arange(1, len(x) + 1), x)[None] for x in (draw(rng) for _ in range(5))]
    given = kind(balance_tolerance=0.2, max_pieces=99)
    config = FIT[kind](ids, world_size=WORLD_SIZE, config=given)
    assert (config.balance_tolerance, config.max_pieces) == (0.2, 99)
    assert all(getattr(config, name) is not None for name in CAPACITIES[kind])
    assert config == dataclasses.replace(config, expected_overflow=None)


@KINDS
@pytest.mark.parametrize(
    "batches, overflow, message",
    [([], 0.1, "batches is empty"), ([[4]], 0.0, "overflow is 0.0; it needs to be between")],
)
def test_refusals(kind, batches, overflow, message):
    with pytest.raises(ValueError, match=f"{FIT[kind].__name__}: {message}"):
        FIT[kind](batches, world_size=2, overflow=overflow)


@KINDS
def test_other_arguments_are_rejected(kind, unchecked_types):
    """An array of ids is one batch; its rows, taken as lengths, would give other capacities."""
    other: Any = PlanConfig if kind is PlacementConfig else PlacementConfig
    with pytest.raises(TypeError, match=rf"config is .*; it needs to be .*{kind.__name__}"):
        FIT[kind]([[4]], world_size=2, config=other())
    with pytest.raises(TypeError, match=r"array of shape \(1, 4\).*Pass \[segment_ids\]"):
        FIT[kind](np.ones((1, 4), int), world_size=2)
    ids = np.ones((3, 1, 4), int)
    assert FIT[kind](ids, world_size=2) == FIT[kind]([[4]] * 3, world_size=2)


@KINDS
def test_an_array_of_lengths_is_not_taken_for_ids(kind, unchecked_types):
    """`columns` goes with lengths, and a two-dimensional array is segment ids."""
    lengths = np.array([[700, 324], [500, 400]])
    options = {"world_size": 2, "columns": 1024}
    refused = r"batch 1 is an array of shape \(2, 2\), which means segment ids.*batch.tolist\(\)"
    for batches in ([[[1024], [1024]], lengths], [[[1024], [1024]], jnp.array(lengths)]):
        with pytest.raises(TypeError, match=f"{FIT[kind].__name__}: {refused}"):
            FIT[kind](batches, **options)
    of_lists = FIT[kind]([lengths.tolist()], **options)
    assert FIT[kind]([list(lengths)], **options) == of_lists
    assert of_lists.kv_capacity > 700


@KINDS
def test_capacities_are_no_larger_than_any_batch_needs(kind):
    """A rank receives each row of the batch once at most; no range and no piece is empty."""
    world_size, columns = 4, 64
    sample = [[[64], [7, 50]], [[1] * 64, [1] * 64]]
    options = {"world_size": world_size, "columns": columns, "overflow": 1e-9}
    config = FIT[kind](sample, **options)
    num_tokens = len(sample[0]) * columns
    most: dict[str, Any] = dict.fromkeys(CAPACITIES[kind], num_tokens)
    most["max_q_transfers" if kind is PlanConfig else "max_pieces"] = num_tokens // world_size
    assert all(getattr(config, name) <= most[name] for name in most)
    assert config.kv_capacity == num_tokens
    del most["kv_capacity"]
    alone = FIT[kind](sample, **options, config=kind(**most))
    assert (alone.kv_capacity, alone.expected_overflow) == (num_tokens, 0)  # every batch fits


@KINDS
def test_batches_of_different_shapes_warn(kind):
    with pytest.warns(UserWarning, match=r"a rank holds 2 to 5 tokens.*with lengths, columns="):
        FIT[kind]([[4], [10]], world_size=2)
