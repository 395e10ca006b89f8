"""Random lengths of documents for tests of planning."""

import numpy as np

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
