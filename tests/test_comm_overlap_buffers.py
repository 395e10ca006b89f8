"""The registry of communication buffers: ids, counts, memory, and destroying at any moment."""

import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch.comm_gemm import (
    CommOverlapBuffer,
    CommOverlapMethod,
    CommOverlapType,
    comm_overlap_buffer_bytes,
    create_comm_overlap_buffer,
    destroy_all_comm_overlap_buffers,
    destroy_comm_overlap_buffer,
    gemm,
    list_comm_overlap_buffers,
    matmul_reduce_scatter,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")


@pytest.fixture(autouse=True)
def no_comm_overlap_buffers():
    destroy_all_comm_overlap_buffers()
    yield
    destroy_all_comm_overlap_buffers()


RING = CommOverlapMethod.RING_EXCHANGE
BASE: dict[str, Any] = {
    "comm_type": "AG",
    "method": "RING_EXCHANGE",
    "buffer_shape": (64, 32),
    "buffer_dtype": "float32",
    "tp_size": 4,
}


def create(**options):
    return create_comm_overlap_buffer(**{**BASE, **options})


def id_of(**options):
    """The id alone; nothing stays."""
    buffer = create(**options)
    destroy_comm_overlap_buffer(buffer)
    return buffer


# ---- Ids.

OTHER: list[dict[str, Any]] = [
    {"comm_type": "RS"},
    {"method": "BULK"},
    {"buffer_shape": (65, 32)},
    {"buffer_shape": (64, 33)},
    {"buffer_shape": (32, 64)},
    {"buffer_dtype": "bfloat16"},
    {"buffer_dtype": "float16"},
    {"buffer_dtype": "float64"},
    {"tp_size": 2},
    {"num_splits": 5},
    {"num_max_streams": 4},
    {"comm_cga_size": 2},
    {"gemm_priority": 1},
    {"gemm_priority": -1},
    {"comm_priority": 1},
    {"num_comm_sm": 2},
    {"set_sm_margin": True},
    {"use_ce": False},
    {"atomic_gemm": True},
    {"aggregate_ag": True},
]


def test_every_parameter_is_part_of_the_id():
    ids = [id_of(), *(id_of(**other) for other in OTHER)]
    assert len(set(ids)) == len(ids)
    pipeline = {"comm_type": "RS", "method": "PIPELINE"}
    assert id_of(**pipeline) != id_of(**pipeline, rs_overlap_first_gemm=True)
    named = {name for other in OTHER for name in other} | {"rs_overlap_first_gemm"}
    (buffer,) = [create()]
    assert named == set(vars(list_comm_overlap_buffers()[buffer].config))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(OTHER), max_size=4), st.lists(st.sampled_from(OTHER), max_size=4))
def test_ids_are_equal_where_all_parameters_are(first, second):
    merged = [{name: x for other in all for name, x in other.items()} for all in (first, second)]
    for options in merged:  # what does not go together
        if options.get("aggregate_ag") and (len(options) > 1):
            del options["aggregate_ag"]
        if options.get("method") == "BULK":
            options.pop("atomic_gemm", None)
            options.update({"comm_cga_size": 2, "num_comm_sm": 2})
            options.update({"set_sm_margin": True, "use_ce": False})
    ids = [id_of(**options) for options in merged]
    assert (ids[0] == ids[1]) == (merged[0] == merged[1])
    assert all(0 < id < 2**63 for id in ids)


@pytest.mark.parametrize(
    "options",
    [
        {"comm_type": CommOverlapType.AG, "method": "ring_exchange", "buffer_shape": [64, 32]},
        {"buffer_dtype": jnp.float32, "tp_size": np.int8(4), "num_splits": np.int64(4)},
        {"buffer_dtype": np.dtype("float32"), "method": RING, "comm_cga_size": 1},
        {"num_comm_sm": 1, "set_sm_margin": False, "use_ce": True},  # the defaults of the ring
    ],
)
def test_equal_arguments_may_be_spelled_in_different_ways(options):
    assert id_of(**options) == id_of()


def test_defaults_are_those_of_the_method():
    parameters = ("comm_cga_size", "num_comm_sm", "set_sm_margin", "use_ce")
    defaults = {}
    for method in ("RING_EXCHANGE", "PIPELINE", "BULK"):
        buffer = create(comm_type="RS", method=method)
        config = list_comm_overlap_buffers()[buffer].config
        defaults[method] = tuple(getattr(config, name) for name in parameters)
        assert (config.num_splits, config.num_max_streams) == (4, 3)
        assert (config.gemm_priority, config.comm_priority) == (0, 0)
    collective = (2, 16, True, False)
    assert defaults == {
        "RING_EXCHANGE": (1, 1, False, True),
        "PIPELINE": collective,
        "BULK": collective,
    }


