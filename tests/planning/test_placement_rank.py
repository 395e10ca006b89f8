"""The part of one rank of a placement: what it holds, what it refuses, its size."""

from typing import Any

import jax
import numpy as np
import pytest

from jax_cp_dispatch import PlanConfig, place_tokens


def test_the_part_of_one_rank():
    """Places and moves the same tokens as the placement of all ranks, and is all that it needs."""
    lengths, world_size, columns = [[50, 3, 30], [90]], 4, 96
    config = PlanConfig(ranks_per_node=2)
    options: dict[str, Any] = {"world_size": world_size, "columns": columns, "config": config}
    placement = place_tokens(lengths, **options)
    tokens = np.random.default_rng(0).integers(0, 9, (2, columns, 3))
    placed = placement.apply(tokens)
    for rank in range(world_size):
        part = place_tokens(lengths, **options, rank=rank)
        same = placement.slice_of(rank)
        jax.tree.map(np.testing.assert_array_equal, part.plan, same.plan)
        jax.tree.map(np.testing.assert_array_equal, part.plan, placement.plan.slice_of(rank))
        assert all(len(x) == 1 for x in jax.tree.leaves(part.plan))
        np.testing.assert_array_equal(part.apply(tokens), np.split(placed, world_size, 1)[rank])
        np.testing.assert_array_equal(part.permutation, same.permutation)
        assert part.needs == same.needs == placement.needs
        ranges = (x.plan.local_ranges(rank) for x in (part, placement))
        jax.tree.map(np.testing.assert_array_equal, *ranges)


def test_a_part_does_not_answer_for_all_ranks():
    part = place_tokens([[50, 30, 16]], world_size=4, rank=2)
    of_all = {
        part: ("inverse", "imbalance", "num_kv_tokens_moved_between_nodes"),
        part.plan: ("imbalance", "num_kv_tokens_moved"),
    }
    for x, names in of_all.items():
        for name in names:
            with pytest.raises(ValueError, match=rf"{name}: this is the part of 1 of 4 ranks\."):
                getattr(x, name)
        with pytest.raises(ValueError, match="slice_of: got rank 0 with 1 of 4 ranks"):
            x.slice_of(0)
    with pytest.raises(ValueError, match="restore: this is the part of 1 of 4 ranks"):
        part.restore(np.zeros((1, 96)))
    with pytest.raises(ValueError, match=r"the plan of all 4 ranks has \[4, 5\]"):
        part.describe()


def test_the_part_of_one_rank_if_the_batch_does_not_fit():
    """Its tokens stay in their columns."""
    tokens = np.arange(192).reshape(2, 96)
    config = PlanConfig(
        kv_capacity=10, max_kv_transfers=8, max_pieces=8, max_cut_pieces=8, max_linked_pieces=99
    )
    options: dict[str, Any] = {"world_size": 4, "config": config, "fallback": "ring"}
    whole = place_tokens([[50, 3, 30, 13], [90, 6]], **options)
    for rank in range(4):
        part = place_tokens([[50, 3, 30, 13], [90, 6]], **options, rank=rank)
        assert not part.plan.fits and part.reason == whole.reason
        jax.tree.map(np.testing.assert_array_equal, part.plan, whole.slice_of(rank).plan)
        np.testing.assert_array_equal(part.apply(tokens), np.split(tokens, 4, axis=1)[rank])


def test_the_part_of_one_rank_is_small():
    """Some kilobytes, in no array of all ranks, which would stay in memory."""
    lengths = np.random.default_rng(0).integers(1, 4000, 20_000)
    part = place_tokens(lengths, world_size=1024, rank=7)
    arrays = jax.tree.leaves(part.plan)
    assert sum((x if x.base is None else x.base).nbytes for x in arrays) < 40 * 2**10
    assert len(part.permutation) == part.plan.num_tokens
