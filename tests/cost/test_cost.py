"""The cost model: pairs against brute force, schedules computed by hand, and published trends.

Machines of the tests: attention runs at 4 FLOP/s, which is one pair of one head of size 1 per
second, and a link moves one byte per second. With one head of size 1 and one byte per element,
two tokens of keys and values are 4 bytes.
"""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
from array_masks import KINDS, random_mask
from hypothesis import given, strategies as st
from mask_oracle import batch_pairs, batch_visible, visible
from properties import examples

from jax_cp_dispatch import (
    Balanced,
    Halo,
    Hamilton,
    Placed,
    PlanConfig,
    Ring,
    Ulysses,
    Zigzag,
    cost,
)
from jax_cp_dispatch.cost.pairs import wasted_pairs  # inner: by brute force
from jax_cp_dispatch.masks import Causal, Chunked, SlidingWindow

SLOW = cost.Hardware(matmul_flops=4.0, link_bandwidth=1.0, link_latency=1.0, topology="full_mesh")
H100, CPU = cost.HARDWARE["h100"], cost.HARDWARE["cpu"]
TINY = cost.Workload(
    num_ranks=2, tokens_per_rank=2, num_heads=1, num_kv_heads=1, head_size=1, itemsize=1
)


def of(workload, **changes) -> Any:
    """A workload, or hardware, with other fields."""
    return dataclasses.replace(workload, **changes)


def predict(workload, hardware, **options):
    """By name; balanced attention by an estimate."""
    algorithms = Ring(), Zigzag(), Hamilton(), Balanced()
    return {x.name: x.predict(workload, hardware=hardware, **options) for x in algorithms}


def model(num_ranks=8, tokens_per_rank=4096, mask="full", lengths=None):
    """32 heads of 128 in bfloat16."""
    return cost.Workload(num_ranks, tokens_per_rank, 32, 32, 128, 2, lengths, mask)


# ---- Pairs.

WINDOWS = ((1, 0), (7, 0), (4, 2), (1, 9), (6, None), (None, 4), (99, 99))
MASKS = ["causal", "full", *(SlidingWindow(*x) for x in WINDOWS), *map(Chunked, (1, 3, 8, 99))]


def test_count_pairs():
    """Of a part of each document; without its length, the document ends with the part."""
    start, end, length = np.array([[0, 0, 4, 5], [1, 9, 9, 6], [9, 9, 12, 8]])
    for mask in MASKS:
        for lengths, options in ((length, {"length": length}), (end, {})):
            parts = zip(start, end, lengths, strict=True)
            want = [visible(mask, n)[a:b].sum() for a, b, n in parts]
            np.testing.assert_array_equal(cost.count_pairs(start, end, mask=mask, **options), want)


def test_rank_pairs():
    """Of each mask; odd numbers of tokens have blocks of two lengths."""
    rng = np.random.default_rng()
    sizes = [(1, 9), (2, 2), (3, 8), (4, 7), (7, 10)]
    for kind, (num_ranks, tokens) in ((kind, x) for kind in [*MASKS, *KINDS] for x in sizes):
        total = num_ranks * tokens
        ends = np.unique(rng.integers(0, total + 1, rng.integers(1, 6)))  # the rest is padding
        ids = np.searchsorted(ends, np.arange(total), "right")[None] + 1
        ids[ids > len(ends)] = 0
        mask, seen = kind, None
        if kind in KINDS:
            make, arrays, pairs = random_mask(kind, rng, ids)
            mask, seen = make(*arrays), batch_visible(ids, pairs)
        (seen,) = batch_pairs(kind, ids) if seen is None else seen
        block = np.searchsorted(
            np.arange(1, 2 * num_ranks) * tokens // 2, np.arange(total), "right"
        )
        lengths = np.diff(ends, prepend=0).tolist()
        for zigzag in (False, True):
            owner = np.minimum(block, 2 * num_ranks - 1 - block) if zigzag else block // 2
            one_hot = np.eye(num_ranks, dtype=int)[owner]
            options: Any = {"num_ranks": num_ranks, "tokens_per_rank": tokens, "mask": mask}
            got = cost.rank_pairs(lengths, zigzag=zigzag, **options)
            np.testing.assert_array_equal(got, one_hot.T @ seen @ one_hot)


