"""Capacities from a sample of batches, and what plans and placements needed."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_cp_dispatch import PlanConfig, fit_plan_config, place_tokens, plan_attention

WORLD_SIZE, COLUMNS = 4, 2048
CAPACITIES = {
    False: ("q_capacity", "kv_capacity", "max_q_transfers", "max_kv_transfers", "max_pieces"),
    True: (
        *("kv_capacity", "max_kv_transfers", "max_pieces"),
        *("max_cut_pieces", "max_linked_pieces"),
    ),
}
KINDS = pytest.mark.parametrize("placed", [False, True], ids=["moved", "placed"])


def draw(rng):
    """Lengths of one batch row, log-normal, the last one cut."""
    ends = rng.lognormal(4.5, 1.2, 200).astype(int).cumsum()
    return np.diff([0, *ends[ends < COLUMNS], COLUMNS]).tolist()


def plan_of(lengths, placed, config):
    """Static sizes and needs of the plan of a batch, in the order of the capacities."""
    options = {"world_size": WORLD_SIZE, "columns": COLUMNS, "config": config}
    made: Any = (place_tokens if placed else plan_attention)(lengths=lengths, **options)
    plan: Any = made.plan if placed else made
    sizes = [plan.kv_capacity, plan.kv_metadata.seq_len.shape[1], plan.run_row.shape[1]]
    if placed:
        sizes += [plan.max_cut_pieces, plan.cut_pieces.shape[1] - plan.max_cut_pieces]
    else:
        sizes = [plan.q_capacity, sizes[0], plan.q_metadata.seq_len.shape[1], *sizes[1:]]
    assert list(plan.capacities.values()) == sizes
    return sizes, [getattr(plan.needs, name) for name in CAPACITIES[placed]]


def fits(batch, placed, config):
    try:
        plan_of(batch, placed, config)
    except ValueError as error:
        assert any(name in str(error) for name in CAPACITIES[placed])
        return False
    return True


@KINDS
def test_needs_are_the_least_capacities(placed):
    batch = draw(np.random.default_rng(0))
    _, needs = plan_of(batch, placed, PlanConfig())
    sizes: dict[str, Any] = dict(zip(CAPACITIES[placed], needs, strict=True))
    smallest = PlanConfig(**sizes)
    assert plan_of(batch, placed, smallest) == (needs, needs)
    for name, need in sizes.items():
        if not name.endswith("_capacity"):  # these are kept by another plan if possible
            with pytest.raises(ValueError, match=name):
                plan_of(batch, placed, dataclasses.replace(smallest, **{name: need - 1}))


@KINDS
def test_the_expected_rate_is_kept(placed):
    rng = np.random.default_rng(1)
    sample = [draw(rng) for _ in range(40)]

    def config_for(overflow):
        sizes: Any = {"world_size": WORLD_SIZE, "columns": COLUMNS}
        config = fit_plan_config(sample, placed=placed, overflow=overflow, **sizes)
        assert config.expected_overflow is not None and config.kv_capacity is not None
        return config, config.expected_overflow

    config, expected = config_for(0.02)
    assert 0 < expected <= 0.02
    assert all(fits(batch, placed, config) for batch in sample)
    rare, expected = config_for(1e-6)
    assert expected <= 1e-6
    assert all(getattr(rare, name) >= getattr(config, name) for name in CAPACITIES[placed])
    assert (rare.kv_capacity or 0) <= 3 * WORLD_SIZE * COLUMNS
    rate = np.mean([not fits(draw(rng), placed, config) for _ in range(40)])
    assert rate <= 0.05


@KINDS
def test_other_choices_and_given_capacities_are_kept(placed):
    """Also from arrays: of ids, and of lengths in lists."""
    rng = np.random.default_rng(2)
    lengths = [draw(rng) for _ in range(5)]
    ids = [np.repeat(np.arange(1, len(x) + 1), x)[None] for x in lengths]
    given = PlanConfig(balance_tolerance=0.2, max_pieces=99)
    options = {"placed": placed, "world_size": WORLD_SIZE, "config": given}
    config = fit_plan_config(ids, **options)
    assert (config.balance_tolerance, config.max_pieces) == (0.2, 99)
    assert all(getattr(config, name) is not None for name in CAPACITIES[placed])
    assert config == dataclasses.replace(config, expected_overflow=None)
    for batches in (np.stack(ids[:1]), lengths[:1], [[np.array(lengths[0])]]):
        assert fit_plan_config(batches, **options) == fit_plan_config(ids[:1], **options)


@KINDS
def test_capacities_are_no_larger_than_any_batch_needs(placed):
    """A rank receives each row of the batch once at most; no range and no piece is empty."""
    world_size, columns = 4, 64
    sample = [[[64], [7, 50]], [[1] * 64, [1] * 64]]
    options = {"world_size": world_size, "columns": columns, "overflow": 1e-9, "placed": placed}
    config = fit_plan_config(sample, **options)
    num_tokens = len(sample[0]) * columns
    most: dict[str, Any] = dict.fromkeys(CAPACITIES[placed], num_tokens)
    most["max_pieces" if placed else "max_q_transfers"] = num_tokens // world_size
    assert all(getattr(config, name) <= most[name] for name in most)
    assert config.kv_capacity == num_tokens
    del most["kv_capacity"]
    alone = fit_plan_config(sample, **options, config=PlanConfig(**most))
    assert (alone.kv_capacity, alone.expected_overflow) == (num_tokens, 0)  # every batch fits


@KINDS
def test_batches_of_different_shapes_warn(placed):
    with pytest.warns(UserWarning, match=r"a rank holds 2 to 5 tokens.*with lengths, columns="):
        fit_plan_config([[4], [10]], placed=placed, world_size=2)
