"""Traffic by the kind of link, and machines whose ranks share cores and memory, by hand."""

import numpy as np
import pytest

from jax_cp_dispatch import Hamilton, Placed, Ring, Zigzag
from jax_cp_dispatch.cost import Hardware, Moves, Traffic, Workload, rows_by_link

SENT = np.array([[9, 1, 0, 2], [3, 9, 0, 0], [0, 4, 9, 5], [0, 0, 6, 9]])


def test_rows_by_link():
    """Own rows do not count; the busiest rank counts what it sends or receives, the larger."""
    assert rows_by_link(SENT) == Traffic(21 / 4, 0.0, 9.0, 0.0)
    two = rows_by_link(SENT, ranks_per_node=2, capacity=30)
    assert two == Traffic(15 / 4, 6 / 4, 6.0, 4.0, 30)
    assert (two.total, two.times(2).total) == (21 / 4, 21 / 2)
    with pytest.raises(ValueError, match=r"4 ranks cannot be divided into nodes of 3. Pass a divi"):
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
    first = lambda keys: Placed().step_costs(TINY, hardware=NODES, moves=Moves(0, keys))[0]
    by_nic, by_port = Traffic(3.0, 1.0, 5.0, 4.0), Traffic(3.0, 1.0, 50.0, 4.0)
    assert first(by_nic)[1:] == (4 * 2 / 0.5, 8.0, 2.0, 10.0, 8.0)
    assert first(by_port)[1:] == (50 * 2, 8.0, 2.0, 100.0, 8.0)
    equally = 8 * 2 / 0.5, 24.0, 16.0, 8.0, 16.0  # to 3 others
    assert first(12)[1:] == pytest.approx(equally)


@pytest.mark.parametrize(
    "algorithm, between", [(Ring(), 1 / 2), (Hamilton(), 2 / 3), (Hamilton(nodes=2), 1 / 2)]
)
def test_share_between_nodes(algorithm, between):
    """Ring: the last of two ranks. Cycles: 2 of 3 other ranks. With nodes: 1 of 2 chunks."""
    for backward in (False, True):
        for step in algorithm.step_costs(TINY, hardware=NODES, backward=backward):
            assert step.between_bytes == pytest.approx(between * step.sent_bytes)
    prediction = algorithm.predict(TINY, hardware=NODES)
    assert prediction.bytes_per_rank == 3 * TINY.kv_bytes(2)
    assert prediction.bytes_between_nodes == pytest.approx(between * 3 * TINY.kv_bytes(2))


SHARED = Hardware(
    matmul_flops=1.0, link_bandwidth=2.0, link_latency=3.0, topology="shared_memory", cores=4,
    attention_flops=4.0, planned_attention_flops=2.0,
)  # fmt: skip


def test_exchanges_in_shared_memory():
    """All ranks share the bandwidth; keys that stay on their rank are copied, too."""
    steps = Placed().step_costs(TINY, hardware=SHARED, moves=Moves(0, 3))
    (exchange,) = [x for x in steps if x.communication]
    assert exchange.communication == 3 + 4 * 2 * (3 + 2) / 2
    assert exchange.sent_bytes == 6
    zigzag = [x.communication for x in Zigzag().step_costs(TINY, hardware=SHARED)]
    assert zigzag == [0, 3 + 4 * 4 / 2] * 3 + [0, 0]


@pytest.mark.parametrize(
    "algorithm, backward, expected",
    [
        # 36 pairs of all ranks; with a plan, each takes two seconds. Then q, out, and 5 keys.
        (Placed(), False, 2 * 36 + 4 * (2 * 2 + 2 * 5) / 2),
        # q, out, dout and dq; 5 keys, and their gradients of 4 bytes.
        (Placed(), True, 2.5 * 2 * 36 + 4 * (4 * 2 + 2 * 5 * (1 + 4)) / 2),
        # The same queries, and other keys, in each of four steps.
        (Zigzag(), False, 36 + 4 * 4 * (2 * 2 + 2 * 2) / 2),
        (Zigzag(), True, 2.5 * 36 + 4 * 4 * (4 * 2 + 2 * 2 * (1 + 4)) / 2),
    ],
)
def test_operands_are_copied_in_shared_memory(algorithm, backward, expected):
    steps = algorithm.step_costs(TINY, hardware=SHARED, backward=backward, moves=Moves(0, 3))
    assert sum(x.compute for x in steps) == expected


def test_buffers_are_copied_whole():
    rows = Traffic(3.0, 0.0, 3.0, 0.0, capacity=20)
    steps = Placed().step_costs(TINY, hardware=SHARED, moves=Moves(0, rows))
    assert sum(x.compute for x in steps) == 2 * 36 + 4 * (2 * 2 + 2 * 20) / 2
