"""Communication buffers: ids, bytes, counts; `gemm` with each type; memory, end, refusals."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import K, N, equal, integers, normal
from comm_overlap_cases import BASE, create, no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, Gate, all_fail, mesh_of, on_ranks
from scaled_gemm_cases import E4M3, MODES, all_epilogues, check_all, draw, gathering_ways, scaled

from jax_cp_dispatch import gemm, matmul_reduce_scatter
from jax_cp_dispatch.buffers import (
    CommOverlapBuffer,
    CommOverlapMethod,
    CommOverlapType,
    comm_overlap_buffer_bytes,
    create_comm_overlap_buffer,
    destroy_all_comm_overlap_buffers,
    destroy_comm_overlap_buffer,
    list_comm_overlap_buffers,
)

RING = CommOverlapMethod.RING_EXCHANGE
unchecked = pytest.mark.usefixtures("unchecked_types")


# ---- Ids.


def id_of(**options):
    """Returns the id alone; no buffer remains."""
    buffer = create(**options)
    destroy_comm_overlap_buffer(buffer)
    return buffer


# Each differs from the base in one parameter.
OTHER: list[dict[str, Any]] = [
    {"comm_type": "RS"},
    {"method": "BULK"},
    *({"buffer_shape": shape} for shape in ((65, 32), (64, 33), (32, 64))),
    *({"buffer_dtype": dtype} for dtype in ("bfloat16", "float16", "float64")),
    *({name: 2} for name in ("tp_size", "comm_cga_size", "num_comm_sm", "num_max_streams")),
    *({name: 5} for name in ("num_splits", "gemm_priority", "comm_priority")),
    {"gemm_priority": -1},
    *({name: True} for name in ("set_sm_margin", "atomic_gemm", "aggregate_ag")),
    {"use_ce": False},
]


def test_every_parameter_is_part_of_the_id():
    ids = [id_of(), *(id_of(**other) for other in OTHER)]
    assert len(set(ids)) == len(ids)
    pipeline = {"comm_type": "RS", "method": "PIPELINE"}
    assert id_of(**pipeline) != id_of(**pipeline, rs_overlap_first_gemm=True)
    named = {name for other in OTHER for name in other} | {"rs_overlap_first_gemm"}
    create()
    (listed,) = list_comm_overlap_buffers().values()
    assert named == set(vars(listed.config))


def test_ids_are_the_same_in_every_process():
    """Python's hashes are not."""
    assert create() == 7859231275419051731
    other = create_comm_overlap_buffer("RS", "PIPELINE", (8, 2), "bfloat16", 2, num_splits=7)
    assert other == 6472580938398280615


@unchecked
def test_equal_arguments_may_be_written_in_different_ways():
    ids = [
        id_of(comm_type=CommOverlapType.AG, method="ring_exchange", buffer_shape=[64, 32]),
        id_of(buffer_dtype=jnp.float32, tp_size=np.int8(4), num_splits=np.int64(4)),
        id_of(buffer_dtype=np.dtype("float32"), method=RING, comm_cga_size=1),
        id_of(num_comm_sm=1, set_sm_margin=False, use_ce=True),  # the defaults of the ring
    ]
    assert set(ids) == {id_of()}


def test_defaults_depend_on_the_method():
    same = {"num_splits": 4, "num_max_streams": 3, "gemm_priority": 0, "comm_priority": 0}
    ring = {"comm_cga_size": 1, "num_comm_sm": 1, "set_sm_margin": False, "use_ce": True}
    other = {"comm_cga_size": 2, "num_comm_sm": 16, "set_sm_margin": True, "use_ce": False}
    for method, of_method in ("RING_EXCHANGE", ring), ("PIPELINE", other), ("BULK", other):
        buffer = create(comm_type="RS", method=method)
        config = list_comm_overlap_buffers()[buffer].config
        expected = same | of_method
        assert {name: getattr(config, name) for name in expected} == expected


# ---- Bytes.


