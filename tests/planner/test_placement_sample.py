"""Capacities from a sample of batches, and what a placement needed."""

import dataclasses

import numpy as np
import pytest

from jax_cp_dispatch import PlacementConfig, place_tokens

WORLD_SIZE, COLUMNS = 4, 2048
CAPACITIES = ("kv_capacity", "max_transfers", "max_pieces")


def draw(rng):
    """Lengths of one batch row, log-normal, the last one cut."""
    ends = rng.lognormal(4.5, 1.2, 200).astype(int).cumsum()
    return np.diff([0, *ends[ends < COLUMNS], COLUMNS]).tolist()


def fits(batch, config):
    try:
        place_tokens(batch, world_size=WORLD_SIZE, columns=COLUMNS, config=config)
    except ValueError as error:
        assert any(name in str(error) for name in CAPACITIES)
        return False
    return True


def test_needs_are_the_least_capacities():
    batch = draw(np.random.default_rng(0))
    placement = place_tokens(batch, world_size=WORLD_SIZE)
    needs = placement.needs
    again = place_tokens(batch, world_size=WORLD_SIZE, config=needs)
    assert np.array_equal(again.permutation, placement.permutation)
    sizes = [again.plan.kv_capacity, again.plan.kv_metadata.seq_len.shape[1]]
    assert [*sizes, again.plan.run_row.shape[1]] == [getattr(needs, name) for name in CAPACITIES]
    for name in CAPACITIES[1:]:
        less = dataclasses.replace(needs, **{name: getattr(needs, name) - 1})
        with pytest.raises(ValueError, match=name):
            place_tokens(batch, world_size=WORLD_SIZE, config=less)


def test_the_expected_rate_does_not_fit():
    rng = np.random.default_rng(1)
    sample = [draw(rng) for _ in range(100)]

    def config_for(overflow):
        config = PlacementConfig.from_sample(
            sample, world_size=WORLD_SIZE, columns=COLUMNS, overflow=overflow
        )
        assert config.expected_overflow is not None and config.kv_capacity is not None
        return config, config.expected_overflow

    config, expected = config_for(0.02)
    assert 0 < expected <= 0.02
    assert all(fits(batch, config) for batch in sample)
    rare, expected = config_for(1e-6)
    assert expected <= 1e-6
    assert all(getattr(rare, name) >= getattr(config, name) for name in CAPACITIES)
    assert (rare.kv_capacity or 0) <= 3 * WORLD_SIZE * COLUMNS
    rate = np.mean([not fits(draw(rng), config) for _ in range(300)])
    assert rate <= 0.05


def test_constraints_and_given_capacities_are_kept():
    rng = np.random.default_rng(2)
    ids = [np.repeat(np.arange(1, len(x) + 1), x)[None] for x in (draw(rng) for _ in range(5))]
    given = PlacementConfig(min_piece=8, max_pieces=99)
    config = PlacementConfig.from_sample(ids, world_size=WORLD_SIZE, config=given)
    assert (config.min_piece, config.max_pieces) == (8, 99)
    assert config.kv_capacity is not None and config.max_transfers is not None
    assert config == dataclasses.replace(config, expected_overflow=None)


@pytest.mark.parametrize(
    "batches, overflow, message",
    [([], 0.1, "there are no batches"), ([[4]], 0.0, "overflow is 0.0 but must be between")],
)
def test_refusals(batches, overflow, message):
    with pytest.raises(ValueError, match=message):
        PlacementConfig.from_sample(batches, world_size=2, overflow=overflow)
