"""`gemm` with registered buffers: each type of buffer, epilogues of chunks, concurrent calls."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import K, N, equal, integers, normal
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of, on_ranks
from scaled_gemm_cases import (
    E4M3,
    MODES,
    all_epilogues,
    check_all,
    draw,
    gathering_ways,
    scaled,
)

from jax_cp_dispatch import gemm
from jax_cp_dispatch.buffers import create_comm_overlap_buffer, list_comm_overlap_buffers

P_, T = 4, 3
DEPTH, COLUMNS = 64, 6  # of epilogues
M = P_ * T
X, W, BIAS = integers(0, P_, T, K), integers(1, P_, K, N), integers(2, P_, N)
WHOLE = integers(3, P_, M, K)
SHARED_BIAS = np.stack([BIAS[0]] * P_)


def create(kind, method, shape=None, dtype="float32", num_ranks=P_, **options):
    """Creates a buffer that fits the arrays above."""
    shape = shape or ((M, K) if kind == "AG" else (M, N))
    return create_comm_overlap_buffer(kind, method, shape, dtype, num_ranks, **options)


def run(fn, *operands, order=(2, 0, 3, 1), **options):
    mesh = mesh_of(len(operands[0]), order if len(operands[0]) == P_ else None)
    results = on_ranks(fn, mesh, **options)(*operands)
    return jax.tree.map(lambda a: np.asarray(a).astype(np.float64), results)


with_ranks: Any = partial(gemm, axis_name=AXIS)


# ---- Each type of buffer.


def test_rings_of_an_all_gather():
    """With and without returning the gathered rows, with a bias, with the weight transposed."""
    each = {}, {"use_ce": False}, {"aggregate_ag": True}
    rings = [partial(with_ranks, comm_overlap=create("AG", "RING_EXCHANGE", **x)) for x in each]
    turned = partial(rings[0], contracting_dims=((1,), (1,)))

    def local(x, w, bias):
        both = [(ring(x, w, bias=bias), ring(x, w, bias=bias, return_aux=True)) for ring in rings]
        return turned(x, w.T), both

    expected, gathered = oracle.engine_gather(X, W, BIAS)
    of_turned, results = run(local, X, W, BIAS)
    equal(of_turned, oracle.engine_gather(X, W)[0])
    for alone, (out, aux) in results:
        equal(alone, expected)
        equal(out, expected)
        equal(aux, gathered)


REDUCING = [
    ("RING_EXCHANGE", {}),
    ("RING_EXCHANGE", {"use_ce": False}),
    ("PIPELINE", {}),
    ("PIPELINE", {"num_splits": 3, "atomic_gemm": True}),
    ("PIPELINE", {"num_splits": 3, "rs_overlap_first_gemm": True}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reduce_scatter_with_partial_sums_of_a_type(dtype):
    """Each is rounded to the buffer's type, then summed in float32; direct rings have none.

    The bias is added once; its gradient uses this rank's rhs, whatever is summed.
    """
    calls = [
        partial(with_ranks, comm_overlap=create("RS", method, dtype=dtype, **options))
        for method, options in REDUCING
    ]
    turned = partial(calls[2], contracting_dims=((1,), (1,)))
    by_xla = partial(calls[0], implementation="xla")
    whole, w = WHOLE * np.float32(1.25), W * np.float32(0.75)  # more bits than bfloat16 has

    def local(x, w, bias):
        sums = [call(x, w, bias=bias) for call in (*calls, by_xla)]
        gradient: Any = {"fuse_bias": True, "grad": True}
        return [*sums, turned(x, w.T, bias=bias)], [call(x, w, **gradient) for call in calls]

    sums, pairs = run(local, whole, w, SHARED_BIAS)
    partial_sums = np.stack([a @ b for a, b in zip(whole, w, strict=True)])
    rounded = np.asarray(jnp.asarray(partial_sums, dtype)).astype(np.float64)
    assert (dtype == "float32") == np.array_equal(rounded, partial_sums)
    of_rounded, of_exact = map(oracle.bulk_scatter, (rounded, partial_sums))
    wants = [of_rounded if options.get("use_ce", True) else of_exact for _, options in REDUCING]
    for i, (got, want) in enumerate(zip(sums, [*wants, of_rounded, of_rounded], strict=True)):
        equal(got, want + SHARED_BIAS[:, None], i)
    for (out, dbias), want in zip(pairs, wants, strict=True):
        equal(out, want)
        equal(dbias, w.sum(1))


@pytest.mark.parametrize(
    "num_ranks, use_ce, implementation",
    [(1, None, None), (4, None, "in_process"), (3, False, None), (3, None, "xla")],
)
def test_atomic_rings_in_a_pair(num_ranks, use_ce, implementation):
    """The all-gather leaves chunks in the order r-1, r-2, ..., r; the reduce-scatter takes it."""
    p, rows = num_ranks, num_ranks * T
    x, w, back = integers(0, p, T, K), integers(1, p, K, N), integers(2, p, N, K)
    atomic = {"atomic_gemm": True, "num_ranks": p, "use_ce": use_ce}
    gather = create("AG", "RING_EXCHANGE", (rows, K), **atomic)
    scatter = create("RS", "RING_EXCHANGE", (rows, K), **atomic)
    call = partial(with_ranks, implementation=implementation)

    def local(x, w, back):
        pair = {"comm_overlap": gather, "paired_comm_overlap": scatter}
        hidden, aux = call(x, w, return_aux=True, **pair)
        return hidden, aux, call(x, w, **pair), call(hidden, back, comm_overlap=scatter)

    hidden, aux, alone, out = run(local, x, w, back)
    expected, own = oracle.engine_gather(x, w, atomic=True)
    equal(hidden, expected)
    equal(alone, expected)
    equal(aux, own)
    equal(out, oracle.engine_scatter(expected, back, atomic=True))
    # The order is internal to the pair: together the two form a plain layer.
    straight, _ = oracle.engine_gather(x, w)
    equal(out, oracle.engine_scatter(straight, back))


@pytest.mark.parametrize("gathered_type, summed_type", [("float32", "float32"), (E4M3, "float16")])
def test_bulk_during_an_independent_gemm(gathered_type, summed_type):
    """The array that moves is independent of the operands of the GEMM, and of its epilogue."""
    shape = (M, 6)
    gather = create("AG", "BULK", shape, gathered_type)
    scatter = create("RS", "BULK", shape, summed_type)
    part = integers(4, P_, T, 6, dtype=gathered_type)
    whole = integers(5, P_, M, 6, dtype=summed_type)
    other = integers(6, P_, 2, 3, K)  # any number of rows, in several dimensions

    def local(lhs, other, w, bias, part, whole):
        return (
            with_ranks(lhs, w, comm_overlap=gather, aux_in=part, fuse_bias=True, grad=True),
            with_ranks(other, w, bias=bias, comm_overlap=scatter, aux_in=whole),
        )

    results = on_ranks(local, mesh_of(P_))(WHOLE, other, W, BIAS, part, whole)
    (out, dbias, gathered), (other_out, summed) = results
    assert (gathered.dtype, summed.dtype) == (gathered_type, summed_type)
    assert out.dtype == np.float32
    equal(out, WHOLE @ W)
    equal(dbias, W.sum(1))
    equal(gathered, oracle.bulk_gather(part))
    equal(other_out, np.einsum("pabk,pkn->pabn", other, W) + BIAS[:, None, None])
    equal(summed, oracle.bulk_scatter(whole))


def test_buffer_without_communication():
    buffer = create("NONE", "NONE")
    got = gemm(jnp.asarray(WHOLE[0]), jnp.asarray(W[0]), comm_overlap=buffer)
    equal(got, WHOLE[0] @ W[0])
    assert list_comm_overlap_buffers()[buffer].num_bytes == 0


def test_types_of_operands_and_result():
    """Narrow operands, a wide or narrow result; the result keeps the free dimensions."""
    buffer = create("AG", "RING_EXCHANGE", dtype="bfloat16")
    x = jnp.asarray(X, jnp.bfloat16)
    w = W[:, :, :6].reshape(P_, K, 2, 3)

    def local(x, w):
        call = partial(with_ranks, x, w, comm_overlap=buffer)
        return call(), call(preferred_element_type=jnp.bfloat16)

    wide, narrow = on_ranks(local, mesh_of(P_))(x, w)
    assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    expected = oracle.engine_gather(X, W[:, :, :6])[0].reshape(P_, M, 2, 3)
    equal(wide, expected)
    equal(narrow, expected)


# ---- Epilogues of chunks.


def test_chunks_of_an_all_gather():
    """Each chunk's part of the output, and one bias gradient from all chunks."""
    p, mode = 4, MODES[1]
    lhs = draw(0, p, mode, (T, DEPTH))
    rhs = draw(1, p, mode, (DEPTH, COLUMNS), "column")
    call, operands = scaled(lhs, rhs, mode, axis_name=AXIS, preferred_element_type=jnp.float32)
    ways = gathering_ways(call, (p * T, DEPTH), E4M3, p, COLUMNS)
    bias, gelu_input = normal(2, p, COLUMNS), 3 * normal(3, p, p * T, COLUMNS)

    def local(bias, gelu_input, *operands):
        return {
            name: all_epilogues(partial(way, *operands), bias, gelu_input)
            for name, way in ways.items()
        }

    run = on_ranks(local, mesh_of(p, (2, 0, 3, 1)))
    for name, results in run(bias, gelu_input, *operands).items():
        product, _ = oracle.engine_gather(lhs.values, rhs.values, atomic="atomic" in name)
        biases, sums = bias[:, None], rhs.values.sum(1)
        check_all(results, product, biases, gelu_input, sums, name)


