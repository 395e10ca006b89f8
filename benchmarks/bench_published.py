"""Counts what published rules and `place_tokens` give each rank, 8 to 4096 ranks, for one model.

Batches have 64K tokens per rank: the one of tests/data/packed, and more that are drawn, with a
seed, from all its documents. The rules are in `published_rules`; of those with a parameter, the
best one for the row counts. DCP's needs the package mtkahypar, and is counted up to 128 ranks.
`place_tokens` is counted with the objective of time, for the hardware of the model, and with that
of fewest bytes; its planning is timed, as processor time of the one thread that plans.

From the counts follows the step of a stated model: each rank computes its linear layers, then
attention; all ranks wait at the end of a round. "With links", an exchange takes as long as the
bytes that the rank sends or receives, at the rates of `cost.HARDWARE["h100"]`. Keys move in
bfloat16, and their gradients as sums in float32, as in this package: backward, a plan moves the
gradients alone, and the rings of published rules move both. (Rings of Transformer Engine move the
gradients in bfloat16, too. This would shorten the steps of hybrid context parallelism by 2 to 5 %,
as counted for 128 and 512 ranks.) Rings hide an exchange behind attention, as far as that lasts.
"Placed" attention moves its heads in two parts: the first half of the exchange waits, the second is
hidden behind attention of the first half.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import common
import numpy as np
from packing import MOST_PUBLISHED, TOKENS_PER_RANK as TOKENS
from peer_placements import HEADS, KV_BYTES
from published_rules import (
    NODE,
    Round,
    blocks,
    hybrid,
    in_groups,
    whole,
    whole_or_zigzag,
    zigzag,
)

from jax_cp_dispatch import Placement, PlanConfig, place_tokens
from jax_cp_dispatch.cost import HARDWARE
from jax_cp_dispatch.cost.attention import waiting_share

sys.path.append(str(common.ROOT / "tests" / "oracles"))
from placement_bounds import least_received_by_the_busiest

LIMITS = [TOKENS // parts for parts in (1, 2, 4, 8, 16)]  # tokens of a document: per rank, or whole
BLOCKS, MOST_OF_BLOCKS = (1024, 2048), 128  # tokens; ranks
# Llama 3 8B (arXiv:2407.21783): layers, width, width of the feed-forward layers, words.
LAYERS, WIDTH, HIDDEN, WORDS = 32, 4096, 14336, 128256
KV_WIDTH = HEADS["num_kv_heads"] * HEADS["head_size"]
WEIGHTS = LAYERS * (2 * WIDTH * (WIDTH + KV_WIDTH) + 3 * WIDTH * HIDDEN) + WIDTH * WORDS
TOKEN_FLOPS = 2 * WEIGHTS  # forward; backward twice as many
PAIR_FLOPS = 4 * WIDTH * LAYERS  # forward; backward 2.5 times as many: it recomputes the scores
BACKWARD = {"linear": 2.0, "attention": 2.5}
GRADIENTS = 2  # bytes of those of keys, over the bytes of keys
MACHINE = HARDWARE["h100"]
RATES = np.array([MACHINE.link_bandwidth, MACHINE.rail_bandwidth]) / (LAYERS * KV_BYTES)  # keys/s
OURS = {
    "placed": PlanConfig(hardware="h100", backward=True),
    "fewest bytes": PlanConfig(ranks_per_node=NODE),
}


def batches(name: str, world_size: int, count: int) -> Iterator[list[int]]:
    """Yields the committed batch, if any, then drawn ones; the last document of each is cut."""
    path = common.ROOT / "tests" / "data" / "packed" / f"{name}.json"
    known = json.loads(path.read_text())
    committed = [batch["lengths"] for batch in known if batch["ranks"] == world_size]
    yield from committed
    documents = np.concatenate([batch["lengths"][:-1] for batch in known])
    for seed in range(len(committed), count):
        total = world_size * TOKENS
        drawn = np.random.default_rng([world_size, seed]).choice(documents, total // 256)
        ends = np.minimum(np.cumsum(drawn), total)
        lengths = np.diff(ends, prepend=0)
        yield lengths[lengths > 0].tolist()


# ---- The model: counts to seconds.


def seconds_of(tokens, pairs, keys, *, is_ring: bool):
    """Returns the seconds of ranks, forward and backward, without and with links.

    Args:
      tokens, pairs: of each rank.
      keys: `[..., 2]`; that it sends or receives, forward, inside a node and between nodes.
      is_ring: whether they move beside all of attention, and move again in the backward pass beside
        their gradients, as in rings. A plan moves the gradients alone, and hides only a share of
        each exchange.
    """
    linear = (1 + BACKWARD["linear"]) * TOKEN_FLOPS * tokens / MACHINE.matmul_flops
    attention = PAIR_FLOPS * pairs / MACHINE.matmul_flops
    moving = (keys / RATES).max(-1)
    alone = linear + (1 + BACKWARD["attention"]) * attention
    returning = (GRADIENTS + is_ring) * moving
    share = 1.0 if is_ring else 1 - waiting_share(HEADS["num_kv_heads"])
    waits = 0.0
    for compute, moves in ((attention, moving), (BACKWARD["attention"] * attention, returning)):
        waits = waits + moves - share * np.minimum(compute, moves)
    return alone, alone + waits


def document_seconds(length: int, ranks: int = 1) -> float:
    """Returns the seconds of a document on each of the ranks that share it, by zigzag."""
    keys = np.zeros(2)
    keys[int(ranks > NODE)] = (ranks - 1) * length / ranks
    pairs = length * (length + 1) / 2 / ranks
    return float(seconds_of(length / ranks, pairs, keys, is_ring=True)[1])


def step_seconds(rounds: list[Round], *, is_ring: bool) -> tuple[float, float]:
    """Returns the seconds of all rounds, each as long as its slowest rank: without, with links."""
    alone, linked = 0.0, 0.0
    for pairs, tokens, sent, received in rounds:
        of_ranks = seconds_of(tokens, pairs, np.maximum(sent, received), is_ring=is_ring)
        alone, linked = alone + float(of_ranks[0].max()), linked + float(of_ranks[1].max())
    return alone, linked


def counted(rounds: list[Round], lengths: list[int], *, is_ring: bool) -> dict[str, float]:
    """Returns largest work and tokens of a round, summed over rounds, bytes and seconds.

    Bytes are per token of a rank and layer, forward, inside a node and between nodes: of the mean
    rank, and of the one that sends or receives most. Exchanges are those of all layers, forward.
    """
    world_size, total = len(rounds[0].pairs), sum(lengths)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    assert abs(sum(x.pairs.sum(dtype=float) for x in rounds) / pairs - 1) < 1e-5  # plans: float32
    sent, received = (
        np.sum([getattr(x, name) for x in rounds], 0) for name in ("sent", "received")
    )
    keys, of_tokens = np.maximum(sent, received), KV_BYTES * world_size / total
    seconds, with_links = step_seconds(rounds, is_ring=is_ring)
    return {
        "work": sum(float(x.pairs.max()) for x in rounds) * world_size / pairs,
        "tokens": sum(int(x.tokens.max()) for x in rounds) * world_size / total,
        "bytes_inside": of_tokens * float(received[:, 0].mean()),
        "bytes_between": of_tokens * float(received[:, 1].mean()),
        "most_inside": of_tokens * float(keys[:, 0].max()),
        "most_between": of_tokens * float(keys[:, 1].max()),
        "mean_exchange_s": float((received / RATES).max(1).mean()),
        "most_exchange_s": float((keys / RATES).max()),
        "seconds": seconds,
        "seconds_with_links": with_links,
        "rounds": len(rounds),
    }


def least_exchange_seconds(of: Round, lengths: list[int]) -> float:
    """Returns a bound of the busiest rank's exchange, forward, given its pairs and tokens.

    The rank with the last token of a document receives so many keys, on both kinds of links at
    once; and so many of them from other nodes.
    """
    pairs, node = of.pairs.max(), min(NODE, len(of.pairs))
    received = least_received_by_the_busiest(lengths, TOKENS, pairs)
    between = least_received_by_the_busiest(lengths, node * TOKENS, node * pairs)
    return max(received / RATES.sum(), between / RATES[1])


# ---- Rules, and the best of each.


def placed(lengths: list[int], world_size: int, config: PlanConfig) -> Placement:
    if world_size <= NODE:
        config = dataclasses.replace(config, ranks_per_node=None)
    return place_tokens(lengths, world_size=world_size, config=config)


def round_of(placement: Placement, world_size: int) -> Round:
    plan = placement.plan
    moved = plan.kv_metadata.rows_between_ranks()
    np.fill_diagonal(moved, 0)
    node = np.arange(world_size) // NODE
    stays = node[:, None] == node
    sent, received = (
        np.stack([moved.sum(axis, where=where) for where in (stays, ~stays)], axis=1)
        for axis in (1, 0)
    )
    return Round(np.array(plan.pairs), np.full(world_size, TOKENS), sent, received)


def rules(lengths: list[int], world_size: int) -> Iterator[tuple[str, int | None, list[Round]]]:
    """Yields each published rule: its name, a value of its parameter, and its rounds."""
    sizes = (lengths, world_size)
    for limit in LIMITS:
        if max(lengths) <= world_size * limit:
            yield "hybrid", limit, hybrid(*sizes, limit)
            yield "hybrid, these costs", limit, hybrid(*sizes, limit, document_seconds)
    yield "zigzag", None, [zigzag(*sizes)]
    if world_size > NODE:
        yield "groups", None, [in_groups(*sizes, NODE, zigzag)]
    yield "whole", None, [whole(*sizes, document_seconds)]
    for limit in LIMITS:
        rule = partial(whole_or_zigzag, limit=limit, cost=document_seconds)
        yield "whole or zigzag", limit, [in_groups(*sizes, NODE, rule)]
    if world_size <= MOST_OF_BLOCKS and find_spec("mtkahypar"):
        for block in BLOCKS:
            yield "blocks", block, [blocks(*sizes, block)]


def measure(name: str, world_size: int, count: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a row of medians over the batches for each rule, with the best of its parameter."""
    found: dict[tuple[str, int | None], list[dict[str, float]]] = {}
    shares, longest = [], []
    about = {"lengths": name, "world_size": world_size, "batches": count}
    for lengths in batches(name, world_size, count):
        counts = {}
        for rule, config in OURS.items():
            make = partial(placed, lengths, world_size, config)
            placement, seconds = common.planning_seconds(make, repeats)
            rounds = [round_of(placement, world_size)]
            counts[rule, None] = counted(rounds, lengths, is_ring=False) | {
                "least_exchange_s": least_exchange_seconds(rounds[0], lengths),
                "equal_step": sum(map(document_seconds, lengths)) / world_size,
                "plan_ms": 1e3 * seconds,
            }
        for rule, parameter, rounds in rules(lengths, world_size):
            counts[rule, parameter] = counted(rounds, lengths, is_ring=True)
        best = counts["placed", None]
        for key, numbers in counts.items():
            if "equal_step" in numbers:
                numbers["equal_step"] /= numbers["seconds_with_links"]
            for of in ("seconds", "seconds_with_links"):
                numbers[of.replace("seconds", "step")] = numbers[of] / best[of]
            found.setdefault(key, []).append(numbers)
        linear = (1 + BACKWARD["linear"]) * TOKEN_FLOPS * sum(lengths) / MACHINE.matmul_flops
        shares.append(1 - linear / sum(map(document_seconds, lengths)))
        longest.append(max(lengths))
    time_of = lambda key: np.median([x["seconds_with_links"] for x in found[key]])
    complete = [key for key in found if len(found[key]) == count]
    for rule in dict.fromkeys(rule for rule, _ in complete):
        key = min((x for x in complete if x[0] == rule), key=time_of)
        share = round(float(np.median(shares)), 3)
        row = about | {"method": rule, "longest": max(longest), "attention_share": share}
        if key[1] is not None:
            row["parameter"] = key[1]
        for of in found[key][0]:
            row[of] = round(float(np.median([x[of] for x in found[key]])), 4)
        for of in ("step", "step_with_links"):
            row[f"{of}_range"] = [round(f(x[of] for x in found[key]), 3) for f in (min, max)]
        yield row