# ---- Steps by hand: seconds of attention, of the exchange, and bytes.

TWO_HEADS = {"num_heads": 2, "num_kv_heads": 2}
ONE_KV_HEAD = {"num_heads": 2, "num_kv_heads": 1}
BY_HAND = [
    # Rank 1 is the slowest: 3 local pairs, then all 4 with rank 0. 1 s latency and 4 bytes.
    (Ring(), {}, False, [(3, 5, 4), (4, 0, 0)]),
    # Rank 0 holds tokens 0 and 3, rank 1 holds 1 and 2: 2 pairs each in the second step.
    (Zigzag(), {}, False, [(3, 5, 4), (2, 0, 0)]),
    (Hamilton(), {}, False, [(3, 5, 4), (2, 0, 0)]),
    # 5/2 of the FLOPs; dK and dV have 4 bytes per element and end with a separate step.
    (Zigzag(), {}, True, [(7.5, 5, 4), (5, 17, 16), (0, 17, 16)]),
    # 1 query row (1 byte) and 2 key rows (4 bytes) are sent, 1 row of output returns.
    (Balanced(), {}, False, [(0, 6, 5), (5, 0, 0), (0, 2, 1)]),
    (Balanced(), {}, True, [(0, 2, 1), (12.5, 0, 0), (0, 18, 17)]),
    # 3 key rows come before attention; dK and dV return after it.
    (Placed(), {}, False, [(0, 7, 6), (5, 0, 0)]),
    (Placed(), {}, True, [(12.5, 0, 0), (0, 25, 24)]),
    # Half of 2 rows of 2 heads of q (4 bytes), k and v (8 bytes) is sent; of the output, too.
    (Ulysses(), TWO_HEADS, False, [(0, 7, 6), (10, 0, 0), (0, 3, 2)]),
    (Ulysses(), ONE_KV_HEAD, False, [(0, 7, 6), (10, 0, 0), (0, 3, 2)]),  # the head is repeated
    (Ulysses(), TWO_HEADS, True, [(0, 3, 2), (25, 0, 0), (0, 7, 6)]),
    # Gradients of copies in float32.
    (Ulysses(), ONE_KV_HEAD, True, [(0, 3, 2), (25, 0, 0), (0, 19, 18)]),
]


def test_steps_of_two_ranks_by_hand():
    for algorithm, changes, backward, expected in BY_HAND:
        moves = cost.Moves(0, 3) if algorithm == Placed() else cost.Moves(1, 2)
        options: Any = {"hardware": SLOW, "backward": backward}
        steps = algorithm.step_costs(of(TINY, **changes), moves=moves, **options)
        np.testing.assert_allclose([step[:3] for step in steps], expected, err_msg=str(algorithm))
        assert not any(step.between_bytes for step in steps)
    with pytest.raises(ValueError, match="'ulysses' shares 1 heads over 2 ranks"):
        Ulysses().step_costs(TINY, hardware=SLOW)
    one_head_each = {"layout": "contiguous", "can_place": False}
    assert not Ulysses.candidates(TINY, SLOW, **one_head_each)
    assert Ulysses.candidates(of(TINY, **TWO_HEADS), SLOW, **one_head_each)


def test_predict_adds_up():
    ring, zigzag = (predict(TINY, SLOW)[x] for x in ("ring", "zigzag"))
    assert (ring.total, ring.compute, ring.communication) == (9, 7, 5)
    assert (ring.exposed_communication, ring.bytes_per_rank) == (2, 4)
    assert ring.imbalance == 7 / 5
    assert (zigzag.total, zigzag.imbalance) == (7, 1)
    both = predict(TINY, SLOW, with_backward=True)["zigzag"]
    assert (both.total, both.bytes_per_rank) == (7 + 7.5 + 17 + 17, 4 + 4 + 2 * 16)


