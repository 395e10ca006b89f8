"""More than 65,536 tokens: columns beyond 16 bits, and more than 2**32 query-key pairs.

The oracle is arithmetic on lengths, in 64-bit integers. Attention: test_values.py.
"""

from functools import partial

import jax
import numpy as np
import pytest
from planner_oracle import deliver

from jax_cp_dispatch import PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.masks import SlidingWindow

# A document of more than 2**32 pairs, and documents of 2**16 tokens and one more.
LENGTHS = [100_001, 65_537, 65_536, 1, 30_000]
PADDING = 1069
W = 2  # so that a rank's rows exceed 16 bits, too
NUM_TOKENS = sum(LENGTHS) + PADDING


def check_ranges(plan, queries, rows, window):
    """Each query is computed once, with its keys; returns the exact pairs of each rank.

    Args:
      queries: the token of each row of queries of each rank, -1 for none.
      rows: the token of each row that the ranks send from.
    """
    starts = np.repeat(np.cumsum(LENGTHS) - LENGTHS, LENGTHS)
    keys = deliver(plan.kv_metadata, rows, plan.kv_capacity)
    computed, pairs = np.zeros(len(starts), int), []
    for rank in range(plan.world_size):
        k_start, k_end = (np.asarray(x).astype(np.int64) for x in plan.local_ranges(rank))
        row = np.flatnonzero((queries[rank] >= 0) & (queries[rank] < len(starts)))
        query = queries[rank][row]
        first = np.maximum(starts[query], query + 1 - window)
        consecutive = np.cumsum(np.diff(keys[rank], prepend=-9) != 1)
        k_start, k_end = k_start[row], k_end[row]
        np.testing.assert_array_equal(k_end - k_start, query + 1 - first)
        np.testing.assert_array_equal(keys[rank][k_start], first)
        np.testing.assert_array_equal(consecutive[k_start], consecutive[k_end - 1])
        np.add.at(computed, query, 1)
        pairs.append(int((k_end - k_start).sum()))
    assert (computed == 1).all()
    every = (np.minimum(np.arange(1, n + 1), window).sum(dtype=np.int64) for n in LENGTHS)
    assert sum(pairs) == sum(every)
    return pairs


@pytest.mark.parametrize("kind", ["moved", "in a window", "placed", "inside jit"])
def test_plans(kind):
    """Pairs are counted in 64 bits, and rounded to float32 once; inside jit scaled to 32 bits."""
    window = 65_537 if kind == "in a window" else NUM_TOKENS
    rows = np.arange(NUM_TOKENS).reshape(W, -1)
    if kind == "placed":
        placement = place_tokens([LENGTHS], columns=NUM_TOKENS, world_size=W)
        plan, rows = placement.plan, np.asarray(placement.permutation).reshape(W, -1)
    elif kind == "inside jit":
        config = PlanConfig(block=4096)
        planned = jax.jit(partial(plan_attention, world_size=W, config=config))
        plan = planned(np.repeat([1, 2, 3, 4, 5, 0], [*LENGTHS, PADDING]).astype(np.int32)[None])
    else:
        mask = SlidingWindow(window)
        plan = plan_attention(lengths=[LENGTHS], columns=NUM_TOKENS, world_size=W, mask=mask)
    queries = rows if kind == "placed" else deliver(plan.q_metadata, rows, plan.q_capacity)
    pairs = check_ranges(plan, queries, rows, window)
    assert max(pairs) > 2**31
    if kind == "inside jit":
        np.testing.assert_allclose(plan.pairs, pairs, rtol=0, atol=1e-4 * sum(pairs) / W)
        assert max(pairs) <= 1.1 * np.mean(pairs)
    else:
        np.testing.assert_array_equal(plan.pairs, np.array(pairs, np.float32))
        assert max(pairs) <= 1.02 * np.mean(pairs)
