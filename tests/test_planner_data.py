"""Balance and moved tokens on the document lengths of real corpora, 64K tokens per rank."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_cp_dispatch.planner import PlanConfig, plan_attention

DATA = Path(__file__).parents[2] / "shared" / "data"
TOKENS = 65536


def read_lengths(name):
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not there: the document lengths are not part of the project")
    if name.endswith(".json"):
        return np.array(json.loads((DATA / name).read_text()))
    # A histogram of ranges "[low, high]": each document counts as the middle of its range.
    rows = [line.split('"') for line in (DATA / name).read_text().splitlines()[1:]]
    middle = [np.mean(json.loads(row[1])) for row in rows]
    number = [int(row[2].split(",")[1]) for row in rows]
    return np.repeat(np.array(middle, int), np.array(number) // 16)


def pack_sample(lengths, columns, seed):
    sample = np.random.default_rng(seed).choice(lengths, columns)
    ends = np.minimum(sample.cumsum(), columns)
    return np.repeat(np.arange(1, columns + 1), np.diff(ends, prepend=0))[None].astype(np.int32)


@pytest.mark.parametrize("world_size, num_samples", [(8, 2), (32, 1)])
@pytest.mark.parametrize(
    "name", ["dist_wlbllm.json", "dist_prolong.json", "magi_doc_length_distribution.csv"]
)
def test_balance_on_real_lengths(name, world_size, num_samples):
    lengths = read_lengths(name)
    # Those that always fit, so that all plans of one size share one compiled program.
    config = PlanConfig(
        q_capacity=2 * TOKENS + 128,
        kv_capacity=world_size * TOKENS,
        max_kv_destinations=world_size,
    )
    for seed in range(num_samples):
        segment_ids = pack_sample(lengths, world_size * TOKENS, seed)
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