def test_heads_in_two_parts_hide_half_of_an_exchange():
    """One of 3 KV heads comes first, and returns last; latents, and one head, move at once."""
    hardware = of(SLOW, link_latency=0.0)
    workload = of(TINY, num_heads=3, num_kv_heads=3)  # 5 pairs of a rank; a row of keys: 6 bytes
    steps = partial(Placed().step_costs, hardware=hardware, moves=cost.Moves(0, 1))
    forward, backward = (np.array(steps(workload, backward=x))[:, :2] for x in (False, True))
    np.testing.assert_allclose(forward, [[0, 2], [5, 4], [10, 0]])
    np.testing.assert_allclose(backward, [[25, 0], [12.5, 16], [0, 8]])  # gradients in float32
    for one_part in (TINY, of(workload, latent_size=3)):
        assert [x.compute > 0 for x in steps(one_part)] == [False, True]


def test_latents_by_hand():
    """Rows of 3 elements move in place of keys and values, and are expanded where they arrive."""
    workload = of(TINY, num_kv_heads=1, latent_size=3, expand_flops=0.0)
    plain, latent, costly = (
        Ring().step_costs(x, hardware=SLOW, backward=True)
        for x in (TINY, workload, of(workload, expand_flops=7.0))
    )
    row = 2 * TINY.num_kv_heads * TINY.head_size
    for x, y in zip(plain, latent, strict=True):
        assert y.sent_bytes == pytest.approx(x.sent_bytes * 3 / row)
    added = [y.compute - x.compute for x, y in zip(latent, costly, strict=True)]
    rows = TINY.rows_per_rank  # of each of two steps; expanded again, and two transposes
    expected = rows * 7.0 * 3 / SLOW.matmul_flops
    assert sum(x == pytest.approx(expected) for x in added) == TINY.num_ranks


def test_topologies():
    """One link; all four, a quarter of the bytes each. A port is full, and five ranks share."""
    workload = of(TINY, num_ranks=5, tokens_per_rank=8)
    for topology, ring, hamilton in (
        ("full_mesh", 1 + 16, 1 + 4),
        ("nvswitch", 1 + 16, 1 + 16),
        ("shared_memory", 1 + 5 * 16, 1 + 5 * 16),
    ):
        hardware = of(SLOW, topology=topology)
        for algorithm, seconds in ((Ring(), ring), (Zigzag(), ring), (Hamilton(), hamilton)):
            exchanges = [x.communication for x in algorithm.step_costs(workload, hardware=hardware)]
            assert sum(exchanges) == 4 * seconds
            assert max(exchanges) == seconds


@pytest.mark.parametrize("num_ranks, mask", [(1, "causal"), (2, "full"), (8, "causal")])
def test_schedules_differ_in_links_only(num_ranks, mask):
    """If links cost nothing, times are equal."""
    free = of(SLOW, link_bandwidth=1e99, link_latency=0)
    found = predict(model(num_ranks, mask=mask), free, with_backward=True)
    seconds = {name: x.total for name, x in found.items()}
    assert seconds["hamilton"] == pytest.approx(seconds["zigzag"])
    assert seconds["balanced"] == pytest.approx(seconds["zigzag"])
    slowest = 2 - 1 / num_ranks if mask == "causal" else 1  # its first step is half as long
    assert seconds["ring"] == pytest.approx(slowest * seconds["zigzag"], 1e-3)


# ---- Documents, machines, and published trends.


