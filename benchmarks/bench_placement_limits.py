"""Measures what `kv_capacity` of a placement costs in balance and traffic.

The batches are those of tests/data/packed, 64K tokens per rank. The capacity goes from the need of
the best placement to the longest document (or a little more than a rank's tokens).
"""

import json
import sys

import common
import numpy as np
import packing

from jax_cp_dispatch import PlacementConfig, place_tokens

sys.path.append(str(common.ROOT / "tests" / "oracles"))
from placement_bounds import least_imbalance_of_capacity

TOKENS = packing.TOKENS_PER_RANK
FREEDOM = (1, 0.8, 0.6, 0.4, 0.2, 0)  # from generous to tight
SLACK = 2048  # tokens, if all documents fit a rank


def capacities(lengths: list[int], world_size: int) -> list[int]:
    """Returns capacities from the most generous to the tightest."""
    least = max(*lengths, TOKENS + SLACK)
    free = place_tokens(lengths, world_size=world_size).plan
    most = max(int(np.max(free.kv_metadata.num_total_recv_tokens)), least)
    return [least + int((most - least) * x) for x in FREEDOM]


def measure(lengths: list[int], world_size: int, capacity: int) -> dict[str, float]:
    config = PlacementConfig(kv_capacity=capacity)
    plan = place_tokens(lengths, world_size=world_size, config=config).plan
    bound = least_imbalance_of_capacity(lengths, world_size, TOKENS, capacity)
    return {
        "capacity_per_token": round(capacity / TOKENS, 3),
        "imbalance": round(plan.imbalance, 4),
        "least_imbalance": round(float(bound), 4),
        "kv_moved_share": round(plan.num_kv_tokens_moved / sum(lengths), 4),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--world-size", nargs="+", type=int, default=[8, 32, 128, 512])
    arguments = common.options(parser, world_size=[8])
    rows = []
    for name, world_size, lengths in packing.packed(arguments.world_size):
        steps = [measure(lengths, world_size, x) for x in capacities(lengths, world_size)]
        row = {"lengths": name, "world_size": world_size, "tokens_per_rank": TOKENS}
        rows.append(row | {"steps": steps})
        print(json.dumps(rows[-1]), flush=True)
    common.write(arguments.output, "placing under limits", rows)


if __name__ == "__main__":
    main()