IDS = """
from jax_cp_dispatch.comm_gemm import create_comm_overlap_buffer
print(create_comm_overlap_buffer("AG", "RING_EXCHANGE", (64, 32), "float32", 4))
print(create_comm_overlap_buffer("RS", "PIPELINE", (8, 2), "bfloat16", 2, num_splits=7))
"""


def test_ids_are_the_same_in_every_process():
    there = subprocess.run(
        [sys.executable, "-c", IDS],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    other = create_comm_overlap_buffer("RS", "PIPELINE", (8, 2), "bfloat16", 2, num_splits=7)
    assert there.split() == [str(create()), str(other)]


# ---- Counts.


def test_equal_arguments_share_one_counted_buffer():
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
    with pytest.raises(
        ValueError, match=f"buffer {buffer} has been destroyed. Create it with crea"
    ):
        destroy_comm_overlap_buffer(buffer)
    assert create() == buffer  # and it is there again
    destroy_all_comm_overlap_buffers()
    assert list_comm_overlap_buffers() == {}
    destroy_all_comm_overlap_buffers()


def test_ids_that_name_nothing():
    with pytest.raises(
        ValueError, match=r"destroy_comm_overlap_buffer: there is no buffer 12345\."
    ):
        destroy_comm_overlap_buffer(12345)
    for wrong in (0, -1, 2**63, True, "7", 1.0, None):
        with pytest.raises(ValueError, match=f"buffer is {re.escape(repr(wrong))}; it needs to be"):
            destroy_comm_overlap_buffer(wrong)  # pyright: ignore


def test_threads_that_create_and_destroy_at_the_same_time():
    errors = []

    def work(thread):
        try:
            for i in range(50):
                shared, own = create(), create(num_splits=thread + 2)
                assert {shared, own} <= set(list_comm_overlap_buffers())
                destroy_comm_overlap_buffer(own)
                if i % 2:
                    destroy_comm_overlap_buffer(shared)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[i]) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [each.num_created for each in list_comm_overlap_buffers().values()] == [6 * 25]


# ---- Memory.


@pytest.mark.parametrize(
    "kind, method, options, num_elements",
    [
        ("AG", "RING_EXCHANGE", {}, 64 * 32),
        ("AG", "BULK", {}, 64 * 32),
        ("RS", "PIPELINE", {"num_splits": 9}, 64 * 32),
        ("RS", "RING_EXCHANGE", {}, 7 * 16 * 32),  # 2 * 4 - 1 blocks of rows
        ("RS", "RING_EXCHANGE", {"use_ce": False}, 4 * 16 * 32),
        ("RS", "RING_EXCHANGE", {"tp_size": 3}, 5 * 22 * 32),  # blocks of rows rounded up
        ("NONE", "NONE", {}, 0),
    ],
)
@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_bytes_before_a_buffer_is_there(kind, method, options, num_elements, dtype, size):
    arguments = {**BASE, "comm_type": kind, "method": method, "buffer_dtype": dtype, **options}
    assert comm_overlap_buffer_bytes(**arguments) == num_elements * size
    assert list_comm_overlap_buffers() == {}


def test_nothing_is_allocated_while_a_program_is_made():
    """The first call takes the memory, later ones of the same group find it."""
    p, x, w = 2, np.ones((2, 4, 3), np.float32), np.ones((2, 3, 5), np.float32)
    buffer = create(comm_type="RS", buffer_shape=(4, 5), tp_size=p)
    huge = create(buffer_shape=(1 << 29, 1 << 30), tp_size=8)
    call = partial(matmul_reduce_scatter, axis_name=AXIS, buffer=buffer)
    program = on_ranks(call, mesh_of(p)).lower(x, w).compile()
    numbers = lambda: list_comm_overlap_buffers()[buffer][1:]
    assert numbers() == (1, 0, 0, 0)
    for calls in (1, 2):
        jax.block_until_ready(program(x, w))
        need = comm_overlap_buffer_bytes("RS", "RING_EXCHANGE", (4, 5), "float32", p)
        assert numbers() == (1, 0, calls, p * need)
    assert list_comm_overlap_buffers()[huge].num_bytes == 0


# ---- Destroyed at the wrong moment.

P_, X, W = 4, np.ones((4, 8, 3), np.float32), np.ones((4, 3, 5), np.float32)
SUM = oracle.matmul_reduce_scatter(X, W)


