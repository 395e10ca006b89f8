"""Heads shared over one mesh axis, and another algorithm over the axis before it.

Its values for masks, documents and layouts are in test_values.py.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxprs import runs
from on_mesh import collectives_over, permuted_mesh
from sequences import TOLERANCE, Case, dense, draw, relative_errors

from jax_cp_dispatch import Halo, Hamilton, Ring, Ulysses, Zigzag, context_parallel_attention
from jax_cp_dispatch.cost import HARDWARE, Workload
from jax_cp_dispatch.masks import SlidingWindow

AXES = "outer", "inner"
CASE = Case("ring", 1, 32, documents="segments", batch=2, heads=(4, 2))


def test_beside_a_tensor_axis():
    """Over 2 x 2 ranks; a device of the tensor axis has one KV head for two inner ranks."""
    mesh = permuted_mesh((2, 2, 2), (*AXES, "tp"))
    operands = draw(CASE)
    segment_ids = operands[4]
    options: dict[str, Any] = {"mesh": mesh, "axis_name": AXES, "segment_ids": segment_ids}
    options |= {"algorithm": Ulysses(outer=Zigzag()), "batch_axis": (), "head_axis": "tp"}
    attend = partial(context_parallel_attention, **options)

    @jax.jit
    def run(q, k, v, g):
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(g)

    sharding = NamedSharding(mesh, P(None, AXES, "tp"))
    arrays = jax.device_put(operands[:4], sharding)
    compiled = run.lower(*arrays).compile()
    assert collectives_over(compiled, mesh, "tp") == []
    got = [
        np.where((segment_ids > 0)[..., None, None], np.asarray(x), 0) for x in compiled(*arrays)
    ]
    errors = relative_errors(got, dense(CASE, operands))
    assert max(errors.values()) <= TOLERANCE["float32"], errors


def test_exchanges():
    """There and back between the ranks of a node; between nodes those of the ring."""
    mesh = permuted_mesh((4, 2), AXES)
    x = jax.ShapeDtypeStruct((1, 64, 4, 8), np.float32)
    options: dict[str, Any] = {"mesh": mesh, "axis_name": AXES, "batch_axis": (), "head_axis": ()}
    attend = partial(context_parallel_attention, algorithm=Ulysses(Ring()), **options)
    assert runs(jax.make_jaxpr(attend)(x, x, x).jaxpr)["dispatch"] == 2 + 3


def test_predicted_from_the_links_inside_and_between_nodes():
    """2 nodes of 4: a rank's heads of keys of a node's tokens go to the other node, once."""
    hardware = dataclasses.replace(HARDWARE["h100"], ranks_per_node=4, rails=2)
    workload = Workload(8, 1024, num_heads=8, num_kv_heads=4, head_size=128, itemsize=2)
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
    one_node = dataclasses.replace(hardware, ranks_per_node=8)
    with pytest.raises(ValueError, match="'ulysses_ring' shares 4 heads over 8 ranks"):
        fewer = dataclasses.replace(workload, num_heads=4)
        Ulysses(Ring()).step_costs(fewer, hardware=one_node)


def test_windows_between_nodes():
    """A window moves only its rows, also between nodes."""
    hardware = dataclasses.replace(HARDWARE["h100"], ranks_per_node=4)
    mask = SlidingWindow(129)
    workload = Workload(8, 1024, num_heads=8, num_kv_heads=4, head_size=128, itemsize=2, mask=mask)
    two = Ulysses(Halo()).predict(workload, hardware=hardware)
    assert two.bytes_between_nodes == 128 * 2 * 1 * 128 * 2 / 2  # one of two nodes, one KV head
