"""Pairs of whole tiles against a brute-force count, and traffic by the kind of link by hand."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jax_cp_dispatch import place_tokens, plan_attention
from jax_cp_dispatch.attention.local.options import blocks_of_ranks
from jax_cp_dispatch.cost import (
    HARDWARE,
    AttentionRate,
    Hardware,
    Traffic,
    Workload,
    predict,
    rank_pairs,
    rows_by_link,
    step_costs,
)

W, T = 4, 128


def computed(lengths, *, causal, zigzag, window, tile):
    """Counts the pairs of the tiles from the first to the last key of each block of queries."""
    total = W * T
    document = np.repeat(np.arange(len(lengths)), lengths)
    ahead = np.arange(total) - np.arange(total)[:, None]
    seen = document[:, None] == document
    if causal:
        seen &= (ahead <= 0) & (ahead > -(window or total))
    elif window:
        seen &= (-window[0] <= ahead) & (ahead <= window[1])
    half = T // 2
    held = np.arange(total).reshape(W, T)
    if zigzag:
        held = [
            np.r_[r * half : (r + 1) * half, (2 * W - 1 - r) * half : (2 * W - r) * half]
            for r in range(W)
        ]
    pairs = 0
    for queries in held:
        for keys in held:
            part = seen[np.ix_(queries, keys)]
            for row in range(0, T, tile[0]):
                (columns,) = np.nonzero(part[row : row + tile[0]].any(0))
                if columns.size:
                    tiles = columns[-1] // tile[1] - columns[0] // tile[1] + 1
                    pairs += tiles * tile[0] * tile[1]
    return pairs


@pytest.mark.parametrize("tile", [(8, 8), (16, 4), (4, 16)])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(
    "causal, window", [(True, None), (True, 40), (False, None), (False, (30, 10))]
)
def test_pairs_of_whole_tiles(causal, window, zigzag, tile):
    """An estimate: the ends of windows and of documents cross tiles anywhere."""
    rng = np.random.default_rng(0)
    options = {"causal": causal, "zigzag": zigzag, "window": window, "tile": tile}
    expected = estimated = 0
    for _ in range(5):
        lengths = []
        while sum(lengths) < W * T:
            lengths.append(min(int(rng.lognormal(3.5, 1.0)) + 1, W * T - sum(lengths)))
        expected += computed(lengths, **options)
        estimated += rank_pairs(lengths, num_ranks=W, tokens_per_rank=T, **options).sum()
    assert estimated == pytest.approx(expected, rel=0.04)


def test_whole_tiles_of_one_document():
    options = {"num_ranks": W, "tokens_per_rank": T, "causal": True, "zigzag": False}
    exact = rank_pairs([W * T], **options)
    tiles = rank_pairs([W * T], **options, tile=(8, 8))
    off_diagonal = ~np.eye(W, dtype=bool)
    np.testing.assert_array_equal(tiles[off_diagonal], exact[off_diagonal])  # ranks are whole tiles
    # Tiles on the diagonal are aligned: 28 of the 64 pairs of each are wasted.
    np.testing.assert_array_equal(np.diag(tiles - exact), T // 8 * 28)


def tiles_of_plan(plan, tile):
    """Counts the pairs from the first to the last tile of keys of each block of queries."""
    pairs = 0
    for rank in range(plan.world_size):
        start, end = plan.local_ranges(rank)
        for row in range(0, len(start), tile):
            used = start[row : row + tile] < end[row : row + tile]
            if used.any():
                first = start[row : row + tile][used].min() // tile
                last = -(-end[row : row + tile].max() // tile)
                pairs += (last - first) * tile * tile
    return pairs


@pytest.mark.parametrize("median", [120, 500, 2000])
@pytest.mark.parametrize("algorithm", ["balanced", "placed"])
def test_pairs_of_whole_tiles_of_plans(algorithm, median):
    """An estimate from the rows that move; a pair takes a second on one of all 8 ranks."""
    ranks, tokens, tile = 8, 512, 64
    rate = AttentionRate(flops=4.0, tile_rows=tile, tile_keys=tile)
    shared = Hardware(
        matmul_flops=4.0, link_bandwidth=1e9, link_latency=0.0, topology="shared_memory",
        cores=ranks, attention=rate,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    expected = estimated = 0
    for _ in range(5):
        lengths = []
        while left := ranks * tokens - sum(lengths):
            lengths.append(min(int(median * rng.lognormal()) + 1, left))
        sent = lambda x, n: rows_by_link(np.asarray(x.num_recv_tokens)[:, :ranks].T, capacity=n)
        moves: dict[str, Any]
        if algorithm == "balanced":
            plan = plan_attention(lengths=[lengths], world_size=ranks)
            moves = {"moved_tokens": (sent(plan.q_metadata, plan.q_capacity),
                                      sent(plan.kv_metadata, plan.kv_capacity))}  # fmt: skip
        else:
            plan = place_tokens([lengths], world_size=ranks).plan
            moves = {"placed_tokens": sent(plan.kv_metadata, plan.kv_capacity)}
        expected += tiles_of_plan(plan, tile)
        workload = Workload(ranks, tokens, 1, 1, 1, itemsize=4, lengths=(tuple(lengths),))
        steps = step_costs(algorithm, workload, hardware=shared, **moves)
        estimated += sum(step.compute for step in steps)
    assert estimated == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2), (32, 4)])
def test_tiles_of_the_cpu_are_the_blocks_of_attention(heads, kv_heads):
    """For sizes that the blocks divide; `rows` as in the calls of attention."""
    rate = HARDWARE["cpu"].attention_rate
    for is_planned, rows in ((False, 256), (True, 128)):
        tile = rate.tile(heads_per_group=heads // kv_heads, is_planned=is_planned)
        blocks = blocks_of_ranks(4096, 4096, heads, kv_heads, rows=rows)
        assert (tile.queries, tile.keys) == (blocks["block_q"], blocks["block_kv"])
        assert tile.rows == tile.queries * heads // kv_heads


def test_time_of_a_pair():
    """4 FLOP forward and 10 backward per pair, head and feature; one exponential; a share 2/3."""
    rate = AttentionRate(
        flops=8.0, backward_flops=5.0, exponentials=4.0, half_rate_rows=2, tile_rows=4
    )
    tile = rate.tile(heads_per_group=2, is_planned=False)
    assert (tile.queries, tile.keys, tile.rows) == (2, 1, 4)
    forward, backward = (
        rate.pair_seconds(tile, num_heads=3, head_size=2, backward=x) for x in (False, True)
    )
    assert forward == pytest.approx(24 / 8 * 1.5 + 3 / 4)
    assert backward == pytest.approx(60 / 5 * 1.5 + 3 / 4)


SENT = np.array([[9, 1, 0, 2], [3, 9, 0, 0], [0, 4, 9, 5], [0, 0, 6, 9]])


def test_rows_by_link():
    """Own rows do not count; the busiest rank counts what it sends or receives, the larger."""
    assert rows_by_link(SENT) == Traffic(21 / 4, 0.0, 9.0, 0.0)
    two = rows_by_link(SENT, ranks_per_node=2, capacity=30)
    assert two == Traffic(15 / 4, 6 / 4, 6.0, 4.0, 30)
    assert (two.total, two.times(2).total) == (21 / 4, 21 / 2)
    with pytest.raises(ValueError, match=r"4 ranks do not fill nodes of 3. Pass a divisor of 4"):
        rows_by_link(SENT, ranks_per_node=3)


def test_rows_by_link_needs_counts_of_pairs_of_ranks(unchecked_types):
    for sent in (SENT[0], SENT[:2], SENT / 2, None):
        with pytest.raises(TypeError, match=r"rows_by_link: sent is .*integers \[num_ranks, num_r"):
            rows_by_link(sent)  # pyright: ignore[reportArgumentType]


# One pair takes one second; links move one byte per second, NICs half a byte.
NODES = Hardware(
    matmul_flops=4.0, link_bandwidth=1.0, link_latency=0.0, topology="nvswitch", ranks_per_node=2,
    rails=2, rail_bandwidth=0.5,
)  # fmt: skip
TINY = Workload(4, 2, num_heads=1, num_kv_heads=1, head_size=1, itemsize=1)


def test_traffic_of_a_plan_by_link():
    """Two bytes per row: the busiest NIC decides, then the busiest port; means are reported."""
    first = lambda keys: step_costs("placed", TINY, hardware=NODES, placed_tokens=keys)[0]
    by_nic, by_port = Traffic(3.0, 1.0, 5.0, 4.0), Traffic(3.0, 1.0, 50.0, 4.0)
    assert first(by_nic)[1:] == (4 * 2 / 0.5, 8.0, 2.0, 10.0, 8.0)
    assert first(by_port)[1:] == (50 * 2, 8.0, 2.0, 100.0, 8.0)
    equally = 8 * 2 / 0.5, 24.0, 16.0, 8.0, 16.0  # to 3 others
    assert first(12)[1:] == pytest.approx(equally)


@pytest.mark.parametrize(
    "algorithm, between", [("ring", 1 / 2), ("hamilton", 2 / 3), ("hamilton_nodes", 1 / 2)]
)
def test_share_between_nodes(algorithm, between):
    """Ring: the last of two ranks. Cycles: 2 of 3 other ranks. With nodes: 1 of 2 chunks."""
    for backward in (False, True):
        for step in step_costs(algorithm, TINY, hardware=NODES, backward=backward):
            assert step.between_bytes == pytest.approx(between * step.sent_bytes)
    prediction = predict(TINY, hardware=NODES)[algorithm]
    assert prediction.bytes_per_rank == 3 * TINY.kv_bytes(2)
    assert prediction.bytes_between_nodes == pytest.approx(between * 3 * TINY.kv_bytes(2))


def test_shared_memory_copies_own_rows_and_rewrites_them():
    """Ranks share bandwidths; own keys are copied too; rows are rewritten once and in each step."""
    shared = Hardware(
        matmul_flops=4.0, link_bandwidth=2.0, link_latency=0.0, topology="shared_memory",
        cores=4, memory_bandwidth=5.0,
    )  # fmt: skip
    moved = Traffic(3.0, 0.0, 3.0, 0.0)
    steps = step_costs("placed", TINY, hardware=shared, placed_tokens=moved)
    (exchange,) = [x for x in steps if x.communication]
    assert exchange.communication == 4 * 2 * (3 + 2) / 2
    assert exchange.sent_bytes == 6
    rewritten = 6 * 2 + 2 + 2 * (3 + 2)
    assert sum(x.compute for x in steps) == 36 + 4 * rewritten / 5
    full = moved._replace(capacity=20)
    more = step_costs("placed", TINY, hardware=shared, placed_tokens=full)
    assert sum(x.compute for x in more) == 36 + 4 * (6 * 2 + 2 + 2 * 20) / 5
    back = step_costs("placed", TINY, hardware=shared, placed_tokens=moved, backward=True)
    rewritten = 3 * 2 + 4 * 2 + 2 * (3 + 2) * (1 + 2 * 4)  # gradients have 4 bytes
    assert sum(x.compute for x in back) == 2.5 * 36 + 4 * rewritten / 5
    zigzag = step_costs("zigzag", TINY, hardware=shared)
    rewritten = 6 * 2 + 4 * (2 + 2 * 2)  # queries and keys of each of 4 steps
    assert sum(x.compute for x in zigzag) == 36 + 4 * rewritten / 5


def test_latency_and_caches_of_shared_memory():
    shared = Hardware(
        matmul_flops=1.0, link_bandwidth=2.0, link_latency=1.0, topology="shared_memory",
        cores=2, rank_latency=3.0, cache_bytes=20.0, cache_bandwidth=5.0,
    )  # fmt: skip
    seconds = lambda n, size: shared.exchange_seconds(size, num_ranks=n, inside=1)
    assert seconds(2, 0) == 1  # as many ranks as cores
    assert seconds(1, 0) == 1
    assert seconds(4, 2) == 1 + 3 + 8 / 5  # twice as many; all in the caches, read and written
    assert seconds(8, 2) == 1 + 3 * 3 + 10 / 5 + 6 / 2  # four times as many
    assert (
        dataclasses.replace(shared, cache_bytes=0).exchange_seconds(4, num_ranks=2, inside=1)
        == 1 + 8 / 2
    )
    two = dataclasses.replace(shared, near_cache_bytes=6.0, near_cache_bandwidth=30.0)
    seconds = lambda size: two.exchange_seconds(size, num_ranks=2, inside=1)
    assert seconds(1) == 1 + 2 / 30  # all in the nearest caches
    assert seconds(4) == 1 + 3 / 30 + 5 / 5
    assert seconds(7) == 1 + 3 / 30 + 7 / 5 + 4 / 2
    processes = dataclasses.replace(shared, copies=2)
    exchange = functools.partial(processes.exchange_seconds, num_ranks=4, inside=3)
    assert exchange(1) == 1 + 3 + 10 / 5 + 14 / 2  # 2 copies, 3 receivers, 4 ranks
    assert exchange(1, own_bytes=2) == exchange(1) + 8 / 2
