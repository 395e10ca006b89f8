"""Communication buffers: ids, defaults, bytes, counts, memory, and destruction at any time."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax.numpy as jnp
import numpy as np
import pytest
from comm_overlap_cases import BASE, create, no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, Gate, all_fail, mesh_of, on_ranks

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

pytestmark = pytest.mark.usefixtures("unchecked_types")

RING = CommOverlapMethod.RING_EXCHANGE


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
    (buffer,) = [create()]
    assert named == set(vars(list_comm_overlap_buffers()[buffer].config))


def test_ids_are_the_same_in_every_process():
    """Python's hashes are not."""
    assert create() == 7859231275419051731
    other = create_comm_overlap_buffer("RS", "PIPELINE", (8, 2), "bfloat16", 2, num_splits=7)
    assert other == 6472580938398280615


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


# ---- Memory, and its end.

P_, X, W = 4, np.ones((4, 8, 3), np.float32), np.ones((4, 3, 5), np.float32)
SUM = oracle.matmul_reduce_scatter(X, W)


def fails(result, match):
    """Every rank gets the same error; the next computation runs."""
    all_fail(result, match)
    fresh = partial(matmul_reduce_scatter, axis_name=AXIS, method="ring")
    np.testing.assert_array_equal(on_ranks(fresh, mesh_of(P_))(X, W), SUM)


def compiled(gate=None):
    """Returns a buffer, and a program with it, in which one rank may be late."""
    buffer = create(comm_type="RS", buffer_shape=(8, 5))
    call = partial(matmul_reduce_scatter, axis_name=AXIS, buffer=buffer)
    local = lambda x, w: call(gate.wait_at(x) if gate else x, w)
    return buffer, on_ranks(local, mesh_of(P_), check_vma=False).lower(X, W).compile()


def test_a_program_outlives_its_buffer():
    """It fails with a clear error, and runs again once the buffer is created again.

    Compiling allocates nothing; the first call does, and later ones of the same group reuse it.
    """
    huge = create(buffer_shape=(1 << 20, 1 << 21), tp_size=8)
    buffer, program = compiled()
    need = P_ * comm_overlap_buffer_bytes("RS", "RING_EXCHANGE", (8, 5), "float32", P_)
    for calls in (0, 1, 2):
        assert list_comm_overlap_buffers()[buffer][1:] == (1, 0, calls, (calls > 0) * need)
        np.testing.assert_array_equal(program(X, W), SUM)
    assert list_comm_overlap_buffers()[huge].num_bytes == 0
    destroy_comm_overlap_buffer(buffer)
    gone = f"matmul_reduce_scatter over axis 'cp': buffer {buffer} has been destroyed. Create it"
    fails(program(X, W), gone)
    fails(program(X, W), gone)
    assert create(comm_type="RS", buffer_shape=(8, 5)) == buffer
    np.testing.assert_array_equal(program(X, W), SUM)


def test_destroyed_before_all_ranks_arrive():
    """One rank is late and finds the buffer destroyed: all ranks get an error."""
    gate = Gate(rank=2)
    buffer, program = compiled(gate)
    result = program(X, W)
    assert gate.has_come.wait(30)
    destroy_comm_overlap_buffer(buffer)
    gate.may_go.set()
    fails(result, f"buffer {buffer} has been destroyed")
    assert create(comm_type="RS", buffer_shape=(8, 5)) == buffer
    np.testing.assert_array_equal(program(X, W), SUM)


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
    result = on_ranks(call, mesh_of(P_))(X, W)
    fails(result, rf"no memory for buffer {buffer}: 4 ranks of \d+ bytes. Create it with a smaller")
    assert list_comm_overlap_buffers()[buffer].num_in_use == 0
    destroy_comm_overlap_buffer(buffer)


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


@pytest.mark.parametrize("options, message", INVALID)
def test_invalid_parameters_are_rejected(options, message):
    for function in (create_comm_overlap_buffer, comm_overlap_buffer_bytes):
        with pytest.raises((ValueError, TypeError), match=f"^{function.__name__}: .*{message}"):
            function(**{**BASE, **options})
    assert list_comm_overlap_buffers() == {}
