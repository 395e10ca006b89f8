"""Planning time, balance and moved tokens of packed documents, 64K tokens per rank.

`--lengths FILE...`: JSON lists of document lengths, from which documents are drawn at random.
Without: log-normal lengths with median 2048 and sigma 1.2, so that one document in a hundred is
longer than 16 times the median; these hold 14 % of the tokens and 55 % of the sum of squared
lengths (real corpora: 60 to 80 %). Documents are packed until all
ranks are full; the last one is cut.
"""

import argparse
import json
import time
from pathlib import Path

import common
import jax
import numpy as np

from jax_cp_dispatch import AttentionPlan, PlanConfig, plan_attention

MEDIAN, SIGMA = 2048, 1.2
DRAWN = f"log-normal, median {MEDIAN}, sigma {SIGMA}"


def read_lengths(files: list[Path]) -> dict[str, np.ndarray]:
    if files:
        return {path.name: np.array(json.loads(path.read_text())) for path in files}
    normal = np.random.default_rng(0).standard_normal(100_000)
    return {DRAWN: np.ceil(MEDIAN * np.exp(SIGMA * normal)).astype(int)}


def pack(lengths: np.ndarray, columns: int, seed: int) -> np.ndarray:
    sample = np.random.default_rng(seed).choice(lengths, columns)
    ends = np.minimum(sample.cumsum(), columns)
    return np.repeat(np.arange(1, columns + 1), np.diff(ends, prepend=0))[None].astype(np.int32)


def measure(
    lengths: np.ndarray, world_size: int, arguments: argparse.Namespace, seed: int
) -> dict[str, float]:
    segment_ids = pack(lengths, world_size * arguments.tokens, seed)
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
        "seed": seed,
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
    parser.add_argument("--lengths", nargs="+", type=Path, default=[])
    parser.add_argument("--world-size", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per rank")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    for name, lengths in read_lengths(arguments.lengths).items():
        for world_size in arguments.world_size:
            for seed in range(arguments.seeds):
                row = {"lengths": name} | measure(lengths, world_size, arguments, seed)
                print(json.dumps(row), flush=True)
                rows.append(row)
    common.write(arguments.output, "planning packed documents", rows)


if __name__ == "__main__":
    main()
