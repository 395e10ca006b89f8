"""The method that "auto" chooses, forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st
from jax.sharding import Mesh, PartitionSpec as P
from properties import examples

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.buffers import CommOverlapMethod, CommOverlapType
from jax_cp_dispatch.comm_gemm import choose_comm_gemm
from jax_cp_dispatch.comm_gemm.choice import (
    MatmulSizes,
    OverlapOptions,
    choose_overlaps,
)
from jax_cp_dispatch.cost import HARDWARE, CommGemmShape, comm_gemm_methods, predict_comm_gemm

AG, RS = "all_gather_matmul", "matmul_reduce_scatter"


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


def test_auto_follows_the_choice_also_backward():
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    x, w = (jax.ShapeDtypeStruct(shape, "f") for shape in ((4096, 1024), (1024, 512)))
    shapes = CommGemmShape(AG, 4096, 1024, 128, 4, 4), CommGemmShape(RS, 4096, 128, 1024, 4, 4)
    assert [choose_comm_gemm(shape).label for shape in shapes] == ["ring direct"] * 2
    product = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, axis_name="tp"),
        mesh=mesh,
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    text = jax.jit(jax.value_and_grad(lambda x, w: product(x, w).sum())).lower(x, w).as_text()
    calls = [line for line in text.splitlines() if "jax_cp_dispatch.gemm" in line]
    assert len(calls) == 2
    assert all("comm_overlap_method = 3" in call and "copies = false" in call for call in calls)
    assert "comm_type = 2" in calls[0] and "comm_type = 1" in calls[1]


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
