"""Profiles of overlapped GEMMs: spans, and the share of communication that was hidden."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.profiling import overlap_profile
from jax_cp_dispatch.timeline import (
    COMMUNICATION,
    COMPUTATION,
    Span,
    busy_seconds,
    exposed_seconds,
)


def span(rank, kind, start, duration):
    return Span(rank, kind, "", start, duration)


def test_seconds_of_overlapping_spans_count_once_and_hidden_ones_not():
    spans = [
        span(0, COMPUTATION, 1.0, 2.0),
        span(0, COMPUTATION, 2.0, 2.0),
        span(0, COMMUNICATION, 0.0, 1.5),
        span(0, COMMUNICATION, 3.5, 1.5),
        span(1, COMMUNICATION, 0.0, 3.0),
        span(2, COMPUTATION, 0.0, 1.0),
    ]
    assert busy_seconds(spans, COMPUTATION) == {0: 3.0, 2: 1.0}
    assert busy_seconds(spans, COMMUNICATION) == {0: 3.0, 1: 3.0}
    assert exposed_seconds(spans) == {0: 2.0, 1: 3.0}


def mapped(fn, mesh, **options):
    return jax.jit(
        jax.shard_map(
            lambda x, w: fn(x, w, axis_name="tp", **options),
            mesh=mesh,
            in_specs=(P("tp"), P(None, "tp"))
            if fn is all_gather_matmul
            else (P(None, "tp"), P("tp")),
            out_specs=P(None, "tp") if fn is all_gather_matmul else P("tp"),
        )
    )


def test_spans_of_a_ring_match_its_schedule(tmp_path):
    p = 4
    mesh = Mesh(np.array(jax.devices()[:p]), ("tp",))
    x, w = jnp.ones((p * 64, 32)), jnp.ones((32, 64))
    profile = overlap_profile(mapped(all_gather_matmul, mesh, method="ring"), x, w)
    np.testing.assert_array_equal(profile.result, x @ w)
    names = lambda kind, rank: [
        s.name.split(" (")[0] for s in profile.spans if (s.kind, s.rank) == (kind, rank)
    ]
    for rank in range(p):
        chunks = [(rank - step) % p for step in range(p)]
        assert names(COMPUTATION, rank) == [f"GEMM {c}" for c in chunks]
        assert names(COMMUNICATION, rank) == [f"send {c}" for c in chunks[:-1]]
    assert profile.communication > 0 and profile.computation > 0
    # The two sums add the same durations in another order.
    assert profile.exposed_communication <= profile.communication * (1 + 1e-12)
    trace = json.loads(profile.write_trace(tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(profile.spans)


def test_groups_have_separate_ranks_and_a_direct_ring_sends_nothing():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    fn = mapped(matmul_reduce_scatter, mesh, method="ring", use_ce=False)
    profile = overlap_profile(fn, jnp.ones((8, 8)), jnp.ones((8, 4)))
    assert {s.rank for s in profile.spans} == set(range(8))
    assert profile.communication == profile.exposed_communication == 0.0


def test_a_program_without_overlap_is_rejected():
    with pytest.raises(ValueError, match="ran no GEMM with communication on a transport"):
        overlap_profile(jax.jit(lambda x: x + 1), jnp.ones(3))
