"""Measures planning time, balance and moved tokens of packed documents, 64K tokens per rank.

Documents are drawn from published lengths (tests/data), and from a log-normal distribution with
median 2048 and sigma 1.2, so that one document in a hundred is longer than 16 times the median;
these hold 14 % of the tokens and 55 % of the sum of squared lengths (real corpora: 60 to 80 %).
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import common
import jax
import numpy as np
import packing

from jax_cp_dispatch import AttentionPlan, PlanConfig, plan_attention


def batches(source: Path | None, num_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields seed and segment ids [1, num_tokens], of published or drawn lengths."""
    if source is not None:
        yield from packing.published(source, num_tokens)
    else:
        yield from ((seed, packing.drawn(num_tokens, seed)) for seed in range(2))


def measure(
    segment_ids: np.ndarray, world_size: int, arguments: argparse.Namespace
) -> dict[str, float]:
    config = PlanConfig(block=arguments.block)

    def plan() -> AttentionPlan:
        return plan_attention(segment_ids, world_size=world_size, config=config)

    start = time.perf_counter()
    result = jax.block_until_ready(plan())
    first_call = time.perf_counter() - start
    seconds = common.interleaved({"plan": plan}, arguments.repeats)
    num_tokens = segment_ids.size
    return {
        "world_size": world_size,
        "tokens_per_rank": arguments.tokens,
        "block": arguments.block,
        "first_call_s": round(first_call, 3),
        "plan_ms": round(1e3 * seconds["plan"], 2),
        "imbalance_before": round(float(result.imbalance_before), 4),
        "imbalance": round(float(result.imbalance), 4),
        "q_moved_share": round(result.num_q_tokens_moved / num_tokens, 4),
        "kv_moved_share": round(result.num_kv_tokens_moved / num_tokens, 4),
        "all_gather_kv_moved_share": world_size - 1,
        "q_capacity_per_token": round(result.q_capacity / arguments.tokens, 3),
        "kv_capacity_per_token": round(result.kv_capacity / arguments.tokens, 3),
        "max_kv_destinations": result.kv_metadata.dst_rank.shape[-1],
    }


def main() -> None:
    parser = common.parser(__doc__)
    files = sorted(packing.PUBLISHED.glob("*.json"))
    parser.add_argument("--lengths", nargs="*", type=Path, default=files)
    parser.add_argument("--world-size", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per rank")
    parser.add_argument("--block", type=int, default=128)
    arguments = common.options(parser, world_size=[8], tokens=16384)
    rows = []
    for source in (None, *arguments.lengths):
        name = packing.DRAWN if source is None else source.name
        for world_size in arguments.world_size:
            for seed, segment_ids in batches(source, world_size * arguments.tokens):
                row = {"lengths": name, "seed": seed} | measure(segment_ids, world_size, arguments)
                print(json.dumps(row), flush=True)
                rows.append(row)
    common.write(arguments.output, "planning packed documents", rows)


if __name__ == "__main__":
    main()