@pytest.mark.parametrize(
    "kind, method, options, num_elements",
    [
        ("AG", "RING_EXCHANGE", {}, 64 * 32),
        ("AG", "BULK", {}, 64 * 32),
        ("RS", "PIPELINE", {"num_splits": 9}, 64 * 32),
        ("RS", "RING_EXCHANGE", {}, 7 * 16 * 32),  # 2 * 4 - 1 blocks of rows
        ("RS", "RING_EXCHANGE", {"use_ce": False}, 0),  # nothing is copied
        ("AG", "RING_EXCHANGE", {"use_ce": False}, 0),
        ("RS", "RING_EXCHANGE", {"tp_size": 3}, 5 * 22 * 32),  # blocks of rows rounded up
        ("NONE", "NONE", {}, 0),
    ],
)
def test_comm_overlap_buffer_bytes_before_a_buffer_exists(kind, method, options, num_elements):
    for dtype, size in ("bfloat16", 2), ("float32", 4), ("float64", 8):
        arguments = {**BASE, "comm_type": kind, "method": method, "buffer_dtype": dtype, **options}
        assert comm_overlap_buffer_bytes(**arguments) == num_elements * size
    assert list_comm_overlap_buffers() == {}


def test_comm_overlap_buffer_bytes_with_scales():
    for options, num_bytes in (
        ({}, 64 * 32 + 64 * 4),  # rows, and 4 block scales for each
        ({"buffer_shape": (64, 129)}, 64 * 129 + 64 * 8),
        ({"buffer_shape": (3, 33)}, 128 + 16),  # padded to 64 bytes; 4 floats: scales of 4 ranks
        ({"use_ce": False}, 64 * 4),  # scales alone
        ({"method": "BULK"}, 64 * 32),  # whose array has no rows
    ):
        arguments = {**BASE, "buffer_dtype": "float8_e4m3fn", **options}
        assert comm_overlap_buffer_bytes(**arguments) == num_bytes


# ---- Counts.


def test_create_comm_overlap_buffer_counts_equal_arguments_as_one_buffer():
    buffer, second = create(), create(tp_size=2)
    assert create() == create() == buffer
    listed = list_comm_overlap_buffers()
    assert {id: each.num_created for id, each in listed.items()} == {buffer: 3, second: 1}
    config = listed[buffer].config
    assert listed[buffer] == CommOverlapBuffer(config, 3, num_in_use=0, num_calls=0, num_bytes=0)
    assert (config.comm_type, config.method) == (CommOverlapType.AG, RING)
    assert (config.buffer_shape, config.buffer_dtype, config.tp_size) == ((64, 32), "float32", 4)
    for remaining in (2, 1):
        destroy_comm_overlap_buffer(buffer)
        assert list_comm_overlap_buffers()[buffer].num_created == remaining
    destroy_comm_overlap_buffer(buffer)
    assert list(list_comm_overlap_buffers()) == [second]
    with pytest.raises(ValueError, match=f"buffer {buffer} has been destroyed. Create it with cr"):
        destroy_comm_overlap_buffer(buffer)
    assert create() == buffer  # and it exists again
    destroy_all_comm_overlap_buffers()
    assert list_comm_overlap_buffers() == {}
    destroy_all_comm_overlap_buffers()


@unchecked
def test_ids_without_a_buffer():
    with pytest.raises(ValueError, match=r"destroy_comm_overlap_buffer: there is no buffer 123\."):
        destroy_comm_overlap_buffer(123)
    for wrong in (0, -1, 2**63, True, "7", 1.0, None):
        with pytest.raises(ValueError, match=f"buffer is {re.escape(repr(wrong))}; it needs to be"):
            destroy_comm_overlap_buffer(wrong)  # pyright: ignore


def test_create_and_destroy_comm_overlap_buffer_in_many_threads():
    def work(thread):
        for i in range(50):
            shared, own = create(), create(num_splits=thread + 2)
            assert {shared, own} <= set(list_comm_overlap_buffers())
            destroy_comm_overlap_buffer(own)
            if i % 2:
                destroy_comm_overlap_buffer(shared)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert [each.num_created for each in list_comm_overlap_buffers().values()] == [6 * 25]


