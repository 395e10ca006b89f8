"""The method that "auto" chooses, and profiles of what overlapped."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter, profiling
from jax_cp_dispatch.comm_gemm import choose_comm_gemm
from jax_cp_dispatch.cost import HARDWARE, CommGemmShape, comm_gemm_methods, predict_comm_gemm

AG, RS = "all_gather_matmul", "matmul_reduce_scatter"


def mapped(fn, mesh, **options):
    """The product of whole arrays, like `x @ w`."""
    rows, columns, gathers = P("tp"), P(None, "tp"), fn is all_gather_matmul
    local = lambda x, w: fn(x, w, axis_name="tp", **options)
    specs = (rows, columns) if gathers else (columns, rows)
    out = columns if gathers else rows
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out))


@pytest.mark.parametrize("op", [AG, RS])
@pytest.mark.parametrize("hardware", sorted(HARDWARE))
def test_predict_comm_gemm_is_at_least_the_bound(op, hardware):
    """Overlap is never faster than the product alone; without overlap, times add up."""
    machine = dataclasses.replace(HARDWARE[hardware], ranks_per_node=None)
    sizes = (1, 1, 1), (1, 1 << 14, 1), (1 << 16, 3, 1 << 14), (777, 1 << 13, 1 << 12)
    for num_ranks, (m, k, n) in itertools.product((1, 2, 3, 8, 64), sizes):
        shape = CommGemmShape(op, m, k, n, num_ranks, 2)
        shared = num_ranks if machine.topology == "shared_memory" else 1
        gemm = shared * shape.flops / machine.matmul_flops
        for method in comm_gemm_methods(op, num_ranks).values():
            assert predict_comm_gemm(shape, method, hardware=machine) >= gemm * (1 - 1e-9)


def test_choose_comm_gemm_overlaps_only_if_there_is_communication_to_hide():
    large = CommGemmShape(AG, 16384, 8192, 3584, 8, 2)
    choice = choose_comm_gemm(large, hardware=HARDWARE["h100"])
    assert choice.options["method"] == "RING_EXCHANGE"
    assert choice.seconds[choice.label] < choice.seconds["none"]
    alone = dataclasses.replace(large, num_ranks=1)
    choice = choose_comm_gemm(alone, hardware=HARDWARE["h100"])
    assert choice.label == "none" and "no method with overlap is faster" in choice.reason


def derivative_calls(fn, **options):
    """Returns the lowered GEMM calls of a product and its gradient, forward first."""
    shapes = ((4096, 1024), (1024, 512))
    x, w = (jax.ShapeDtypeStruct(shape, "f") for shape in shapes)
    product = mapped(fn, Mesh(np.array(jax.devices()[:4]), ("tp",)), **options)
    text = jax.jit(jax.value_and_grad(lambda x, w: product(x, w).sum())).lower(x, w).as_text()
    calls = [line for line in text.splitlines() if "jax_cp_dispatch.gemm" in line]
    assert len(calls) == 2
    return calls


def test_auto_follows_the_choice_also_backward():
    shapes = CommGemmShape(AG, 4096, 1024, 128, 4, 4), CommGemmShape(RS, 4096, 128, 1024, 4, 4)
    assert [choose_comm_gemm(shape).label for shape in shapes] == ["ring direct"] * 2
    calls = derivative_calls(all_gather_matmul)
    assert all("comm_overlap_method = 3" in call and "copies = false" in call for call in calls)
    assert "comm_type = 2" in calls[0] and "comm_type = 1" in calls[1]


def test_the_derivative_of_a_sum_is_a_ring():
    """Of a pipeline, one with copies; of a ring, one with copies as that has."""
    for options, copies in (
        ({"method": "pipeline"}, "true"),
        ({"method": "ring", "use_ce": False}, "false"),
        ({"method": "ring"}, "true"),
    ):
        _, backward = derivative_calls(matmul_reduce_scatter, **options)
        assert "comm_type = 2" in backward and "comm_overlap_method = 3" in backward
        assert f"copies = {copies}" in backward


def test_seconds_of_overlapping_spans_count_once_and_hidden_ones_not():
    spans = [
        profiling.Span(rank, kind, "", start, duration)
        for rank, kind, start, duration in (
            (0, profiling.COMPUTATION, 1.0, 2.0),
            (0, profiling.COMPUTATION, 2.0, 2.0),
            (0, profiling.COMMUNICATION, 0.0, 1.5),
            (0, profiling.COMMUNICATION, 3.5, 1.5),
            (1, profiling.COMMUNICATION, 0.0, 3.0),
            (2, profiling.COMPUTATION, 0.0, 1.0),
        )
    ]
    assert profiling.busy_seconds(spans, profiling.COMPUTATION) == {0: 3.0, 2: 1.0}
    assert profiling.busy_seconds(spans, profiling.COMMUNICATION) == {0: 3.0, 1: 3.0}
    assert profiling.exposed_seconds(spans) == {0: 2.0, 1: 3.0}


def test_spans_of_a_ring_match_its_schedule(tmp_path):
    p = 4
    mesh = Mesh(np.array(jax.devices()[:p]), ("tp",))
    x, w = jnp.ones((p * 64, 32)), jnp.ones((32, 64))
    profile = profiling.overlap_profile(mapped(all_gather_matmul, mesh, method="ring"), x, w)
    np.testing.assert_array_equal(profile.result, x @ w)
    names = lambda kind, rank: [
        s.name.split(" (")[0] for s in profile.spans if (s.kind, s.rank) == (kind, rank)
    ]
    for rank in range(p):
        chunks = [(rank - step) % p for step in range(p)]
        assert names(profiling.COMPUTATION, rank) == [f"GEMM {c}" for c in chunks]
        assert names(profiling.COMMUNICATION, rank) == [f"send {c}" for c in chunks[:-1]]
    assert profile.communication > 0 and profile.computation > 0
    # The two sums add the same durations in another order.
    assert profile.exposed_communication <= profile.communication * (1 + 1e-12)
    trace = json.loads(profile.write_trace(tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(profile.spans)


def test_groups_have_separate_ranks_and_a_direct_ring_sends_nothing():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    fn = mapped(matmul_reduce_scatter, mesh, method="ring", use_ce=False)
    profile = profiling.overlap_profile(fn, jnp.ones((8, 8)), jnp.ones((8, 4)))
    assert {s.rank for s in profile.spans} == set(range(8))
    assert profile.communication == profile.exposed_communication == 0.0
