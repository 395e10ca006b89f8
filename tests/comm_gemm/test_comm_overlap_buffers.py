"""The registry of communication buffers: counts, memory, and destruction at any time."""

import re
import threading
import time
from functools import partial

import comm_gemm_oracle as oracle
import jax
import numpy as np
import pytest
from comm_overlap_cases import create, no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, Gate, mesh_of, on_ranks

from jax_cp_dispatch import gemm, matmul_reduce_scatter
from jax_cp_dispatch.buffers import (
    CommOverlapBuffer,
    CommOverlapMethod,
    CommOverlapType,
    comm_overlap_buffer_bytes,
    destroy_all_comm_overlap_buffers,
    destroy_comm_overlap_buffer,
    list_comm_overlap_buffers,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")


# ---- Counts.


def test_create_comm_overlap_buffer_counts_equal_arguments_as_one_buffer():
    buffer, second = create(), create(tp_size=2)
    assert create() == create() == buffer
    listed = list_comm_overlap_buffers()
    assert {id: each.num_created for id, each in listed.items()} == {buffer: 3, second: 1}
    config = listed[buffer].config
    assert listed[buffer] == CommOverlapBuffer(config, 3, num_in_use=0, num_calls=0, num_bytes=0)
    assert (config.comm_type, config.method) == (
        CommOverlapType.AG,
        CommOverlapMethod.RING_EXCHANGE,
    )
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
    assert create() == buffer  # and it exists again
    destroy_all_comm_overlap_buffers()
    assert list_comm_overlap_buffers() == {}
    destroy_all_comm_overlap_buffers()


def test_ids_without_a_buffer():
    with pytest.raises(
        ValueError, match=r"destroy_comm_overlap_buffer: there is no buffer 12345\."
    ):
        destroy_comm_overlap_buffer(12345)
    for wrong in (0, -1, 2**63, True, "7", 1.0, None):
        with pytest.raises(ValueError, match=f"buffer is {re.escape(repr(wrong))}; it needs to be"):
            destroy_comm_overlap_buffer(wrong)  # pyright: ignore


def test_create_and_destroy_comm_overlap_buffer_in_many_threads():
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


def test_nothing_is_allocated_while_a_program_is_compiled():
    """The first call allocates the memory; later calls of the same group reuse it."""
    p, x, w = 2, np.ones((2, 4, 3), np.float32), np.ones((2, 3, 5), np.float32)
    buffer = create(comm_type="RS", buffer_shape=(4, 5), tp_size=p)
    huge = create(buffer_shape=(1 << 20, 1 << 21), tp_size=8)
    call = partial(matmul_reduce_scatter, axis_name=AXIS, buffer=buffer)
    program = on_ranks(call, mesh_of(p)).lower(x, w).compile()
    numbers = lambda: list_comm_overlap_buffers()[buffer][1:]
    assert numbers() == (1, 0, 0, 0)
    for calls in (1, 2):
        jax.block_until_ready(program(x, w))
        need = comm_overlap_buffer_bytes("RS", "RING_EXCHANGE", (4, 5), "float32", p)
        assert numbers() == (1, 0, calls, p * need)
    assert list_comm_overlap_buffers()[huge].num_bytes == 0


# ---- Destroyed at the wrong time.

P_, X, W = 4, np.ones((4, 8, 3), np.float32), np.ones((4, 3, 5), np.float32)
SUM = oracle.matmul_reduce_scatter(X, W)


def fails(result, match):
    """Every rank gets the same error; the next computation runs."""
    for shard in result.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            np.asarray(shard.data)
    fresh = partial(matmul_reduce_scatter, axis_name=AXIS, method="ring")
    np.testing.assert_array_equal(on_ranks(fresh, mesh_of(P_))(X, W), SUM)


def test_a_program_outlives_its_buffer():
    """It fails with a clear error, and runs again once the buffer is created again."""
    again = partial(create, comm_type="RS", method="PIPELINE", buffer_shape=(8, 5))
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


def test_destroyed_before_all_ranks_arrive():
    """One rank is late and finds the buffer destroyed: all ranks get an error."""
    buffer = create(comm_type="RS", buffer_shape=(8, 5))
    gate = Gate(rank=2)

    def local(x, w):
        return matmul_reduce_scatter(gate.wait_at(x), w, axis_name=AXIS, buffer=buffer)

    program = on_ranks(local, mesh_of(P_), check_vma=False).lower(X, W).compile()
    result = program(X, W)
    assert gate.has_come.wait(30)
    destroy_comm_overlap_buffer(buffer)
    gate.may_go.set()
    fails(result, f"buffer {buffer} has been destroyed")
    assert create(comm_type="RS", buffer_shape=(8, 5)) == buffer
    np.testing.assert_array_equal(program(X, W), SUM)


def test_a_buffer_in_use_is_kept():
    """A failed attempt to destroy it neither blocks later use nor changes a count."""
    n = 768
    x = np.ones((2, n, n), np.float32)
    buffer = create(comm_type="RS", buffer_shape=(n, n), tp_size=2, gemm_priority=7)
    other = create()

    def local(x, w):  # calls of one buffer take turns, so it is in use for a long time
        call = partial(gemm, comm_overlap=buffer, axis_name=AXIS)
        return sum(call(x * i, w) for i in range(32))

    program = on_ranks(local, mesh_of(2)).lower(x, x).compile()
    result = program(x, x)
    while list_comm_overlap_buffers()[buffer].num_in_use == 0:
        assert not result.is_ready()
        time.sleep(1e-4)
    in_use = rf"{buffer} is in use by \d+ calls? in flight. Wait for their results"
    with pytest.raises(ValueError, match=f"destroy_comm_overlap_buffer: buffer {in_use}"):
        destroy_comm_overlap_buffer(buffer)
    with pytest.raises(
        ValueError,
        match=rf"destroy_all_comm_overlap_buffers: calls in flight use buffers {buffer} "
        r"\(\d+ calls?\); none has been destroyed. Wait for their results",
    ):
        destroy_all_comm_overlap_buffers()
    assert set(list_comm_overlap_buffers()) == {buffer, other}
    assert create(comm_type="RS", buffer_shape=(n, n), tp_size=2, gemm_priority=7) == buffer
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