def test_documents():
    """One fills half of the sequence, short ones the rest: the slowest rank decides."""
    lengths = ((4 * 4096, *(512,) * 32),)
    found = predict(model(lengths=lengths, mask="causal"), H100)
    assert found["ring"].imbalance > 3
    assert found["zigzag"].imbalance > 1.5
    assert found["balanced"].imbalance == 1
    rows = predict(model(lengths=lengths * 3, mask="causal"), H100)
    assert rows["ring"].compute == pytest.approx(3 * found["ring"].compute)
    # Short documents stay local; one long document moves everywhere; a given plan decides.
    short, long = (model(lengths=x, mask="causal") for x in (((4096,) * 8,), None))
    assert predict(short, SLOW)["balanced"].bytes_per_rank == 0
    assert predict(long, SLOW)["balanced"].bytes_per_rank > 7 * model().kv_bytes(4096)
    assert predict(long, SLOW)["balanced"].imbalance == 1
    plan = Balanced().predict(long, hardware=SLOW, moves=cost.Moves(10.0, 20.0))
    assert plan.bytes_per_rank == 2 * model().q_bytes(10) + model().kv_bytes(20)


def test_shared_memory_hides_nothing_and_shares_idle_cores():
    workload = model(mask="causal")
    for name, prediction in predict(workload, CPU, with_backward=True).items():
        assert prediction.total == pytest.approx(prediction.compute + prediction.communication)
        # The last rank of a ring does one of 32 parts of the work alone, on one of two cores.
        assert prediction.imbalance == pytest.approx(33 / 32 if name == "ring" else 1, rel=1e-3)
    assert predict(workload, of(CPU, cores=1))["ring"].imbalance == pytest.approx(1)


def test_published_trend_of_machines():
    """arXiv:2509.26541: largest gain on 8 MI300X, smallest on 8 H100; two H100 nodes between."""

    def gain(hardware, num_ranks):
        found = predict(model(num_ranks, 1024, mask="causal"), hardware)
        return found["zigzag"].total / found["hamilton"].total

    assert gain(H100, 8) == 1 < gain(H100, 16) < gain(cost.HARDWARE["mi300x"], 8) < 7


# ---- Nodes: traffic by the kind of link.

NODES = of(SLOW, ranks_per_node=4, rails=4, rail_bandwidth=0.5, rail_latency=3.0, link_latency=0.0)


@pytest.mark.parametrize(
    "rails, ring, flat, two_level",
    [
        # KV of a rank: 28 bytes. Ring: all 28 through one NIC of 1/2 byte/s, latency 3 s.
        # Flat: 4 of 7 chunks through a NIC each. Two-level: 1 of 4 chunks.
        (4, 3 + 56, 3 + 16 / 0.5, 3 + 7 / 0.5),
        (1, 3 + 56, 3 + 4 * 16 / 0.5, 3 + 4 * 7 / 0.5),  # four ranks share the NIC
    ],
)
def test_two_nodes(rails, ring, flat, two_level):
    hardware, workload = of(NODES, rails=rails), of(TINY, num_ranks=8, tokens_per_rank=14)
    expected = {Ring(): ring, Zigzag(): ring, Hamilton(): flat, Hamilton(nodes=2): two_level}
    expected[Hamilton(nodes=4)] = flat  # other nodes than those of the hardware
    for algorithm, seconds in expected.items():
        assert algorithm.step_costs(workload, hardware=hardware)[0].communication == seconds


SENT = np.array([[9, 1, 0, 2], [3, 9, 0, 0], [0, 4, 9, 5], [0, 0, 6, 9]])


def test_rows_by_link():
    """Own rows do not count; the busiest rank counts what it sends or receives, the larger."""
    one = cost.rows_by_link(SENT)
    two = cost.rows_by_link(SENT, ranks_per_node=2, capacity=30)
    assert one[:5] == (21 / 4, 0.0, 9.0, 0.0, None)
    assert two[:5] == (15 / 4, 6 / 4, 6.0, 4.0, 30)
    for traffic in (one, two, two.times(2), two.plus(two)):
        assert traffic.of_ranks and tuple(map(max, traffic.of_ranks)) == traffic[2:4]
    assert (two.total, two.times(2).total) == (21 / 4, 21 / 2)
    with pytest.raises(ValueError, match=r"4 ranks cannot be divided into nodes of 3. Pass a divi"):
        cost.rows_by_link(SENT, ranks_per_node=3)


