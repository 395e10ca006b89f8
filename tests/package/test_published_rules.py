"""The published rules that `benchmarks/bench_published.py` counts, against counts by hand."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import bench_published as bench  # pyright: ignore[reportMissingImports]
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


def test_fixed_groups():
    """Documents in order: 8 to the first group, 4 and 4 to the second, 12 to the first again."""
    found = rules.fixed_groups([8, 4, 4, 12], 4, 2)
    assert found.tokens.tolist() == [10, 10, 4, 4]
    assert found.pairs.tolist() == [18 + 39, 18 + 39, 2 * 5, 2 * 5]
    assert found.received.tolist() == [[10, 0], [10, 0], [4, 0], [4, 0]]


def test_whole_documents():
    """The longest first: 7; 6, 5; then 4 and 4 to the first rank, which is not ahead."""
    found = rules.whole([4, 5, 7, 4, 6], 2, float)
    assert found.tokens.tolist() == [7 + 4 + 4, 6 + 5]
    assert found.pairs.tolist() == [28 + 10 + 10, 21 + 15]
    assert not found.received.any() and not found.sent.any()


def test_hybrid_gives_long_documents_more_ranks():
    """20 needs two ranks of 10; the others one each."""
    (found,) = rules.hybrid([10, 20, 10], 4, 10)
    assert found.tokens.tolist() == [10, 10, 10, 10]
    assert found.pairs.tolist() == [105, 105, 55, 55]
    assert found.received[:, 0].tolist() == [10, 10, 0, 0]


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


def test_a_step_with_links_hides_the_keys_of_rings_alone():
    """A key goes to another node: 32 layers × 4096 bytes at 50 GB/s, longer than attention."""
    sent, received = np.array([[[0, 1], [0, 0]], [[0, 0], [0, 1]]])
    rounds = [rules.Round(np.array([1, 1]), np.array([0, 0]), sent, received)]
    moving, attention = 32 * 4096 / 50e9, bench.PAIR_FLOPS / 600e12
    assert moving > 2.5 * attention
    seconds = [bench.step_seconds(rounds, links=True, is_ring=x) for x in (True, False)]
    assert seconds[0] == pytest.approx(3 * moving)  # keys; then keys again, and gradients
    assert seconds[1] == pytest.approx(2 * moving + 3.5 * attention)  # keys; then gradients
    alone = bench.step_seconds(rounds, links=False, is_ring=False)
    assert alone == pytest.approx(3.5 * attention)
