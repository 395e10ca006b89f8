"""Measures the balance of attention in seconds: the local program of each rank, alone on a device.

Packed documents of published lengths, forward and backward. A step of all ranks takes at least as
long as its busiest rank, so the busiest ranks of two algorithms compare their steps without
exchanges. The ratio to the mean is the balance, in seconds and as the query-key pairs predict it.
Draws balance.svg from the results.
"""

import json
import statistics
from collections.abc import Iterator

import balance_picture
import common
import numpy as np
import packing

from jax_cp_dispatch.profiling import BalanceProfile, balance_profile

HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_size": 64}


def batches(num_tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Yields the name of each distribution, and the lengths of its first batch."""
    for path in sorted(packing.PUBLISHED.glob("dist_*.json")):
        _, ids = next(packing.published(path, num_tokens))
        yield path.stem.removeprefix("dist_"), np.bincount(ids[0])[1:].tolist()


def row(profile: BalanceProfile) -> dict[str, object]:
    return {
        "algorithm": profile.name,
        "busiest_ms": round(1e3 * profile.busiest, 1),
        "mean_ms": round(1e3 * statistics.mean(profile.seconds), 1),
        "imbalance": round(profile.imbalance, 4),
        "pair_imbalance": round(profile.work_imbalance, 4),
    }


def main() -> None:
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--world-size", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank")
    arguments = common.options(parser, world_size=[8], tokens=1024)
    rows = []
    for world_size in arguments.world_size:
        for name, lengths in batches(world_size * arguments.tokens):
            batch = {
                "lengths": name,
                "world_size": world_size,
                "tokens_per_rank": arguments.tokens,
                "documents": len(lengths),
                "longest": max(lengths),
                **HEADS,
            }
            options = {"dtype": "float32", "repeats": arguments.repeats, **HEADS}
            for profile in balance_profile(lengths, world_size=world_size, **options):
                rows.append(batch | row(profile))
                print(json.dumps(rows[-1]), flush=True)
    common.write(arguments.output, "balance of attention in seconds, each rank alone", rows)
    balance_picture.draw(rows, arguments.pictures / "balance.svg")


if __name__ == "__main__":
    main()
