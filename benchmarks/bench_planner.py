"""Planning time, balance and moved tokens on document lengths, 64K tokens per rank.

python benchmarks/bench_planner.py lengths.json [...] [--output results.json]

Each file holds a JSON list of document lengths. Documents are drawn at random and packed until all
ranks are full; the last one is cut.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np

from jax_cp_dispatch.planner import PlanConfig, plan_attention


def pack(lengths: np.ndarray, columns: int, seed: int) -> np.ndarray:
    sample = np.random.default_rng(seed).choice(lengths, columns)
    ends = np.minimum(sample.cumsum(), columns)
    return np.repeat(np.arange(1, columns + 1), np.diff(ends, prepend=0))[None].astype(np.int32)


def seconds(function) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def measure(lengths: np.ndarray, world_size: int, args: argparse.Namespace, seed: int) -> dict:
    segment_ids = pack(lengths, world_size * args.tokens, seed)
    config = PlanConfig(block=args.block)

    def plan():
        return plan_attention(segment_ids, None, world_size=world_size, config=config)

    first = seconds(plan)
    times = [seconds(plan) for _ in range(args.repeats)]
    result = plan()
    num_tokens = segment_ids.size
    return {
        "world_size": world_size,
        "tokens_per_rank": args.tokens,
        "block": args.block,
        "seed": seed,
        "first_call_s": round(first, 3),
        "plan_ms_median": round(1e3 * float(np.median(times)), 2),
        "plan_ms_min": round(1e3 * min(times), 2),
        "imbalance_before": round(float(result.imbalance_before), 4),
        "imbalance": round(float(result.imbalance), 4),
        "q_moved_share": round(int(result.num_q_tokens_moved) / num_tokens, 4),
        "kv_moved_share": round(int(result.num_kv_tokens_moved) / num_tokens, 4),
        "all_gather_kv_moved_share": world_size - 1,
        "q_capacity_per_token": round(result.q_capacity / args.tokens, 3),
        "kv_capacity_per_token": round(result.kv_capacity / args.tokens, 3),
        "max_kv_destinations": result.kv_metadata.dst_rank.shape[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the planner.")
    parser.add_argument("lengths", nargs="+", type=Path)
    parser.add_argument("--world-size", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per rank")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the measurements as JSON")
    args = parser.parse_args()
    rows = []
    for path in args.lengths:
        lengths = np.array(json.loads(path.read_text()))
        for world_size in args.world_size:
            for seed in range(args.seeds):
                row = {"lengths": path.name} | measure(lengths, world_size, args, seed)
                print(json.dumps(row), flush=True)
                rows.append(row)
    if args.output:
        report = {"jax": jax.__version__, "platform": jax.default_backend(), "rows": rows}
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