# ---- Many calls of one buffer.


def test_many_calls_of_one_buffer():
    """Concurrent and sequential calls in one program, and calls in another program."""
    buffer = create("RS", "RING_EXCHANGE")
    call = partial(with_ranks, comm_overlap=buffer)

    def several(x, w):
        total = sum(call(x + i, w) for i in range(6))
        step = lambda carry, i: (carry + call(x - i, w), None)
        return jax.lax.scan(step, total, jnp.arange(3.0))[0]

    expect = lambda x: oracle.engine_scatter(x, W)
    expected = sum(expect(WHOLE + i) for i in range(-2, 6)) + expect(WHOLE)
    equal(run(several, WHOLE, W), expected)
    equal(run(lambda x, w: call(x, w), WHOLE, W), expect(WHOLE))
    (listed,) = list_comm_overlap_buffers().values()
    assert (listed.num_calls, listed.num_in_use) == (10, 0)
    assert listed.num_bytes == P_ * (2 * P_ - 1) * T * N * 4  # of one group


def test_programs_of_several_threads_share_a_buffer():
    buffer = create("RS", "PIPELINE")
    program = on_ranks(lambda x, w: with_ranks(x, w, comm_overlap=buffer), mesh_of(P_))
    program(WHOLE, W).block_until_ready()

    def work(thread):
        for got in [program(WHOLE + thread, W) for _ in range(5)]:
            equal(got, oracle.engine_scatter(WHOLE + thread, W))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))


def test_groups_have_separate_memory():
    """Two groups of two ranks on a larger mesh share one buffer and use twice its memory."""
    buffer = create("AG", "RING_EXCHANGE", (4, K), num_ranks=2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", AXIS))
    x, w = integers(0, 2, 2, 2, K), integers(1, 2, 2, K, N)
    run = lambda x, w: with_ranks(x[0, 0], w[0, 0], comm_overlap=buffer)[None, None]
    specs: Any = {"in_specs": jax.P("data", AXIS), "out_specs": jax.P("data", AXIS)}
    got = jax.jit(jax.shard_map(run, mesh=mesh, **specs))(x, w)
    for group in range(2):
        equal(got[group], oracle.engine_gather(x[group], w[group])[0])
    assert list_comm_overlap_buffers()[buffer].num_bytes == 2 * 2 * 4 * K * 4