# ---- Each type of buffer, with arrays that fit it.

P, T, M = 4, 3, 12
X, W, BIAS = integers(0, P, T, K), integers(1, P, K, N), integers(2, P, N)
WHOLE = integers(3, P, M, K)
SHARED_BIAS = np.stack([BIAS[0]] * P)


def fitting(kind, method, shape=None, dtype="float32", num_ranks=P, **options):
    """Creates a buffer that fits the arrays above."""
    shape = shape or ((M, K) if kind == "AG" else (M, N))
    return create_comm_overlap_buffer(kind, method, shape, dtype, num_ranks, **options)


def run(fn, *operands):
    """Results on ranks that are not in the order of their devices."""
    p = len(operands[0])
    return on_ranks(fn, mesh_of(p, (2, 0, 3, 1) if p == P else None))(*operands)


with_ranks: Any = partial(gemm, axis_name=AXIS)


def test_rings_of_an_all_gather():
    """With and without returning the gathered rows, with a bias, with the weight transposed."""
    each: Any = {}, {"use_ce": False}, {"aggregate_ag": True}
    rings = [partial(with_ranks, comm_overlap=fitting("AG", "RING_EXCHANGE", **x)) for x in each]
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
        partial(with_ranks, comm_overlap=fitting("RS", method, dtype=dtype, **options))
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
    bias = integers(3, K)
    atomic = {"atomic_gemm": True, "num_ranks": p, "use_ce": use_ce}
    gather = fitting("AG", "RING_EXCHANGE", (rows, K), **atomic)
    scatter = fitting("RS", "RING_EXCHANGE", (rows, K), **atomic)
    call = partial(with_ranks, implementation=implementation)

    def local(x, w, back):
        pair = {"comm_overlap": gather, "paired_comm_overlap": scatter}
        hidden, aux = call(x, w, return_aux=True, **pair)
        out = call(hidden, back, bias=jnp.asarray(bias), comm_overlap=scatter)
        return hidden, aux, call(x, w, **pair), out

    hidden, aux, alone, out = run(local, x, w, back)
    expected, own = oracle.engine_gather(x, w, atomic=True)
    equal(hidden, expected)
    equal(alone, expected)
    equal(aux, own)
    equal(out, oracle.engine_scatter(expected, back, atomic=True) + bias)
    # The order is internal to the pair: together the two form a plain layer.
    straight, _ = oracle.engine_gather(x, w)
    equal(out, oracle.engine_scatter(straight, back) + bias)


@pytest.mark.parametrize("gathered_type, summed_type", [("float32", "float32"), (E4M3, "float16")])
def test_bulk_during_an_independent_gemm(gathered_type, summed_type):
    """The array that moves is independent of the operands of the GEMM, and of its epilogue."""
    shape = (M, 6)
    gather = fitting("AG", "BULK", shape, gathered_type)
    scatter = fitting("RS", "BULK", shape, summed_type)
    part = integers(4, P, T, 6, dtype=gathered_type)
    whole = integers(5, P, M, 6, dtype=summed_type)
    other = integers(6, P, 2, 3, K)  # any number of rows, in several dimensions

    def local(lhs, other, w, bias, part, whole):
        return (
            with_ranks(lhs, w, comm_overlap=gather, aux_in=part, fuse_bias=True, grad=True),
            with_ranks(other, w, bias=bias, comm_overlap=scatter, aux_in=whole),
        )

    results = on_ranks(local, mesh_of(P))(WHOLE, other, W, BIAS, part, whole)
    (out, dbias, gathered), (other_out, summed) = results
    assert (gathered.dtype, summed.dtype) == (gathered_type, summed_type)
    assert out.dtype == np.float32
    equal(out, WHOLE @ W)
    equal(dbias, W.sum(1))
    equal(gathered, oracle.bulk_gather(part))
    equal(other_out, np.einsum("pabk,pkn->pabn", other, W) + BIAS[:, None, None])
    equal(summed, oracle.bulk_scatter(whole))


