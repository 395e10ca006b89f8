"""Balance and moved tokens on the document lengths of real corpora, 64K tokens per rank."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_cp_dispatch import PlanConfig, plan_attention

FILES = sorted((Path(__file__).parents[1] / "data" / "lengths").glob("*.json"))
TOKENS = 65536


def pack(lengths):
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)[None].astype(np.int32)


@pytest.mark.parametrize("world_size, num_samples", [(8, 2), (32, 1)])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_balance_on_real_lengths(path, world_size, num_samples):
    batches = [x for x in json.loads(path.read_text()) if x["tokens"] == world_size * TOKENS]
    assert len(batches) >= num_samples
    # Capacities that always fit, so all plans of one size share one compiled program.
    config = PlanConfig(
        q_capacity=2 * TOKENS + 128,
        kv_capacity=world_size * TOKENS,
        max_kv_destinations=world_size,
    )
    for batch in batches[:num_samples]:
        segment_ids = pack(batch["lengths"])
        plan = plan_attention(segment_ids, None, world_size=world_size, config=config)
        plan = jax.device_get(plan)
        column = np.arange(segment_ids.size)
        starts = np.diff(segment_ids[0], prepend=0) != 0
        pairs = column + 1 - np.maximum.accumulate(np.where(starts, column, 0))
        before = pairs.reshape(world_size, -1).sum(1)
        np.testing.assert_allclose(plan.pairs_before, before, rtol=1e-3, atol=1e-4 * before.mean())
        np.testing.assert_allclose(plan.pairs_after.sum(), before.sum(), rtol=1e-3)
        work = (plan.kv_end.astype(np.int64) - plan.kv_start).sum(1)
        np.testing.assert_allclose(plan.pairs_after, work, rtol=1e-3)
        assert work.sum() == before.sum()
        assert work.max() <= 1.05 * work.mean()

        plan.q_metadata.validate()
        plan.kv_metadata.validate()
        assert plan.num_q_tokens_moved <= 0.15 * segment_ids.size
        all_gather = (world_size - 1) * segment_ids.size
        assert plan.num_kv_tokens_moved <= 0.3 * all_gather