def fails(result, match):
    """Every rank says the same; the next computation runs."""
    for shard in result.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            np.asarray(shard.data)
    fresh = partial(matmul_reduce_scatter, axis_name=AXIS, method="ring")
    np.testing.assert_array_equal(on_ranks(fresh, mesh_of(P_))(X, W), SUM)


@pytest.mark.parametrize("method", ["RING_EXCHANGE", "PIPELINE"])
def test_a_program_outlives_its_buffer(method):
    """It fails clearly, and runs again when the buffer is created again."""
    again = partial(create, comm_type="RS", method=method, buffer_shape=(8, 5))
    buffer = again()
    call = partial(matmul_reduce_scatter, axis_name=AXIS, buffer=buffer)
    program = on_ranks(call, mesh_of(P_)).lower(X, W).compile()
    np.testing.assert_array_equal(program(X, W), SUM)
    destroy_comm_overlap_buffer(buffer)
    gone = f"matmul_reduce_scatter over axis 'cp': buffer {buffer} has been destroyed. Create it"
    fails(program(X, W), gone)
    fails(program(X, W), gone)
    with pytest.raises(ValueError, match=f"matmul_reduce_scatter: buffer {buffer} has been destr"):
        on_ranks(call, mesh_of(P_)).lower(X, W)
    assert again() == buffer
    np.testing.assert_array_equal(program(X, W), SUM)


def test_destroyed_before_all_ranks_have_come():
    """One rank is late, and finds the buffer gone: an error on all of them."""
    buffer = create(comm_type="RS", buffer_shape=(8, 5))
    may_go, has_come = threading.Event(), threading.Event()

    def late(x, rank):
        if rank == 2:
            has_come.set()
            may_go.wait(30)
        return x

    def local(x, w):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.pure_callback(late, like, x, jax.lax.axis_index(AXIS))
        return matmul_reduce_scatter(x, w, axis_name=AXIS, buffer=buffer)

    program = on_ranks(local, mesh_of(P_), check_vma=False).lower(X, W).compile()
    result = program(X, W)
    assert has_come.wait(30)
    destroy_comm_overlap_buffer(buffer)
    may_go.set()
    fails(result, f"buffer {buffer} has been destroyed")
    assert create(comm_type="RS", buffer_shape=(8, 5)) == buffer
    np.testing.assert_array_equal(program(X, W), SUM)


