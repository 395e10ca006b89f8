"""Balance and moved bytes on the document lengths of real corpora, 64K tokens per rank."""

import jax
import numpy as np
import pytest
from random_lengths import real_lengths

from jax_cp_dispatch import PlanConfig, plan_attention

# Queries and keys moved per token by two other planners, measured on the same batches: contiguous
# blocks of 128 balanced to 1.02, and the greedy planner of benchmarks/peer_placements.py.
OTHERS = {
    ("wlbllm", 8): [(0.087, 0.972), (0.120, 0.944)],
    ("wlbllm", 32): [(0.105, 1.326), (0.162, 1.242)],
    ("wlbllm", 128): [(0.079, 1.185), (0.137, 1.149)],
    ("prolong", 8): [(0.026, 0.211), (0.060, 0.093)],
    ("prolong", 32): [(0.027, 0.330), (0.080, 0.317)],
    ("prolong", 128): [(0.047, 1.805), (0.078, 1.946)],
}
EQUAL_HEADS = ("wlbllm", 32), ("prolong", 8), ("prolong", 128)  # of queries and keys


@pytest.mark.parametrize("name, world_size", OTHERS)
def test_balanced_with_fewer_bytes_than_others(name, world_size):
    num_kv_heads = 32 if (name, world_size) in EQUAL_HEADS else 8
    lengths = real_lengths(name, world_size)
    config = PlanConfig(num_kv_heads=num_kv_heads)
    plan = plan_attention(lengths=lengths, world_size=world_size, config=config)
    pairs = np.array(lengths, np.int64) * (np.array(lengths) + 1) // 2
    for counted in (plan.pairs_before, plan.pairs):
        assert counted.sum(dtype=float) == pytest.approx(pairs.sum(), rel=1e-6)
    assert plan.imbalance <= 1.01 + 1e-6
    plan.q_metadata.validate()
    plan.kv_metadata.validate()

    def cost(q, kv):
        return 32 * q + num_kv_heads * kv

    moved = cost(plan.num_q_tokens_moved, plan.num_kv_tokens_moved) / sum(lengths)
    assert moved <= min(cost(*other) for other in OTHERS[name, world_size])


def test_a_plan_of_many_ranks_is_small():
    """512 ranks of 64K tokens: a few megabytes for all of them, a few kilobytes for each."""
    lengths = real_lengths("prolong", 512)
    plan = plan_attention(lengths=lengths, world_size=512)
    assert plan.imbalance <= 1.01 + 1e-6
    assert sum(x.nbytes for x in jax.tree.leaves(plan)) < 10 * 2**20
    part = plan_attention(lengths=lengths, world_size=512, rank=7)
    assert sum(x.nbytes for x in jax.tree.leaves(part)) < 20 * 2**10
    for x, y in zip(jax.tree.leaves(part), jax.tree.leaves(plan.slice_of(7)), strict=True):
        np.testing.assert_array_equal(x, y)
    for rank in (0, 511):
        start, end = plan.local_ranges(rank)
        assert (end - start).sum() == pytest.approx(plan.pairs[rank])