def main() -> None:
    parser = common.parser(__doc__, repeats=3)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    sizes = [8, 32, 128, 512, 4096]
    parser.add_argument("--world-size", nargs="+", type=int, default=sizes)
    parser.add_argument("--batches", type=int, default=5)
    arguments = common.options(parser, world_size=[8, 32], batches=2)
    rows = []
    for name in ("wlbllm", "prolong"):
        for world_size in arguments.world_size:
            count = arguments.batches if world_size <= MOST_PUBLISHED else 1
            for row in measure(name, world_size, count, arguments.repeats):
                print(json.dumps(row), flush=True)
                rows.append(row)
    model = {
        "name": "Llama 3 8B",
        "GFLOP_per_token": TOKEN_FLOPS / 1e9,
        "pairs_per_token": (1 + BACKWARD["linear"]) * TOKEN_FLOPS
        / ((1 + BACKWARD["attention"]) * PAIR_FLOPS),
        "backward": BACKWARD,
        "gradient_bytes_over_key_bytes": GRADIENTS,
        "matmul_flops": MACHINE.matmul_flops,
        "link_bandwidth": MACHINE.link_bandwidth,
        "rail_bandwidth": MACHINE.rail_bandwidth,
        "group": NODE,
        "tokens_per_rank": TOKENS,
        "limits": LIMITS,
        "blocks": BLOCKS,
        **HEADS,
    }  # fmt: skip
    title = "published rules beside placement, counted"
    common.write(arguments.output, title, rows, "mtkahypar", model=model)


if __name__ == "__main__":
    main()
