"""Measures what limits of a placement cost in balance and traffic, from generous to tight.

The batches are those of tests/data/packed, 64K tokens per rank. The capacity goes from the need of
the best placement to the longest document (or a little more than a rank's tokens); the tokens away
from home, from half a rank's tokens (or the longest document) above the least possible to the least
possible, or to a small number of tokens if all documents fit a rank.
"""

import json
import sys
from typing import Any

import bench_placement
import common
import numpy as np

from jax_cp_dispatch import PlacementConfig, place_tokens

sys.path.append(str(common.ROOT / "tests" / "oracles"))
from placement_bounds import least_imbalance_at_home, least_imbalance_of_capacity

TOKENS = bench_placement.TOKENS
FREEDOM = (1, 0.8, 0.6, 0.4, 0.2, 0)  # from generous to tight
SLACK = {"kv_capacity": 2048, "max_away": 1024}  # tokens, if all documents fit a rank


def ranges(lengths: list[int], world_size: int) -> dict[str, tuple[int, int]]:
    """Returns the tightest and the most generous value of each limit."""
    longest = max(lengths)
    free = place_tokens(lengths, world_size=world_size).plan
    away = max(longest - TOKENS, SLACK["max_away"])
    capacity = max(longest, TOKENS + SLACK["kv_capacity"])
    needs = int(np.max(free.kv_metadata.num_total_recv_tokens))
    return {
        "kv_capacity": (capacity, max(needs, capacity)),
        "max_away": (away, away + min(longest, TOKENS) // 2),
    }


def measure(lengths: list[int], world_size: int, limit: str, value: int) -> dict[str, float]:
    limits: dict[str, Any] = {limit: value}
    config = PlacementConfig(**limits)
    plan = place_tokens(lengths, world_size=world_size, config=config).plan
    bound = {"kv_capacity": least_imbalance_of_capacity, "max_away": least_imbalance_at_home}[limit]
    return {
        "limit_per_token": round(value / TOKENS, 3),
        "imbalance": round(plan.imbalance, 4),
        "least_imbalance": round(float(bound(lengths, world_size, TOKENS, value)), 4),
        "kv_moved_share": round(plan.num_kv_tokens_moved / sum(lengths), 4),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--world-size", nargs="+", type=int, default=[8, 32, 128, 512])
    arguments = common.options(parser, world_size=[8])
    rows = []
    for name, world_size, lengths in bench_placement.batches(arguments.world_size):
        for limit, (least, most) in ranges(lengths, world_size).items():
            values = [least + int((most - least) * x) for x in FREEDOM]
            steps = [measure(lengths, world_size, limit, value) for value in values]
            row = {"lengths": name, "world_size": world_size, "tokens_per_rank": TOKENS}
            rows.append(row | {"limit": limit, "steps": steps})
            print(json.dumps(rows[-1]), flush=True)
    common.write(arguments.output, "placing under limits", rows)


if __name__ == "__main__":
    main()