def test_the_slowest_rank_of_a_plan_decides():
    """Rank 2 has 8 of 36 pairs and sends 9 rows of 2 bytes on 3 links; others end before it."""
    workload, pairs = of(TINY, num_ranks=4), np.array([11, 10, 8, 7])
    moves = cost.Moves(0, cost.rows_by_link(SENT), pairs)
    found = Placed().predict(workload, hardware=SLOW, moves=moves)
    assert (found.compute, found.communication, found.imbalance) == (8, 1 + 2 * 9 / 3, 8 / 9)


# One pair takes one second; links move one byte per second, NICs half a byte.
PAIRS = of(SLOW, link_latency=0.0, topology="nvswitch", ranks_per_node=2)
PAIRS = of(PAIRS, rails=2, rail_bandwidth=0.5)
SMALL = of(TINY, num_ranks=4)


def test_traffic_by_link():
    """Two bytes per row: the busiest NIC decides, then the busiest port; means are reported."""
    first = lambda keys: Placed().step_costs(SMALL, hardware=PAIRS, moves=cost.Moves(0, keys))[0]
    by_nic, by_port = cost.Traffic(3.0, 1.0, 5.0, 4.0), cost.Traffic(3.0, 1.0, 50.0, 4.0)
    assert first(by_nic)[1:] == (4 * 2 / 0.5, 8.0, 2.0, 10.0, 8.0)
    assert first(by_port)[1:] == (50 * 2, 8.0, 2.0, 100.0, 8.0)
    equally = 8 * 2 / 0.5, 24.0, 16.0, 8.0, 16.0  # to 3 others
    assert first(12)[1:] == pytest.approx(equally)
    # Ring: the last of two ranks. Cycles: 2 of 3 other ranks. With nodes: 1 of 2 chunks.
    for algorithm, between in ((Ring(), 1 / 2), (Hamilton(), 2 / 3), (Hamilton(nodes=2), 1 / 2)):
        for backward in (False, True):
            for step in algorithm.step_costs(SMALL, hardware=PAIRS, backward=backward):
                assert step.between_bytes == pytest.approx(between * step.sent_bytes)
        prediction = algorithm.predict(SMALL, hardware=PAIRS)
        assert prediction.bytes_per_rank == 3 * SMALL.kv_bytes(2)
        assert prediction.bytes_between_nodes == pytest.approx(between * 3 * SMALL.kv_bytes(2))


def test_links_inside_and_between_nodes():
    """2 nodes of 4: a rank's heads of keys of a node's tokens go to the other node, once."""
    hardware = of(H100, ranks_per_node=4, rails=2)
    workload = cost.Workload(8, 1024, num_heads=8, num_kv_heads=4, head_size=128, itemsize=2)
    q, kv = 1024 * 8 * 128 * 2, 2 * 1024 * 4 * 128 * 2  # bytes of a rank
    options: dict[str, Any] = {"hardware": hardware, "with_backward": False}
    ring, two = (x.predict(workload, **options) for x in (Ring(), Ulysses(Ring())))
    assert two.bytes_between_nodes == kv
    assert two.bytes_per_rank - two.bytes_between_nodes == (q + kv + q) * 3 / 4
    assert ring.bytes_per_rank == 7 * kv
    steps = Ulysses(Ring()).step_costs(workload, hardware=hardware)
    seconds = hardware.rail_latency + kv / (hardware.rail_bandwidth * 2 / 4)  # 4 ranks, 2 NICs
    assert max(step.communication for step in steps) == pytest.approx(seconds)
    # In units of a rank's keys, the last rank computes 1/2 + 7; the last node 4 * 4 / 2 + 4 * 4.
    assert two.compute == pytest.approx(ring.compute * (24 / 4) / 7.5, rel=1e-3)
    assert Ulysses(Hamilton()).predict(workload, **options).total < ring.total
    back = Ulysses(Zigzag()).predict(workload, hardware=hardware, with_backward=True)
    assert back.bytes_between_nodes == kv * (1 + 1 + 2 * 2)  # again; gradients twice, in float32
    with pytest.raises(ValueError, match="'ulysses_ring' shares 4 heads over 8 ranks"):
        fewer, one_node = of(workload, num_heads=4), of(hardware, ranks_per_node=8)
        Ulysses(Ring()).step_costs(fewer, hardware=one_node)
    # A window moves only its rows: half of the ranks' other heads, on the other node.
    two = Ulysses(Halo()).predict(of(workload, mask=SlidingWindow(129)), hardware=hardware)
    assert two.bytes_between_nodes == 128 * 2 * 1 * 128 * 2 / 2  # one of two nodes, one KV head


