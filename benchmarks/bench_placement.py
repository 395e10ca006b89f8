"""Measures placement of packed documents, 64K tokens per rank: balance, keys moved, time, peers.

The batches are those of tests/data/packed, of published lengths; beyond 512 ranks documents are
drawn from a log-normal distribution. Times are measured on the host, from the lengths to the plan.
Peers are reimplemented from their descriptions, see `peer_placements`; their times are not
comparable. With more than 8 ranks, planning is also timed with two constraints: nodes of 8 ranks,
and cuts at multiples of 64 tokens. Up to 512 ranks, one placement also serves global and local
layers; the keys that all of them move are compared with those in the placement of the global mask.
"""

import argparse
import json
import sys

import common
import packing
import peer_placements

from jax_cp_dispatch import Placement, PlanConfig, place_tokens
from jax_cp_dispatch.masks import SlidingWindow

sys.path.append(str(common.ROOT / "tests" / "oracles"))
from placement_bounds import least_keys

TOKENS = packing.TOKENS_PER_RANK
LAYERS, WINDOWS = (8, 40), (512, 4096)  # of the global mask, and of a window

CONSTRAINED = {
    "nodes_plan_ms": PlanConfig(ranks_per_node=8),
    "block_plan_ms": PlanConfig(block=64),
}


def place(
    lengths: list[int], world_size: int, config: PlanConfig, repeats: int
) -> tuple[Placement, float]:
    """Returns the placement, and the median of the milliseconds to make it."""
    make = lambda: place_tokens(lengths, world_size=world_size, config=config)
    placement, seconds = common.planning_seconds(make, repeats)
    return placement, round(1e3 * seconds, 2)


def of_layers(lengths: list[int], world_size: int, alone: Placement) -> dict[str, object]:
    """Returns balance and keys of a placement for both masks, for each window."""
    imbalance, of_global, per_cut = [], [], []
    for window in WINDOWS:
        local = SlidingWindow(window)
        both = place_tokens(lengths, world_size=world_size, masks=("causal", local), layers=LAYERS)
        keys, one = (
            [plan.num_kv_tokens_moved for plan in plans]
            for plans in (both.plans, (alone.plan, alone.plan_for(local)))
        )
        cuts = int((both.plan.run_row < both.plan.num_tokens).sum()) - len(lengths)
        total = lambda x: sum(a * b for a, b in zip(LAYERS, x, strict=True))
        imbalance.append(round(float(both.imbalance), 5))
        of_global.append(round(total(keys) / total(one), 4))
        per_cut.append(round(keys[1] / cuts, 1))
    return {
        "layers": f"{LAYERS[0]} global and {LAYERS[1]} local layers",
        "windows": " and ".join(map(str, WINDOWS)),
        "layers_imbalance": imbalance,
        "layers_kv_moved_of_global_placement": of_global,
        "local_kv_moved_per_cut": per_cut,
    }


def measure(lengths: list[int], world_size: int, repeats: int) -> dict[str, object]:
    placement, plan_ms = place(lengths, world_size, PlanConfig(), repeats)
    plan, num_tokens = placement.plan, world_size * TOKENS
    fewest = least_keys(lengths, world_size, TOKENS, placement.config.balance_tolerance)
    row = {
        "world_size": world_size,
        "tokens_per_rank": TOKENS,
        **peer_placements.HEADS,
        "documents": len(lengths),
        "plan_ms": plan_ms,
        "imbalance": round(float(plan.imbalance), 5),
        "kv_moved_share": round(plan.num_kv_tokens_moved / sum(lengths), 5),
        "least_kv_moved_share": round(fewest / num_tokens, 5),
        "kv_capacity_per_token": round(plan.kv_capacity / TOKENS, 3),
        "slots_per_rank": plan.kv_metadata.seq_len.shape[1],
    }
    if world_size > 8:
        for name, config in CONSTRAINED.items():
            row[name] = place(lengths, world_size, config, repeats)[1]
    if world_size <= packing.MOST_PUBLISHED:
        row |= of_layers(lengths, world_size, placement)
    if world_size <= 128:
        for name in ("min_heap", "greedy"):
            row[name] = getattr(peer_placements, name)(lengths, world_size).row()
    row["bytes_per_token"] = round(peer_placements.KV_BYTES * row["kv_moved_share"])
    return row


def main() -> None:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    sizes = [8, 32, 128, 512, 1024, 4096]
    parser.add_argument("--world-size", nargs="+", type=int, default=sizes)
    arguments = common.options(parser, world_size=[8, 32])
    rows = []
    for name, world_size, lengths in packing.packed(arguments.world_size):
        row = {"lengths": name} | measure(lengths, world_size, arguments.repeats)
        print(json.dumps(row), flush=True)
        rows.append(row)
    common.write(arguments.output, "placing packed documents", rows)


if __name__ == "__main__":
    main()
