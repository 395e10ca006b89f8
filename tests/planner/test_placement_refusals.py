"""Calls of `place_tokens` and methods of `Placement` that are refused, with the remedy."""

from typing import Any

import jax
import numpy as np
import pytest

from jax_cp_dispatch import PlacementConfig, place_tokens


def test_capacities_of_the_config_are_used_or_rejected():
    lengths = [[600, 300, 100, 24]]
    config = PlacementConfig(
        kv_capacity=2000, max_transfers=32, max_pieces=16, max_cut_pieces=16, max_linked_pieces=99
    )
    plan = place_tokens(lengths, world_size=4, config=config).plan
    assert plan.kv_capacity == 2000
    assert plan.kv_metadata.dst_rank.shape == (4, 32)
    assert plan.run_row.shape == (4, 16)
    too_small: Any = (
        ({"kv_capacity": 599}, "receives at least 600 rows, but kv_capacity is 599. Pass"),
        ({"max_transfers": 1}, r"rank \d would send \d+ ranges of keys but max_transfers is 1"),
        ({"max_pieces": 1}, r"rank \d would hold \d+ pieces but max_pieces is 1"),
    )
    for small, message in too_small:
        with pytest.raises(ValueError, match=message):
            place_tokens(lengths, world_size=4, config=PlacementConfig(**small))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "got neither lengths nor segment_ids"),
        ({"lengths": [[4]], "segment_ids": np.ones((1, 4), int)}, "got both lengths"),
        ({"lengths": [[4]], "positions": np.ones((1, 4), int)}, "positions without segment_ids"),
        ({"segment_ids": np.ones((1, 4), int), "columns": 4}, "columns without lengths"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [[4, -1]]}, "document 1 of batch row 0 has length -1"),
        ({"lengths": [[4], [9]], "columns": 8}, "batch row 1 sum to 9 but columns is 8"),
        ({"lengths": [[4]], "columns": 7}, "7 columns cannot be split over world_size=2"),
        ({"lengths": [[4]], "world_size": 0}, "world_size is 0; it needs to be at least 1"),
        ({"lengths": [[4]], "rank": 2}, r"rank is 2; it needs to be in \[0, 2\), or None"),
        ({"segment_ids": np.ones(4, int)}, r"shape \(4,\) but must be \[B, columns\]"),
        ({"segment_ids": np.array([[1, -1]])}, r"segment_ids\[0, 1\] is -1"),
        ({"segment_ids": np.array([[1, 2, 1, 1]])}, "segment 1 occurs in separate runs"),
    ],
)
def test_invalid_calls_are_rejected(arguments, message, unchecked_types):
    with pytest.raises(ValueError, match=message):
        place_tokens(**{"world_size": 2, **arguments})


@pytest.mark.parametrize("arguments", [{"lengths": [[1.5]]}, {"segment_ids": np.ones((1, 4))}])
def test_lengths_and_ids_are_integers(arguments, unchecked_types):
    with pytest.raises(TypeError, match="integer"):
        place_tokens(world_size=2, **arguments)


def test_segment_ids_as_lengths_are_rejected(unchecked_types):
    """As lengths they would give a placement of other tokens."""
    ids = np.repeat([[1, 2]], [3, 5], axis=1)
    with pytest.raises(TypeError, match=r"shape \(1, 8\).*Pass segment ids as segment_ids="):
        place_tokens(ids, world_size=2)


def test_traced_segment_ids_are_rejected(unchecked_types):
    place = lambda ids: place_tokens(segment_ids=ids, world_size=2).plan
    with pytest.raises(TypeError, match=r"segment_ids is traced.* outside jit"):
        jax.jit(place)(np.ones((1, 8), np.int32))


def test_arrays_of_another_batch_are_rejected(unchecked_types):
    placement = place_tokens([[8]], world_size=2)
    with pytest.raises(ValueError, match=r"shape \[1, 9\] but the placement is for \[1, 8, ...\]"):
        placement.apply(np.zeros((1, 9)))
    with pytest.raises(TypeError, match=r"Placement.apply: got a value of type int; all leaves"):
        placement.apply([1, 2])
    assert placement.restore(placement.apply(np.zeros((1, 8, 0)))).shape == (1, 8, 0)


@pytest.mark.parametrize("options", [{"balance_tolerance": -0.1}, {"kv_capacity": 0}])
def test_config_values_out_of_range_are_rejected(options):
    with pytest.raises(ValueError, match="PlacementConfig: "):
        PlacementConfig(**options)