def test_predicted_bytes_of_ulysses():
    """Shares of q and of the output; whole latent rows, whose gradients are float32."""
    sizes: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 16, "head_size": 128, "itemsize": 2}
    workload = cost.Workload(8, 1024, **sizes, latent_size=576, expand_flops=1e6)
    q, latents = 1024 * 16 * 128 * 2, 1024 * 576 * 2
    forward = Ulysses().predict(workload, hardware=H100)
    assert forward.bytes_per_rank == 2 * q * 7 / 8 + 7 * latents
    both = Ulysses().predict(workload, with_backward=True, hardware=H100)
    assert both.bytes_per_rank == 4 * q * 7 / 8 + (1 + 2) * 7 * latents


# ---- Machines whose ranks share cores and memory: all share the bandwidth, operands are copied.

SHARED = cost.Hardware(
    matmul_flops=1.0, link_bandwidth=2.0, link_latency=3.0, topology="shared_memory", cores=4,
    attention_flops=4.0, planned_attention_flops=2.0,
)  # fmt: skip


def test_exchanges_in_shared_memory():
    """Keys that stay on their rank are copied, too."""
    steps = Placed().step_costs(SMALL, hardware=SHARED, moves=cost.Moves(0, 3))
    (exchange,) = [x for x in steps if x.communication]
    assert exchange.communication == 3 + 4 * 2 * (3 + 2) / 2
    assert exchange.sent_bytes == 6
    zigzag = [x.communication for x in Zigzag().step_costs(SMALL, hardware=SHARED)]
    assert zigzag == [0, 3 + 4 * 4 / 2] * 3 + [0, 0]


@pytest.mark.parametrize(
    "algorithm, backward, keys, expected",
    [
        # 36 pairs of all ranks; with a plan, each takes two seconds. Then q, out, and 5 keys.
        (Placed(), False, 3, 2 * 36 + 4 * (2 * 2 + 2 * 5) / 2),
        # q, out, dout and dq; 5 keys, and their gradients of 4 bytes.
        (Placed(), True, 3, 2.5 * 2 * 36 + 4 * (4 * 2 + 2 * 5 * (1 + 4)) / 2),
        # The same queries, and other keys, in each of four steps.
        (Zigzag(), False, 3, 36 + 4 * 4 * (2 * 2 + 2 * 2) / 2),
        (Zigzag(), True, 3, 2.5 * 36 + 4 * 4 * (4 * 2 + 2 * 2 * (1 + 4)) / 2),
        # Whole buffers.
        (Placed(), False, cost.Traffic(3.0, 0.0, 3.0, 0.0, 20), 2 * 36 + 4 * (2 * 2 + 2 * 20) / 2),
    ],
)
def test_operands_are_copied_in_shared_memory(algorithm, backward, keys, expected):
    steps = algorithm.step_costs(
        SMALL, hardware=SHARED, backward=backward, moves=cost.Moves(0, keys)
    )
    assert sum(x.compute for x in steps) == expected


# ---- Pairs outside the mask that attention computes, because it computes whole tiles.


