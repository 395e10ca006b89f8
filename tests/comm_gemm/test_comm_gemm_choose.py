"""The method that "auto" chooses: predictions, measured tables, and the table file."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import Mesh, PartitionSpec as P
from properties import examples

from jax_cp_dispatch import all_gather_matmul, choose_comm_gemm, matmul_reduce_scatter
from jax_cp_dispatch.buffers import CommOverlapMethod, CommOverlapType
from jax_cp_dispatch.comm_gemm.choice.overlaps import (
    MatmulSizes,
    OverlapOptions,
    choose_overlaps,
)
from jax_cp_dispatch.cost import HARDWARE, CommGemmShape, comm_gemm_methods, predict_comm_gemm
from jax_cp_dispatch.profiling import TuningTable, current_tuning, tune, use_tuning

AG, RS = "all_gather_matmul", "matmul_reduce_scatter"
SHAPE = CommGemmShape(AG, 4096, 1024, 128, 8, 4)


@pytest.fixture(autouse=True)
def no_table():
    before = current_tuning()
    use_tuning(None)
    yield
    use_tuning(before)


def table(**seconds):
    return TuningTable({}, {SHAPE: {label.replace("_", " "): t for label, t in seconds.items()}})


@given(
    op=st.sampled_from([AG, RS]),
    m=st.integers(1, 1 << 16),
    k=st.integers(1, 1 << 14),
    n=st.integers(1, 1 << 14),
    num_ranks=st.integers(1, 64),
    hardware=st.sampled_from(sorted(HARDWARE)),
)
@examples(50)
def test_predict_comm_gemm_is_at_least_the_bound(op, m, k, n, num_ranks, hardware):
    """Overlap is never faster than the product alone; without overlap, times add up."""
    machine = dataclasses.replace(HARDWARE[hardware], ranks_per_node=None)
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


def test_a_measured_shape_decides_and_the_nearest_corrects_others():
    measured = table(none=1.0, ring=0.5, ring_direct=2.0, ring_pairs=3.0)
    choice = choose_comm_gemm(SHAPE, table=measured)
    assert (choice.label, choice.options) == ("ring", {"method": "RING_EXCHANGE", "use_ce": True})
    assert "is measured to take" in choice.reason
    near = dataclasses.replace(SHAPE, m=2048)
    choice = choose_comm_gemm(near, table=measured)
    assert choice.label == "ring" and "from M=4096" in choice.reason
    other = dataclasses.replace(SHAPE, num_ranks=4)  # no similar shape is measured
    without = choose_comm_gemm(other)
    assert choose_comm_gemm(other, table=measured).seconds == without.seconds


def test_auto_follows_use_tuning_also_backward():
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    x, w = jnp.ones((8, 6)), jnp.ones((6, 4))
    forward = CommGemmShape(AG, 8, 6, 1, 4, 4)
    backward = CommGemmShape(RS, 8, 1, 6, 4, 4)
    use_tuning(
        TuningTable(
            {},
            {forward: {"none": 2.0, "ring pairs": 1.0}, backward: {"none": 2.0, "pipeline 2": 1.0}},
        )
    )
    product = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, axis_name="tp"),
        mesh=mesh,
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    text = jax.jit(jax.value_and_grad(lambda x, w: product(x, w).sum())).lower(x, w).as_text()
    calls = [line for line in text.splitlines() if "jax_cp_dispatch.gemm" in line]
    assert len(calls) == 2
    assert "aggregate = true" in calls[0] and "comm_type = 2" in calls[0]
    assert "comm_overlap_method = 2" in calls[1] and "num_splits = 2" in calls[1]


def test_tune_measures_every_method_and_the_table_survives_a_file(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    shapes = [(AG, 8, 6, 4), (RS, 8, 4, 6)]
    measured = tune(shapes, mesh=mesh, axis_name="tp", repeats=1)
    assert [shape.op for shape in measured.seconds] == [AG, RS]
    for shape, seconds in measured.seconds.items():
        assert (shape.m, shape.num_ranks) == (8, 2)
        assert set(seconds) == set(comm_gemm_methods(shape.op, 2))
        assert all(t > 0 for t in seconds.values())
    path = measured.save(tmp_path / "table.json")
    assert TuningTable.load(path) == measured
    program = (
        "from jax_cp_dispatch import choose_comm_gemm\n"
        "from jax_cp_dispatch.profiling import current_tuning\n"
        "for shape in current_tuning().seconds:\n"
        "    print(choose_comm_gemm(shape, table=current_tuning()).label)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "JAX_CP_DISPATCH_TUNING": str(path)}
        | {"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    here = [choose_comm_gemm(shape, table=measured).label for shape in measured.seconds]
    assert done.stdout.split("\n")[:-1] == here


def test_a_file_that_is_no_table(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"machine": {}}))
    with pytest.raises(ValueError, match=r"is not a table that tune saved .* Tune again"):
        TuningTable.load(broken)


def test_comm_gemm_methods_of_one_rank():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    product = jax.shard_map(
        lambda x, w: matmul_reduce_scatter(x, w, axis_name="tp"),
        mesh=mesh,
        in_specs=(P(None, "tp"), P("tp")),
        out_specs=P("tp"),
    )
    np.testing.assert_array_equal(product(jnp.ones((4, 3)), jnp.ones((3, 2))), np.full((4, 2), 3))


def test_the_derivative_of_a_pipeline_is_a_ring_with_copies():
    """The derivative of a ring without copies is a ring without copies."""
    sizes = MatmulSizes(
        comm_type=CommOverlapType.RS,
        m=64,
        k=8,
        n=8,
        slot_rows=64,
        num_ranks=4,
        dtype="float32",
        sum_dtype="float32",
    )
    for options, copies in (
        (OverlapOptions(method="pipeline"), True),
        (OverlapOptions(method="ring", use_ce=False), False),
        (OverlapOptions(method="ring"), True),
    ):
        _, backward = choose_overlaps("op", options, sizes)
        assert (backward.comm_type, backward.method) == (
            CommOverlapType.AG,
            CommOverlapMethod.RING_EXCHANGE,
        )
        assert backward.use_ce == copies
