"""The published rules that `benchmarks/bench_published.py` counts, against counts by hand."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import bench_published as bench  # pyright: ignore[reportMissingImports]
import published_rules as rules  # pyright: ignore[reportMissingImports]


def test_zigzag_of_one_padded_document():
    """5 tokens in chunks of 2: rank 0 has tokens 0, 1 and padding, rank 1 has tokens 2, 3, 4."""
    found = rules.zigzag([5], 2)
    assert found.pairs.tolist() == [1 + 2, 3 + 4 + 5]
    assert found.tokens.tolist() == [4, 4]


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


def test_hybrid():
    """20 needs two ranks of 10; the smallest groups double; 25 of 125 and 100 come later."""
    (found,) = rules.hybrid([10, 20, 10], 4, 10)
    assert found.tokens.tolist() == [10, 10, 10, 10] and found.pairs.tolist() == [105, 105, 55, 55]
    (found,) = rules.hybrid([20, 10], 4, 10)
    assert found.tokens.tolist() == [10, 10, 6, 6]
    first, second = rules.hybrid([10, 5, 10], 2, 10)
    assert first.tokens.tolist() == [10, 10] and second.tokens.tolist() == [4, 4]


def test_every_rule_computes_each_pair_once():
    lengths = np.random.default_rng(50).integers(1, 400, 60).tolist()
    pairs = sum(position + 1 for length in lengths for position in range(length))
    for found in (
        [rules.zigzag(lengths, 16)],
        [rules.fixed_groups(lengths, 16, 4)],
        [rules.whole(lengths, 16, float)],
        rules.hybrid(lengths, 16, 50),
    ):
        assert sum(x.pairs.sum() for x in found) == pairs
        assert all(x.sent.sum() == x.received.sum() for x in found)


def test_a_step_with_links_hides_the_keys_of_rings_alone():
    """A key goes to another node: 32 layers × 4096 bytes at 50 GB/s, longer than attention."""
    sent, received = np.array([[[0, 1], [0, 0]], [[0, 0], [0, 1]]])
    rounds = [rules.Round(np.array([1, 1]), np.array([0, 0]), sent, received)]
    moving, attention = 32 * 4096 / 50e9, bench.PAIR_FLOPS / 600e12
    seconds = [bench.step_seconds(rounds, links=True, is_ring=x) for x in (True, False)]
    assert seconds[0] == pytest.approx(3 * moving)  # keys; then keys again, and gradients
    assert seconds[1] == pytest.approx(2 * moving + 3.5 * attention)  # keys; then gradients