def test_buffer_without_communication():
    buffer = fitting("NONE", "NONE")
    got = gemm(jnp.asarray(WHOLE[0]), jnp.asarray(W[0]), comm_overlap=buffer)
    equal(got, WHOLE[0] @ W[0])
    assert list_comm_overlap_buffers()[buffer].num_bytes == 0


def test_types_of_operands_and_result():
    """Narrow operands, a wide or narrow result; the result keeps the free dimensions."""
    buffer = fitting("AG", "RING_EXCHANGE", dtype="bfloat16")
    x = jnp.asarray(X, jnp.bfloat16)
    w = W[:, :, :6].reshape(P, K, 2, 3)

    def local(x, w):
        call = partial(with_ranks, x, w, comm_overlap=buffer)
        return call(), call(preferred_element_type=jnp.bfloat16)

    wide, narrow = on_ranks(local, mesh_of(P))(x, w)
    assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    expected = oracle.engine_gather(X, W[:, :, :6])[0].reshape(P, M, 2, 3)
    equal(wide, expected)
    equal(narrow, expected)


# ---- Epilogues of chunks.


def test_chunks_of_an_all_gather():
    """Each chunk's part of the output, and one bias gradient from all chunks."""
    depth, columns, mode = 64, 6, MODES[1]
    lhs = draw(0, P, mode, (T, depth))
    rhs = draw(1, P, mode, (depth, columns), "column")
    call, operands = scaled(lhs, rhs, mode, axis_name=AXIS, preferred_element_type=jnp.float32)
    ways = gathering_ways(call, (M, depth), E4M3, P, columns)
    bias, gelu_input = normal(2, P, columns), 3 * normal(3, P, M, columns)

    def local(bias, gelu_input, *operands):
        each = lambda way: all_epilogues(partial(way, *operands), bias, gelu_input)
        return {name: each(way) for name, way in ways.items()}

    for name, results in run(local, bias, gelu_input, *operands).items():
        product, _ = oracle.engine_gather(lhs.values, rhs.values, atomic="atomic" in name)
        check_all(results, product, bias[:, None], gelu_input, rhs.values.sum(1), name)


# ---- Memory, and its end.

SUM = oracle.engine_scatter(WHOLE, W)


def fails(result, match):
    """Every rank gets the same error; the next computation runs."""
    all_fail(result, match)
    fresh = partial(matmul_reduce_scatter, axis_name=AXIS, method="ring")
    np.testing.assert_array_equal(on_ranks(fresh, mesh_of(P))(WHOLE, W), SUM)


def compiled(gate=None):
    """Returns a buffer, and a program with it, in which one rank may be late."""
    buffer = fitting("RS", "RING_EXCHANGE")
    call = partial(matmul_reduce_scatter, axis_name=AXIS, buffer=buffer, method="ring")
    local = lambda x, w: call(gate.wait_at(x) if gate else x, w)
    return buffer, on_ranks(local, mesh_of(P), check_vma=False).lower(WHOLE, W).compile()


def test_a_program_outlives_its_buffer():
    """It fails with a clear error, and runs again once the buffer is created again.

    Compiling allocates nothing; the first call does, and later ones of the same group reuse it.
    """
    huge = create(buffer_shape=(1 << 20, 1 << 21), tp_size=8)
    buffer, program = compiled()
    need = P * comm_overlap_buffer_bytes("RS", "RING_EXCHANGE", (M, N), "float32", P)
    for calls in (0, 1, 2):
        assert list_comm_overlap_buffers()[buffer][1:] == (1, 0, calls, (calls > 0) * need)
        np.testing.assert_array_equal(program(WHOLE, W), SUM)
    assert list_comm_overlap_buffers()[huge].num_bytes == 0
    destroy_comm_overlap_buffer(buffer)
    gone = f"matmul_reduce_scatter over axis 'cp': buffer {buffer} has been destroyed. Create it"
    fails(program(WHOLE, W), gone)
    fails(program(WHOLE, W), gone)
    assert fitting("RS", "RING_EXCHANGE") == buffer
    np.testing.assert_array_equal(program(WHOLE, W), SUM)


