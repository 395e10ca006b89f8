"""Lengths of documents for tests of planning: random, extreme, and real ones; and their plans.

`moved` is a plan of tokens in order, `placed` that of a placement.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_cp_dispatch import Plan, PlanConfig, place_tokens, plan_attention

PACKED = Path(__file__).parents[1] / "data" / "packed"
"""Real lengths, packed for several numbers of ranks with `TOKENS` each."""
TOKENS = 65536

UNIT = 64
"""Tokens. A plan may cut anywhere; the exact searches of the oracles cut at multiples of these."""


def cut(rng, total, num_cuts):
    """Returns the lengths of `num_cuts + 1` documents, `total` together."""
    cuts = np.sort(rng.choice(np.arange(1, total), int(num_cuts), replace=False))
    return np.diff([0, *cuts, total])


def small_case(rng, *, nodes):
    """Returns lengths in units, and speeds of ranks: equal ones if there are nodes of two ranks."""
    world_size, share = (4, 2) if nodes else (3, 3)
    lengths = cut(rng, world_size * share, rng.integers(0, 4))
    return lengths, np.ones(world_size) if nodes else rng.permutation([1.0, 1.5, 2.0])


def large_case(rng):
    """Returns ranks, tokens per rank, and lengths of some documents, most of them short."""
    world_size, tokens = int(rng.integers(2, 33)), int(rng.integers(400, 4000))
    left = int(world_size * tokens * rng.choice([1, 1, 0.9, 0.3]))
    longest = int(rng.integers(1, left + 1))
    lengths = []
    while left > 0:
        most = longest if rng.random() < 0.25 else max(longest // 50, 1)
        lengths.append(min(int(rng.integers(1, most + 1)), left))
        left -= lengths[-1]
    return world_size, tokens, lengths


def causal_pairs(lengths):
    """Returns the query-key pairs of causal attention in these documents."""
    return (lengths * (lengths + 1) / 2).sum()


def real_lengths(name, ranks):
    """Returns the lengths of one published batch."""
    batches = json.loads((PACKED / f"{name}.json").read_text())
    return next(x["lengths"] for x in batches if x["ranks"] == ranks)


# Of batches with 96 columns.
EXTREMES = {
    "all padding": [[]],
    "one token in all": [[1], []],
    "one giant document": [[96]],
    "all tiny": [[2] * 48],
    "all equal": [[12] * 8],
    "one token each": [[1] * 96],
    "mostly one document": [[2, 90, 1, 1, 1, 1]],
    "two lengths": [[50, 1, 1, 1, 40, 1, 1, 1]],
    "padding almost everywhere": [[5], [0]],
    "several rows": [[90, 6], [1, 30, 2, 63], [96]],
}


def moved(lengths, world_size, columns=None, mask=None, **choices: Any) -> Plan:
    options: Any = {"columns": columns, "mask": mask, "config": PlanConfig(**choices)}
    return plan_attention(lengths=lengths, world_size=world_size, **options)


def placed(lengths, world_size, columns=None, mask=None, **choices: Any) -> Plan:
    options: Any = {"columns": columns, "mask": mask, "config": PlanConfig(**choices)}
    return place_tokens(lengths, world_size=world_size, **options).plan


of_both_kinds = pytest.mark.parametrize("make", [moved, placed])


def cost(plan, ranks_per_node=1):
    """Keys that move between nodes; a query counts as four of them, for the default heads."""
    q, kv = plan.num_tokens_moved_between_nodes(ranks_per_node)
    return 4 * q + kv