def test_a_buffer_in_use_stays():
    """Neither destroying refuses later use, nor does a refused one change a count."""
    n = 768
    x = np.ones((2, n, n), np.float32)
    buffer = create(comm_type="RS", buffer_shape=(n, n), tp_size=2, gemm_priority=7)
    other = create()

    def local(x, w):  # calls of one buffer take turns, so that it is in use for long
        call = partial(gemm, comm_overlap=buffer, axis_name=AXIS)
        return sum(call(x * i, w) for i in range(1, 9))

    program = on_ranks(local, mesh_of(2)).lower(x, x).compile()
    result = program(x, x)
    while list_comm_overlap_buffers()[buffer].num_in_use == 0:
        time.sleep(1e-4)
    in_use = rf"{buffer} is in use by \d calls? in flight. Wait for their results"
    with pytest.raises(ValueError, match=f"destroy_comm_overlap_buffer: buffer {in_use}"):
        destroy_comm_overlap_buffer(buffer)
    with pytest.raises(
        ValueError,
        match=rf"destroy_all_comm_overlap_buffers: calls in flight use buffers {buffer} \(\d calls?"
        r"\); none has been destroyed. Wait for their results",
    ):
        destroy_all_comm_overlap_buffers()
    assert set(list_comm_overlap_buffers()) == {buffer, other}
    assert create(comm_type="RS", buffer_shape=(n, n), tp_size=2, gemm_priority=7) == buffer
    destroy_comm_overlap_buffer(buffer)  # the one of the two that is not the last
    np.testing.assert_array_equal(result, np.full((2, n // 2, n), 2 * n * 36))
    assert list_comm_overlap_buffers()[buffer][1:4] == (1, 0, 8)
    destroy_comm_overlap_buffer(buffer)
    assert list(list_comm_overlap_buffers()) == [other]


def test_a_rank_that_never_comes_leaves_the_buffer_free():
    buffer = create(comm_type="RS", buffer_shape=(8, 5))

    def local(x, w):
        here = lambda x: matmul_reduce_scatter(x, w, axis_name=AXIS, buffer=buffer, deadline=0.3)
        away = lambda x: jnp.zeros((2, 5)) + 0 * x[0, 0]
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 1, away, here, x)

    program = on_ranks(local, mesh_of(P_), check_vma=False).lower(X, W).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"missing ranks \[1\]"):
        jax.block_until_ready(program(X, W))
    assert list_comm_overlap_buffers()[buffer].num_in_use == 0
    destroy_comm_overlap_buffer(buffer)


def test_memory_that_is_not_to_be_had():
    """A failed allocation is an error of the call, and the buffer can be destroyed."""
    buffer = create(comm_type="RS", buffer_shape=(1 << 28, 1 << 30))
    call = partial(matmul_reduce_scatter, axis_name=AXIS, buffer=buffer)
    result = on_ranks(call, mesh_of(P_))(X, W)
    fails(result, rf"no memory for buffer {buffer}: 4 ranks of \d+ bytes. Create it with a smaller")
    assert list_comm_overlap_buffers()[buffer].num_in_use == 0
    destroy_comm_overlap_buffer(buffer)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"comm_type": "GATHER"}, ValueError, "comm_type is 'GATHER'; .* CommOverlapType.AG, or"),
        ({"comm_type": 2}, ValueError, "comm_type is 2; it needs to be one of CommOverlapType"),
        ({"method": CommOverlapType.AG}, ValueError, "method is .*CommOverlapMethod.BULK"),
        ({"method": "PIPELINE"}, ValueError, r"got CommOverlapMethod\.PIPELINE with CommOverlapType"
         r"\.AG; .* Take CommOverlapMethod\.RING_EXCHANGE"),
        ({"method": "NONE"}, ValueError, r"got CommOverlapType\.AG with CommOverlapMethod\.NONE; ei"
         "ther both are NONE"),
        ({"comm_type": "NONE"}, ValueError, "either both are NONE.* Name the other one"),
        ({"buffer_shape": (4,)}, ValueError, r"buffer_shape is \(4,\); it needs two sizes"),
        ({"buffer_shape": (4, 4, 4)}, ValueError, r"buffer_shape is \(4, 4, 4\); it needs two siz"),
        ({"buffer_shape": 4}, ValueError, "buffer_shape is 4; it needs two sizes"),
        ({"buffer_shape": (0, 4)}, ValueError, "buffer_shape is 0; it needs to be an integer of a"),
        ({"buffer_shape": (4, 1.5)}, TypeError, "buffer_shape is 1.5; it needs to be an integer"),
        ({"buffer_dtype": "int32"}, ValueError, r"buffer_dtype is int32; .*'bfloat16', 'float16'"),
        ({"buffer_dtype": "nonsense"}, ValueError, "buffer_dtype is 'nonsense'; it needs to be"),
        ({"tp_size": 0}, ValueError, "tp_size is 0; it needs to be an integer of at least 1"),
        ({"tp_size": True}, TypeError, "tp_size is True; it needs to be an integer of at least 1"),
        ({"num_splits": -1}, ValueError, "num_splits is -1; it needs to be an integer of at least"),
        ({"num_splits": "4"}, TypeError, "num_splits is '4'; it needs to be an integer"),
        ({"num_splits": 2**40}, ValueError, "num_splits is 1099511627776; .* at most 1048576"),
        ({"buffer_shape": (2**31, 2**31)}, ValueError, r"buffer_shape is \(2147483648, 2147483648\)"
         r", 18446744073709551616 bytes for each of 4 ranks; it needs less than 2\*\*62\. Take"),
        ({"gemm_priority": 2**62}, ValueError, "gemm_priority is 4611686018427387904; it needs"),
        ({"use_ce": 1}, TypeError, "use_ce is 1; it needs to be True or False"),
        ({"method": "BULK", "atomic_gemm": True}, ValueError,
         r"got atomic_gemm with CommOverlapMethod\.BULK; chunk counters need chunks: CommOverlapM"),
        ({"rs_overlap_first_gemm": True}, ValueError, "got rs_overlap_first_gemm with .* Leave it"),
        ({"aggregate_ag": True, "tp_size": 3}, ValueError,
         r"got aggregate_ag with tp_size=3; pairs need an even one\. Leave it away"),
        ({"aggregate_ag": True, "comm_type": "RS"}, ValueError, "got aggregate_ag with CommOverla"),
        ({"aggregate_ag": True, "method": "BULK"}, ValueError, "got aggregate_ag with .*BULK"),
        ({"aggregate_ag": True, "atomic_gemm": True}, ValueError, "aggregate_ag with .*=True; it "),
    ],
)  # fmt: skip
def test_parameters_that_are_refused(options, error, message):
    """By the size as by the buffer itself; nothing is created."""
    for function in (create_comm_overlap_buffer, comm_overlap_buffer_bytes):
        with pytest.raises(error, match=f"^{function.__name__}: .*{message}"):
            function(**{**BASE, **options})
    assert list_comm_overlap_buffers() == {}
