"""Counts what published rules and `place_tokens` give each rank, 8 to 512 ranks; nothing is timed.

Batches have 64K tokens per rank: the one of tests/data/packed, and more that are drawn, with a
seed, from all its documents. The rules are in `published_rules`. From the counts follows the
step of a stated model: each rank computes its linear layers, then attention; all ranks wait at the
end of a round. "With links", an exchange takes as long as its bytes at the rates of
`cost.HARDWARE["h100"]`. Rings of published rules hide it behind attention, as far as that lasts;
"placed" attention waits for it.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
from peer_placements import HEADS, KV_BYTES
from published_rules import NODE, Round, fixed_groups, hybrid, whole, zigzag

from jax_cp_dispatch import PlanConfig, place_tokens
from jax_cp_dispatch.cost import HARDWARE

TOKENS = 65536
LIMITS = (1, 2, 4, 8)  # parts of `TOKENS`: tokens of one document per rank, for `hybrid`
# Llama 3 8B (arXiv:2407.21783): layers, width, width of the feed-forward layers, words.
LAYERS, WIDTH, HIDDEN, WORDS = 32, 4096, 14336, 128256
KV_WIDTH = HEADS["num_kv_heads"] * HEADS["head_size"]
WEIGHTS = LAYERS * (2 * WIDTH * (WIDTH + KV_WIDTH) + 3 * WIDTH * HIDDEN) + WIDTH * WORDS
TOKEN_FLOPS = 2 * WEIGHTS  # forward; backward twice as many
PAIR_FLOPS = 4 * WIDTH * LAYERS  # forward; backward 2.5 times as many: it recomputes the scores
BACKWARD = {"linear": 2.0, "attention": 2.5}
MACHINE = HARDWARE["h100"]


def batches(name: str, world_size: int, count: int) -> Iterator[list[int]]:
    """Yields the committed batch, then drawn ones; the last document of each is cut."""
    path = common.ROOT / "tests" / "data" / "packed" / f"{name}.json"
    known = json.loads(path.read_text())
    yield next(batch["lengths"] for batch in known if batch["ranks"] == world_size)
    documents = np.concatenate([batch["lengths"][:-1] for batch in known])
    for seed in range(1, count):
        total = world_size * TOKENS
        drawn = np.random.default_rng([world_size, seed]).choice(documents, total // 256)
        ends = np.minimum(np.cumsum(drawn), total)
        lengths = np.diff(ends, prepend=0)
        yield lengths[lengths > 0].tolist()


def placed(lengths: list[int], world_size: int) -> Round:
    config = PlanConfig(ranks_per_node=NODE) if world_size > NODE else PlanConfig()
    plan = place_tokens(lengths, world_size=world_size, config=config).plan
    moved = plan.kv_metadata.rows_between_ranks()
    np.fill_diagonal(moved, 0)
    node = np.arange(world_size) // NODE
    stays = node[:, None] == node
    sent, received = (
        np.stack([(moved * stays).sum(axis), (moved * ~stays).sum(axis)], axis=1) for axis in (1, 0)
    )
    return Round(np.array(plan.pairs), np.full(world_size, TOKENS), sent, received)


def document_flops(length: int) -> float:
    """Returns the FLOPs of one whole document, forward and backward."""
    attention = (1 + BACKWARD["attention"]) * PAIR_FLOPS * length * (length + 1) / 2
    return (1 + BACKWARD["linear"]) * TOKEN_FLOPS * length + attention


def step_seconds(rounds: list[Round], *, links: bool, is_ring: bool) -> float:
    """Returns the seconds of all rounds, each as long as its slowest rank.

    Args:
      links: whether keys take time to move.
      is_ring: whether that is hidden behind attention. Rings move keys again in the backward pass,
        beside their gradients; a plan moves the gradients alone.
    """
    both = np.maximum if is_ring else np.add
    rates = np.array([MACHINE.link_bandwidth, MACHINE.rail_bandwidth])
    total = 0.0
    for pairs, tokens, sent, received in rounds:
        linear = (1 + BACKWARD["linear"]) * TOKEN_FLOPS * tokens / MACHINE.matmul_flops
        attention = PAIR_FLOPS * pairs / MACHINE.matmul_flops
        busiest = (np.maximum(sent, received) / rates).max(1)
        moving = links * LAYERS * KV_BYTES * busiest
        forward = both(attention, moving)
        backward = both(BACKWARD["attention"] * attention, (1 + is_ring) * moving)
        total += float((linear + forward + backward).max())
    return total


def counted(rounds: list[Round], lengths: list[int], *, is_ring: bool) -> dict[str, float]:
    """Returns largest work and tokens of a round, summed over rounds, and bytes, forward."""
    world_size, total = len(rounds[0].pairs), sum(lengths)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    assert abs(sum(x.pairs.sum(dtype=float) for x in rounds) / pairs - 1) < 1e-5  # plans: float32
    sent, received = (sum(getattr(x, name).sum(1) for x in rounds) for name in ("sent", "received"))
    seconds = lambda links: step_seconds(rounds, links=links, is_ring=is_ring)
    return {
        "work": sum(float(x.pairs.max()) for x in rounds) * world_size / pairs,
        "tokens": sum(int(x.tokens.max()) for x in rounds) * world_size / total,
        "bytes_per_token": KV_BYTES * float(np.sum(received)) / total,
        "most_bytes_per_token": KV_BYTES * float(np.max([sent, received])) * world_size / total,
        "seconds": seconds(False),
        "seconds_with_links": seconds(True),
        "rounds": len(rounds),
    }


def methods(lengths: list[int], world_size: int) -> dict[str, list[Round]]:
    found = {"placed": [placed(lengths, world_size)]}
    for parts in LIMITS:
        if max(lengths) <= world_size * TOKENS // parts:
            found[f"hybrid {TOKENS // parts}"] = hybrid(lengths, world_size, TOKENS // parts)
    found["zigzag"] = [zigzag(lengths, world_size)]
    if world_size > NODE:
        found["groups"] = [fixed_groups(lengths, world_size, NODE)]
    found["whole"] = [whole(lengths, world_size, document_flops)]
    return found


def measure(name: str, world_size: int, count: int) -> Iterator[dict[str, Any]]:
    """Yields a row of medians over the batches for each method; "hybrid" with its best limit."""
    found: dict[str, list[dict[str, float]]] = {}
    sizes, shares, longest = [], [], []
    for lengths in batches(name, world_size, count):
        counts = {
            method: counted(rounds, lengths, is_ring=method != "placed")
            for method, rounds in methods(lengths, world_size).items()
        }
        for method, numbers in counts.items():
            for key in ("seconds", "seconds_with_links"):
                factor = numbers[key] / counts["placed"][key]
                numbers[key.replace("seconds", "step")] = factor
            found.setdefault(method, []).append(numbers)
        linear = (1 + BACKWARD["linear"]) * TOKEN_FLOPS * sum(lengths)
        shares.append(1 - linear / sum(map(document_flops, lengths)))
        sizes.append(len(lengths))
        longest.append(max(lengths))
    time_of = lambda method: np.median([x["seconds_with_links"] for x in found[method]])
    limits = [x for x in found if x.startswith("hybrid") and len(found[x]) == count]
    best = min(limits, key=time_of)
    for method, numbers in found.items():
        if method.startswith("hybrid") and method != best:
            continue
        row = {
            "lengths": name,
            "world_size": world_size,
            "method": method.split()[0],
            "batches": count,
            "documents": int(np.median(sizes)),
            "longest": max(longest),
            "attention_share": round(float(np.median(shares)), 3),
        }
        for key in numbers[0]:
            row[key] = round(float(np.median([x[key] for x in numbers])), 4)
        for key in ("step", "step_with_links"):
            row[f"{key}_range"] = [round(f(x[key] for x in numbers), 3) for f in (min, max)]
        if method == best:
            row["limit"] = int(method.split()[1])
        yield row


def main() -> None:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--world-size", nargs="+", type=int, default=[8, 32, 128, 512])
    parser.add_argument("--batches", type=int, default=5)
    arguments = common.options(parser, world_size=[8, 32], batches=2)
    rows = []
    for name in ("wlbllm", "prolong"):
        for world_size in arguments.world_size:
            for row in measure(name, world_size, arguments.batches):
                print(json.dumps(row), flush=True)
                rows.append(row)
    model = {
        "name": "Llama 3 8B",
        "GFLOP_per_token": TOKEN_FLOPS / 1e9,
        "pairs_per_token": (1 + BACKWARD["linear"]) * TOKEN_FLOPS
        / ((1 + BACKWARD["attention"]) * PAIR_FLOPS),
        "backward": BACKWARD,
        "matmul_flops": MACHINE.matmul_flops,
        "link_bandwidth": MACHINE.link_bandwidth,
        "rail_bandwidth": MACHINE.rail_bandwidth,
        "group": NODE,
        "tokens_per_rank": TOKENS,
        "limits": [TOKENS // parts for parts in LIMITS],
        **HEADS,
    }  # fmt: skip
    title = "published rules beside placement, counted"
    common.write(arguments.output, title, rows, model=model)


if __name__ == "__main__":
    main()