def computed_pairs(start, end, offset_q, offset_k, tile):
    """Pairs of the tiles that hold a query [offset_q + i] with the keys [start, end) of it."""
    queries, keys = tile
    first = np.flatnonzero(np.r_[True, np.diff((np.arange(len(start)) + offset_q) // queries) > 0])
    begin = (np.minimum.reduceat(start, first) + offset_k) // keys
    stop = -(-(np.maximum.reduceat(end, first) + offset_k) // keys)
    return queries * keys * int((stop - begin).sum())


@examples(20)
@given(data=st.data())
def test_waste_is_the_mean_over_all_places_of_the_tiles(data):
    """Up to terms that do not grow with the piece: a tile and its neighbour at each end."""
    tile = data.draw(st.sampled_from([(4, 4), (2, 6), (6, 3)]))
    length = data.draw(st.integers(20, 60))
    start = data.draw(st.integers(0, length - 12))
    end = data.draw(st.integers(start + 12, length))
    left = data.draw(st.none() | st.integers(8, 40))
    right = data.draw(st.sampled_from([0, None, 9]))
    query = np.arange(start, end)
    first = np.zeros_like(query) if left is None else np.maximum(query - left, 0)
    last = np.full_like(query, length) if right is None else np.minimum(query + right + 1, length)
    places = [(q, k) for q in range(tile[0]) for k in range(tile[1])]
    mean = np.mean([computed_pairs(first, last, q, k, tile) for q, k in places])
    mask = SlidingWindow(None if left is None else left + 1, right)
    got = (last - first).sum() + wasted_pairs(start, end, length, mask, tile)
    assert abs(got - mean) <= 2 * tile[0] * (tile[0] + tile[1])
    assert wasted_pairs(start, end, length, Causal(), (1, 1)) == 0
    assert wasted_pairs(start, start, length, mask, tile) == 0


# ---- Invalid calls.


@pytest.mark.parametrize(
    "field, refused, allowed",
    [
        ("link_bandwidth", (0.0, -1.0, float("nan"), None), (1e-300, float("inf"))),
        ("rail_bandwidth", (-1.0, float("nan")), (0.0, float("inf"))),
        ("matmul_flops", (0, float("inf"), float("nan"), None), (1, 1e300)),
        ("attention_flops", (0, -1.0), (None, np.float32(2))),
        ("planned_attention_flops", (0.0, float("inf")), (None, 2)),
        ("link_latency", (-1.0, float("inf")), (0, 1.0)),
        ("rails", (0, -1), (1,)),
        ("ranks_per_node", (0,), (None, 1)),
    ],
)
def test_rates_without_a_time_are_refused(unchecked_types, field, refused, allowed):
    """Plans divide by bandwidths, so a rate of 0 was found there, without its name."""
    for value in refused:
        with pytest.raises(ValueError, match=rf"^Hardware: {field} is {value}; it needs to be"):
            of(NODES, **{field: value})
    for value in allowed:
        hardware = of(NODES, **{field: value})
        num_ranks = 8 if hardware.rail_bandwidth else 4  # two nodes, or one
        times = PlanConfig(hardware=hardware, ranks_per_node=4).row_times(16, num_ranks)
        assert min(times) >= 0


def test_errors_name_the_remedy(unchecked_types):
    sent: Any = (SENT[0], SENT[:2], SENT / 2, None)
    for each in sent:
        with pytest.raises(TypeError, match=r"rows_by_link: sent is .*integers \[num_ranks, num_r"):
            cost.rows_by_link(each)
    with pytest.raises(ValueError, match=r"'placed' needs moves.*of the plan of place_tokens"):
        Placed().step_costs(TINY, hardware=SLOW)
    with pytest.raises(ValueError, match=r"12 ranks cannot be divided into nodes of 8. Pass a mul"):
        predict(model(12), H100)
    with pytest.raises(ValueError, match="'torus'; it needs to be one of 'full_mesh'"):
        of(SLOW, topology="torus")
    with pytest.raises(ValueError, match=r"have 5 tokens, but .* 2 x 2 = 4.*tokens_per_rank>=3"):
        of(TINY, lengths=((4,), (2, 3)))
