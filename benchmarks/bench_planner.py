"""Measures plans that move queries, 64K tokens per rank: time, balance, moved bytes, peers.

The batches are those of tests/data/packed, of published lengths, with 8 and with 32 KV heads;
beyond 512 ranks documents are drawn from a log-normal distribution with median 2048 and sigma 1.2,
so that one document in a hundred is longer than 16 times the median; these hold 14 % of the tokens
and 55 % of the sum of squared lengths (real corpora: 60 to 80 %). Times are processor times of the
one thread that plans, from the lengths to the plan. The plan of the same batch made inside `jit`,
in blocks, and the greedy planner of `peer_placements` are compared.
"""

import argparse
import functools
import json
import time

import common
import jax
import numpy as np
import packing
import peer_placements

from jax_cp_dispatch import Plan, PlanConfig, plan_attention
from jax_cp_dispatch.tools.programs import make_segment_ids

TOKENS = packing.TOKENS_PER_RANK
MOST_TRACED, MOST_OF_PEER = 32, 128  # ranks


def moved(plan: Plan, num_tokens: int, num_kv_heads: int) -> dict[str, float]:
    q, kv = plan.num_q_tokens_moved / num_tokens, plan.num_kv_tokens_moved / num_tokens
    return {
        "imbalance": round(float(plan.imbalance), 5),
        "q_moved_share": round(q, 5),
        "kv_moved_share": round(kv, 5),
        "bytes_per_token": round(peer_placements.bytes_per_token(q, kv, num_kv_heads)),
    }


def plan_inside_jit(lengths: list[int], world_size: int) -> tuple[Plan, float]:
    """Returns the plan in blocks, which is the same for all head counts, and its milliseconds."""
    segment_ids = make_segment_ids(lengths)
    make = jax.jit(functools.partial(plan_attention, world_size=world_size))
    plan = jax.block_until_ready(make(segment_ids))
    start = time.perf_counter()
    jax.block_until_ready(make(segment_ids))
    return plan, 1e3 * (time.perf_counter() - start)


def measure(
    lengths: list[int],
    world_size: int,
    num_kv_heads: int,
    repeats: int,
    inside: tuple[Plan, float] | None,
) -> dict[str, object]:
    config = PlanConfig(num_heads=peer_placements.HEADS["num_heads"], num_kv_heads=num_kv_heads)
    make = functools.partial(plan_attention, world_size=world_size, config=config)
    plan, seconds = common.planning_seconds(lambda: make(lengths=lengths), repeats)
    num_tokens = sum(lengths)
    row = {
        "world_size": world_size,
        "tokens_per_rank": TOKENS,
        **peer_placements.HEADS,
        "num_kv_heads": num_kv_heads,
        "documents": len(lengths),
        "plan_ms": round(1e3 * seconds, 2),
        "plan_bytes": sum(x.nbytes for x in jax.tree.leaves(plan)),
        "imbalance_before": round(float(plan.imbalance_before), 4),
        **moved(plan, num_tokens, num_kv_heads),
        "q_capacity_per_token": round(plan.q_capacity / TOKENS, 3),
        "kv_capacity_per_token": round(plan.kv_capacity / TOKENS, 3),
        "needs": np.asarray(plan.largest_needs[0]).tolist(),
    }
    if inside is not None:
        traced, milliseconds = inside
        row["inside_jit"] = moved(traced, num_tokens, num_kv_heads)
        row["inside_jit"]["plan_ms"] = round(milliseconds, 2)
    if world_size <= MOST_OF_PEER:
        peer = peer_placements.greedy(lengths, world_size, num_kv_heads=num_kv_heads)
        row["greedy"] = peer.row(num_kv_heads)
    return row


def main() -> None:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    sizes = [8, 32, 128, 512, 1024, 4096]
    parser.add_argument("--world-size", nargs="+", type=int, default=sizes)
    arguments = common.options(parser, world_size=[8])
    rows = []
    for name, world_size, lengths in packing.packed(arguments.world_size):
        inside = plan_inside_jit(lengths, world_size) if world_size <= MOST_TRACED else None
        for num_kv_heads in (8, 32):
            measured = measure(lengths, world_size, num_kv_heads, arguments.repeats, inside)
            row = {"lengths": name} | measured
            print(json.dumps(row), flush=True)
            rows.append(row)
    common.write(arguments.output, "planning packed documents", rows)


if __name__ == "__main__":
    main()
