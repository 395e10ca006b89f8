"""`gemm` of 8-bit operands between ranks: chunks move with their scales, through every buffer."""

import importlib
from functools import partial

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import equal, integers
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh
from scaled_gemm_cases import (
    E4M3,
    E5M2,
    GATHERING,
    MODES,
    MXFP8,
    REDUCING,
    drawn_by_ranks,
    near,
    scaled,
    tiles_of,
)

from jax_cp_dispatch.buffers import create_comm_overlap_buffer
from jax_cp_dispatch.comm_gemm.engine.primitive import bind_gemm

T, K, N = 3, 64, 6


def create(kind, shape, dtype, num_ranks, *, method="RING_EXCHANGE", **options):
    return create_comm_overlap_buffer(kind, method, shape, dtype, num_ranks, **options)


def with_ranks(lhs, rhs, mode, **options):
    call, operands = scaled(lhs, rhs, mode)
    options = {"axis_name": AXIS, "preferred_element_type": jnp.float32, **options}
    return partial(call, **options), operands


@pytest.mark.parametrize(
    "num_ranks, mode, order",
    [
        (4, MXFP8, (2, 0, 3, 1)),
        (1, MODES[1], None),
        (3, MODES[0], (1, 2, 0)),
    ],
)
def test_chunks_are_gathered_with_their_scales(num_ranks, mode, order):
    """Every rank's tensor has its own scale; the 8-bit values are gathered."""
    p, shape = num_ranks, (num_ranks * T, K)
    lhs = drawn_by_ranks(0, p, mode, E5M2, (T, K))
    rhs = drawn_by_ranks(1, p, mode, E4M3, (K, N), "column")
    call, operands = with_ranks(lhs, rhs, mode)
    back = create("RS", (p * T, N), "float32", p, atomic_gemm=True)
    ways = {
        name: partial(call, comm_overlap=create("AG", shape, E5M2, p, **options),
                      paired_comm_overlap=back if options.get("atomic_gemm") else None)
        for name, options in GATHERING.items() if p % 2 == 0 or name != "ring, pairs"
    }  # fmt: skip
    ways["xla"] = partial(ways["ring"], implementation="xla")

    def local(*operands):
        return {name: (way(*operands), *way(*operands, return_aux=True))
                for name, way in ways.items()}  # fmt: skip

    results = on_ranks(local, mesh_of(p, order))(*operands)
    for name, (alone, out, aux) in results.items():
        is_atomic = "atomic" in name
        want, _ = oracle.engine_gather(lhs.values, rhs.values, atomic=is_atomic)
        near(alone, want, name)
        near(out, want, name)
        gathered = np.stack([np.concatenate(lhs.data)] * p)
        assert aux.dtype == E5M2
        equal(np.asarray(aux).view(np.uint8), (lhs.data if is_atomic else gathered).view(np.uint8))


@pytest.mark.parametrize(
    "num_ranks, mode, order",
    [(4, MODES[0], (2, 0, 3, 1)), (3, MXFP8, (1, 2, 0))],
)
def test_sums_of_products_with_scales_per_rank(num_ranks, mode, order):
    """Partial sums move in float32, or in the buffer's type."""
    p, shape = num_ranks, (num_ranks * T, N)
    lhs = drawn_by_ranks(0, p, mode, E4M3, (p * T, K))
    rhs = drawn_by_ranks(1, p, mode, E5M2, (K, N), "column")
    call, operands = with_ranks(lhs, rhs, mode)
    ways = {name: partial(call, comm_overlap=create("RS", shape, "float32", p, **options))
            for name, options in REDUCING.items()}  # fmt: skip
    ways["xla"] = partial(ways["pipeline"], implementation="xla")
    narrow = partial(call, comm_overlap=create("RS", shape, "bfloat16", p))
    bias = jnp.asarray(integers(2, N) * np.float32(100))

    def local(*operands):
        results = {name: way(*operands, bias=bias) for name, way in ways.items()}
        return results, narrow(*operands)

    results, narrow = on_ranks(local, mesh_of(p, order))(*operands)
    for name, got in results.items():
        is_atomic = "ring, atomic" in name
        want = oracle.engine_scatter(lhs.values, rhs.values, atomic=is_atomic)
        near(got, want + bias, name)
    parts = lhs.values @ rhs.values
    roundings = 2.0**-8 * oracle.bulk_scatter(np.abs(parts))
    off = np.abs(np.asarray(narrow, np.float64) - oracle.bulk_scatter(parts))
    assert np.all(off <= roundings) and np.any(off > 1e-3 * roundings)