def test_destroyed_before_all_ranks_arrive():
    """One rank is late and finds the buffer destroyed: all ranks get an error."""
    gate = Gate(rank=2)
    buffer, program = compiled(gate)
    result = program(WHOLE, W)
    assert gate.has_come.wait(30)
    destroy_comm_overlap_buffer(buffer)
    gate.may_go.set()
    fails(result, f"buffer {buffer} has been destroyed")
    assert fitting("RS", "RING_EXCHANGE") == buffer
    np.testing.assert_array_equal(program(WHOLE, W), SUM)


def test_a_buffer_in_use_is_kept():
    """A failed attempt to destroy it neither blocks later use nor changes a count."""
    n, other = 768, create()
    x = np.ones((2, n, n), np.float32)
    again = partial(create, comm_type="RS", buffer_shape=(n, n), tp_size=2, gemm_priority=7)
    buffer = again()

    def local(x, w):  # calls of one buffer take turns, so it is in use for a long time
        call = partial(gemm, comm_overlap=buffer, axis_name=AXIS)
        return sum(call(x * i, w) for i in range(32))

    program = on_ranks(local, mesh_of(2)).lower(x, x).compile()
    result = program(x, x)
    while list_comm_overlap_buffers()[buffer].num_in_use == 0:
        assert not result.is_ready()
        time.sleep(1e-4)
    for destroy, says in (
        (
            partial(destroy_comm_overlap_buffer, buffer),
            rf"destroy_comm_overlap_buffer: buffer {buffer} is in use by \d+ calls? in flight",
        ),
        (
            destroy_all_comm_overlap_buffers,
            rf"destroy_all_comm_overlap_buffers: calls in flight use buffers {buffer} "
            r"\(\d+ calls?\); none has been destroyed",
        ),
    ):
        with pytest.raises(ValueError, match=f"{says}. Wait for their results"):
            destroy()
    assert set(list_comm_overlap_buffers()) == {buffer, other}
    assert again() == buffer
    destroy_comm_overlap_buffer(buffer)  # the first of two references
    np.testing.assert_array_equal(result, np.full((2, n // 2, n), n * 32 * 31))
    assert list_comm_overlap_buffers()[buffer][1:4] == (1, 0, 32)
    destroy_comm_overlap_buffer(buffer)
    assert list(list_comm_overlap_buffers()) == [other]


def test_memory_that_cannot_be_allocated():
    """A failed allocation is an error of the call; the buffer can still be destroyed."""
    buffer = create(comm_type="RS", buffer_shape=(1 << 20, 1 << 22))
    call = partial(matmul_reduce_scatter, axis_name=AXIS, buffer=buffer)
    result = on_ranks(call, mesh_of(P))(WHOLE, W)
    fails(result, rf"no memory for buffer {buffer}: 4 ranks of \d+ bytes. Create it with a smaller")
    assert list_comm_overlap_buffers()[buffer].num_in_use == 0
    destroy_comm_overlap_buffer(buffer)


def test_many_calls_of_one_buffer():
    """Concurrent and sequential calls in one program, and calls in another program."""
    buffer = fitting("RS", "RING_EXCHANGE")
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
    assert listed.num_bytes == P * (2 * P - 1) * T * N * 4  # of one group


def test_programs_of_several_threads_share_a_buffer():
    buffer = fitting("RS", "PIPELINE")
    program = on_ranks(lambda x, w: with_ranks(x, w, comm_overlap=buffer), mesh_of(P))
    program(WHOLE, W).block_until_ready()

    def work(thread):
        for got in [program(WHOLE + thread, W) for _ in range(5)]:
            equal(got, oracle.engine_scatter(WHOLE + thread, W))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))


def test_groups_have_separate_memory():
    """Two groups of two ranks on a larger mesh share one buffer and use twice its memory."""
    buffer = fitting("AG", "RING_EXCHANGE", (4, K), num_ranks=2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", AXIS))
    x, w = integers(0, 2, 2, 2, K), integers(1, 2, 2, K, N)
    run = lambda x, w: with_ranks(x[0, 0], w[0, 0], comm_overlap=buffer)[None, None]
    specs: Any = {"in_specs": jax.P("data", AXIS), "out_specs": jax.P("data", AXIS)}
    got = jax.jit(jax.shard_map(run, mesh=mesh, **specs))(x, w)
    for group in range(2):
        equal(got[group], oracle.engine_gather(x[group], w[group])[0])
    assert list_comm_overlap_buffers()[buffer].num_bytes == 2 * 2 * 4 * K * 4


# ---- Invalid parameters: the byte count and the buffer reject them alike; nothing is created.

FIRST = {"rs_overlap_first_gemm": True, "method": "PIPELINE", "comm_type": "RS"}
HUGE = "a process can address less than 2"
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"comm_type": "GATHER"}, "comm_type is 'GATHER'; .* 'RS', 'AG'"),
    ({"method": CommOverlapType.AG}, "method is .* 'BULK', 'PIPELINE', .*, or"),
    ({"method": "PIPELINE"}, r"got \w+\.PIPELINE with CommOverlapType\.AG; .* Use \w+\.RING"),
    ({"method": "NONE"}, "either both are NONE"),
    ({"comm_type": "NONE"}, "either both are NONE.* Pass both"),
    ({"buffer_shape": (4,)}, r"buffer_shape is \(4,\); it needs two sizes"),
    ({"buffer_shape": 4}, "buffer_shape is 4; it needs two sizes"),
    ({"buffer_shape": (0, 4)}, "buffer_shape is 0; it needs to be an integer of at least 1"),
    ({"buffer_shape": (2**62, 1)}, "4611686018427387904; .* of at least 1 and at"),
    ({"buffer_shape": (2**31, 2**31)}, f"18446744073709551616 bytes for each of 4 ranks; {HUGE}"),
    ({"buffer_shape": (2**45, 1)}, HUGE),
    ({"buffer_shape": (2**40, 2**40), "use_ce": False, "buffer_dtype": "float8_e5m2"}, HUGE),
    ({"buffer_dtype": "int32"}, "int32 with .*'bfloat16', 'float16'"),
    ({"buffer_dtype": "float8_e4m3fn", "comm_type": "RS"}, "float8_e4m3fn with "),
    ({"buffer_dtype": "nonsense"}, "'nonsense' with .*; it needs to"),
    ({"tp_size": True}, "tp_size is True; it needs to be an integer of at least 1"),
    ({"num_splits": "4"}, "num_splits is '4'; it needs to be an integer"),
    ({"num_splits": 2**40}, "num_splits is 1099511627776; .* at most 1048576"),
    ({"gemm_priority": 2**62}, "gemm_priority is 4611686018427387904; it needs"),
    ({"use_ce": 1}, "use_ce is 1; it needs to be True or False"),
    ({"method": "BULK", "atomic_gemm": True}, "got atomic_gemm with .*; chunk counters need"),
    ({"rs_overlap_first_gemm": True}, "got rs_overlap_first_gemm with .* Omit it"),
    ({**FIRST, "atomic_gemm": True}, "got rs_overlap_first_gemm with atomic_gemm; all prod"),
    ({"aggregate_ag": True, "tp_size": 3}, "got aggregate_ag with tp_size=3; pairs need an even"),
    ({"aggregate_ag": True, "comm_type": "RS"}, "got aggregate_ag with CommOverlapType"),
    ({"aggregate_ag": True, "method": "BULK"}, "got aggregate_ag with .*BULK"),
    ({"aggregate_ag": True, "use_ce": False}, "got aggregate_ag with use_ce=False; pairs of"),
    ({"aggregate_ag": True, "atomic_gemm": True}, "aggregate_ag with .*=True; it "),
]  # fmt: skip


@unchecked
@pytest.mark.parametrize("options, message", INVALID)
def test_invalid_parameters_are_rejected(options, message):
    for function in (create_comm_overlap_buffer, comm_overlap_buffer_bytes):
        with pytest.raises((ValueError, TypeError), match=f"^{function.__name__}: .*{message}"):
            function(**{**BASE, **options})
    assert list_comm_overlap_buffers() == {}
