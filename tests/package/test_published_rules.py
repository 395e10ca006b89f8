"""The published rules that `benchmarks/bench_published.py` counts, against counts by hand."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import published_rules as rules  # pyright: ignore[reportMissingImports]


def shared_in_order(lengths, num_ranks):
    """Deals the tokens of each document out, one by one: pairs and padded tokens of each rank."""
    pairs, tokens = [0] * num_ranks, [0] * num_ranks
    for length in lengths:
        padded = length
        while padded % (2 * num_ranks):
            padded += 1
        order = [*range(num_ranks), *reversed(range(num_ranks))]  # the owners of the chunks
        for position in range(padded):
            rank = order[position * 2 * num_ranks // padded]
            tokens[rank] += 1
            pairs[rank] += position + 1 if position < length else 0
    return pairs, tokens


@pytest.mark.parametrize("num_ranks", [3, 16])
def test_zigzag(num_ranks):
    lengths = np.random.default_rng(num_ranks).integers(1, 200, 20).tolist()
    found = rules.zigzag(lengths, num_ranks)
    pairs, tokens = shared_in_order(lengths, num_ranks)
    assert found.pairs.tolist() == pairs and found.tokens.tolist() == tokens
    between = num_ranks > 8  # all keys go to all other ranks, in a node or between nodes
    assert found.received[:, int(between)].tolist() == [(num_ranks - 1) * x for x in tokens]
    assert not found.received[:, int(not between)].any()
    np.testing.assert_array_equal(found.sent, found.received)


def test_hybrid_puts_documents_off_that_unbalance_a_round():
    """Loads are squares: 104 and 100 differ by less than 5 %; of 125 and 100, 25 comes later."""
    (found,) = rules.hybrid([10, 10, 2], 2, 10)
    assert found.tokens.tolist() == [12, 10]
    first, second = rules.hybrid([10, 5, 10], 2, 10)
    assert first.tokens.tolist() == [10, 10]
    assert second.tokens.tolist() == [4, 4]  # on both ranks


def test_every_rule_computes_each_pair_once():
    lengths = np.random.default_rng(0).integers(1, 400, 60).tolist()
    pairs = sum(position + 1 for length in lengths for position in range(length))
    for found in (
        [rules.zigzag(lengths, 16)],
        [rules.fixed_groups(lengths, 16, 4)],
        [rules.whole(lengths, 16, float)],
        rules.hybrid(lengths, 16, 50),
    ):
        assert sum(x.pairs.sum() for x in found) == pairs
        for x in found:
            assert len(x.pairs) == len(x.tokens) == len(x.sent) == len(x.received) == 16
            assert x.sent.sum() == x.received.sum()