def test_moved_scales_as_tensor_cores_read_them(monkeypatch):
    """Scales of gathered rows are in rank order; with bulk or sums, a rank has its own scales."""
    p, lines = 4, 40  # the gathered lines fill one tile and start another
    seen = []

    def spy(call, **operands):
        seen.append(bind_gemm(call, **operands))
        return seen[-1]

    module = importlib.import_module("jax_cp_dispatch.comm_gemm._gemm")
    monkeypatch.setattr(module, "bind_gemm", spy)  # the public API does not return them
    lhs = drawn_by_ranks(0, p, MXFP8, E4M3, (lines, K))
    rhs = drawn_by_ranks(1, p, MXFP8, E4M3, (K, N), "column")
    call, operands = with_ranks(lhs, rhs, MXFP8)
    operands = [np.where(x == 255, np.uint8(0), x) if x.dtype == np.uint8 else x for x in operands]
    rings = [partial(call, return_aux=True, comm_overlap=create("AG", (p * lines, K), E4M3, p,
                     **options)) for options in list(GATHERING.values())[:3]]  # fmt: skip
    rings.append(partial(rings[0], implementation="xla"))
    part = np.zeros((p, T, 7), np.float32)
    bulk = partial(call, comm_overlap=create("AG", (p * T, 7), "float32", p, method="BULK"))
    summed = partial(call, comm_overlap=create("RS", (lines, N), "float32", p))

    def local(part, *operands):
        seen.clear()
        for ring in rings:
            ring(*operands)
        bulk(*operands, aux_in=part)
        summed(*operands)
        return [(results.lhs_swizzled, results.rhs_swizzled) for results in seen]

    got = on_ranks(local, mesh_of(p, (2, 0, 3, 1)))(part, *operands)
    blocks = K // 32
    gathered = np.concatenate(lhs.scale_inv[:, :lines, :blocks])
    for i, (of_lhs, of_rhs) in enumerate(got):
        for rank in range(p):
            own = lhs.scale_inv[rank][:lines, :blocks]
            want = gathered if i < len(rings) else own
            equal(of_lhs[rank], tiles_of(want), i)
            equal(of_rhs[rank], tiles_of(rhs.scale_inv[rank][:blocks, :N].T), i)


@pytest.mark.parametrize("mode", MODES[1:])
def test_bulk_during_a_scaled_product(mode):
    """Moves bytes unchanged, or wide values; either operand may be transposed."""
    p = 4
    lhs = drawn_by_ranks(0, p, mode, E4M3, (K, 10), "column")
    rhs = drawn_by_ranks(1, p, mode, E4M3, (N, K), "row")
    part = drawn_by_ranks(2, p, MODES[1], E4M3, (T, 7)).data
    whole = integers(3, p, p * T, 7)
    call, operands = with_ranks(lhs, rhs, mode, contracting_dims=((0,), (1,)))
    gather = partial(call, comm_overlap=create("AG", (p * T, 7), E4M3, p, method="BULK"))
    scatter = partial(call, comm_overlap=create("RS", (p * T, 7), "float32", p, method="BULK"))

    def local(part, whole, *operands):
        return [
            way(*operands, aux_in=aux, implementation=implementation)
            for implementation in (None, "xla")
            for way, aux in ((gather, part), (scatter, whole))
        ]

    results = on_ranks(local, mesh_of(p, (2, 0, 3, 1)))(part, whole, *operands)
    want = np.swapaxes(lhs.values, 1, 2) @ np.swapaxes(rhs.values, 1, 2)
    for (out, gathered), (other_out, summed) in (results[:2], results[2:]):
        near(out, want)
        near(other_out, want)
        assert gathered.dtype == E4M3
        expected = np.stack([np.concatenate(part)] * p)
        equal(np.asarray(gathered).view(np.uint8), expected.view(np.uint8))
        equal(summed, oracle.bulk_scatter(whole))


def test_groups_of_ranks_keep_their_scales_apart():
    """Two groups on a permuted mesh share a buffer id, but neither rows nor scales."""
    groups, p, mode = 2, 4, MXFP8
    names = ("data", "tp")
    lhs = drawn_by_ranks(0, groups * p, mode, E4M3, (T, K))
    rhs = drawn_by_ranks(1, groups * p, mode, E4M3, (K, N), "column")
    call, operands = with_ranks(lhs, rhs, mode, axis_name="tp")
    buffer = create("AG", (p * T, K), E4M3, p)
    spec = jax.P(names)
    mapped = jax.shard_map(
        lambda *operands: call(*(x[0] for x in operands), comm_overlap=buffer)[None],
        mesh=permuted_mesh((groups, p), names),
        in_specs=spec,
        out_specs=spec,
    )
    got = jax.jit(mapped)(*operands)
    for group in (slice(0, p), slice(p, 2 * p)):
        near(got[group], oracle.engine_gather(lhs.values[group], rhs.values[group])[0])
