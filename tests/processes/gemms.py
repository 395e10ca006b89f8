"""Overlapped GEMMs between processes: every method and buffer. Part of suite.py."""

import pathlib
import sys
from functools import partial
from typing import Any

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import comm_gemm_oracle as oracle
import jax
import numpy as np
from comm_gemm_cases import K, N, integers, methods, of_gather, of_scatter, with_nan_behind
from jax.sharding import Mesh, PartitionSpec as P
from places import AXIS, all_devices, check, mesh_of_all, on_ranks, place
from scaled_matmul_cases import ORACLES, of

import jax_cp_dispatch as cp
from jax_cp_dispatch import gemm
from jax_cp_dispatch.buffers import create_comm_overlap_buffer, list_comm_overlap_buffers

GATHER, SCATTER = cp.all_gather_matmul, cp.matmul_reduce_scatter
with_ranks: Any = partial(gemm, axis_name=AXIS)


def test_every_method_of_the_products():
    """Of integers, exactly; the second rank has no tokens."""
    mesh = mesh_of_all()
    counts = tuple((3 * rank + 2) % 5 for rank in range(mesh.size))
    for op in GATHER, SCATTER:
        if op is GATHER:
            x, *rest = of_gather(mesh.size, (2,), max(counts))
            operands = with_nan_behind(x, counts), *rest
        else:
            operands = of_scatter(mesh.size, (2,), sum(counts))
        named = {name: fn for name, fn in methods(op, mesh.size).items() if name != "xla"}

        def local(x, w, bias, named=named):
            options: Any = {"axis_name": AXIS, "row_counts": counts}
            return {name: fn(x, w, bias=bias, **options) for name, fn in named.items()}

        want = getattr(oracle, op.__name__)(*operands, counts=counts).astype(np.float32)
        for got in on_ranks(local, mesh)(*(place(a, mesh) for a in operands)).values():
            check(got, want)


def test_scaled_products():
    """8-bit rows travel with their scales."""
    mesh = mesh_of_all()
    few = (GATHER, "MXFP8_1D_SCALING", {"use_ce": False}), (SCATTER, "CURRENT_TENSOR_SCALING", {})
    for op, mode, options in few:
        x, w, dy, bias = of(op, mesh.size, (2,), 3)
        multiply = partial(op, method="ring", axis_name=AXIS, scaling_mode=mode, **options)
        local = lambda x, w, bias, multiply=multiply: multiply(x, w, bias=bias)
        got = on_ranks(local, mesh)(*(place(a, mesh) for a in (x, w, bias)))
        want = ORACLES[op](x, w, dy, mode, bias=bias)[0]
        for shard in got.addressable_shards:
            atol = 1e-5 * np.abs(want).max()
            np.testing.assert_allclose(np.asarray(shard.data), want[shard.index], 0, atol)


def test_gemms_with_buffers():
    """Every type, in groups inside one process and across processes; memory is released."""
    if jax.device_count() < 4:
        return buffers_of(mesh_of_all(), 1, jax.device_count())
    half = jax.device_count() // 2
    for shape, devices in (((half, 2), np.array(jax.devices())), ((2, half), all_devices())):
        buffers_of(Mesh(devices.reshape(shape), ("data", AXIS)), *shape)
    assert all(listed.num_in_use == 0 for listed in list_comm_overlap_buffers().values())


def buffers_of(mesh, num_groups, p):
    def create(kind, method, **options):
        shape = (p * 3, K) if kind == "AG" else (p * 3, N)
        return create_comm_overlap_buffer(kind, method, shape, "float32", p, **options)

    gather, bulk = create("AG", "RING_EXCHANGE"), create("AG", "BULK")
    pipeline = create("RS", "PIPELINE", num_splits=3)
    atomic = create("AG", "RING_EXCHANGE", atomic_gemm=True)
    back = create("RS", "RING_EXCHANGE", atomic_gemm=True)
    bulk_sum = create("RS", "BULK")

    def local(x, whole, w, aux):
        turned = with_ranks(x, w, comm_overlap=atomic, paired_comm_overlap=back)
        beside = with_ranks(whole, w, comm_overlap=bulk, aux_in=x)
        return (
            *with_ranks(x, w, comm_overlap=gather, return_aux=True),
            sum(with_ranks(whole + i, w, comm_overlap=pipeline) for i in range(3)),
            with_ranks(turned, np.eye(N, dtype="f"), comm_overlap=back),
            *beside,
            with_ranks(whole, w, comm_overlap=bulk_sum, aux_in=aux)[1],
        )

    shapes = ((3, K), (p * 3, K), (K, N), (p * 3, N))
    operands = [integers(seed, num_groups, p, *shape) for seed, shape in enumerate(shapes)]
    flat = [a.reshape(num_groups * p, *a.shape[2:]) for a in operands]
    spec = P(tuple(mesh.axis_names))
    got = on_ranks(local, mesh, spec)(*(place(a, mesh, spec) for a in flat))
    want = []
    for x, whole, w, aux in zip(*operands, strict=True):
        out, gathered = oracle.engine_gather(x, w)
        sums = sum(oracle.engine_scatter(whole + i, w) for i in range(3))
        there_and_back = oracle.bulk_scatter(oracle.all_gather_matmul(x, w))
        alone = np.einsum("pmk,pkn->pmn", whole, w)
        moved = oracle.bulk_gather(x), oracle.bulk_scatter(aux)
        want.append((out, gathered, sums, there_and_back, alone, *moved))
    for result, groups in zip(got, zip(*want, strict=True), strict=True):
        check(result, np.concatenate(groups).astype(np.float32))


def test_profile():
    """Profiles the ranks of this process; they fetch what others send."""
    mesh, p = mesh_of_all(), jax.device_count()
    fn = on_ranks(lambda x, w: GATHER(x, w, axis_name=AXIS, method="ring"), mesh)
    operands = place(integers(0, p, 2, K), mesh), place(integers(1, p, K, N), mesh)
    profile = cp.profiling.overlap_profile(fn, *operands)
    here = {i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()}
    assert {span.rank for span in profile.spans} == here
    for rank in here:
        names = [s.name for s in profile.spans if s.rank == rank and s.kind == "communication"]
        fetched = mesh.devices.flat[rank - 1].process_index != jax.process_index()
        assert sum(f"from rank {(rank - 1) % p}" in name for name in names) == (p - 1) * fetched


def test_a_buffer_that_one_process_has_destroyed():
    """All ranks get the error, and the next program runs."""
    mesh, p = mesh_of_all(), jax.device_count()
    buffer = create_comm_overlap_buffer("RS", "PIPELINE", (p * 7, N), "float32", p)
    x, w = integers(0, p, p * 3, K), integers(1, p, K, N)
    program = on_ranks(lambda x, w: with_ranks(x, w, comm_overlap=buffer), mesh)
    operands = [place(a, mesh) for a in (x, w)]
    want = oracle.engine_scatter(x, w).astype(np.float32)
    check(program(*operands), want)
    if jax.process_index() == jax.process_count() - 1:
        cp.buffers.destroy_comm_overlap_buffer(buffer)
    try:
        jax.block_until_ready(program(*operands))
        raise AssertionError("the call succeeded")
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert f"buffer {buffer} has been destroyed" in str(error), error
    if jax.process_index() == jax.process_count() - 1:
        create_comm_overlap_buffer("RS", "PIPELINE", (p * 7, N), "float32", p)
    check(program(*operands), want)
