"""Dispatch buffers on the host: limits, ids, errors, threads, and leaks."""

import gc
import math
import os
import pathlib
import re
import resource
import threading

import jax
import numpy as np
import pytest

from jax_cp_dispatch._dispatch import buffers
from jax_cp_dispatch._ranks.communicator import in_milliseconds
from jax_cp_dispatch.buffers import (
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
)

pytestmark = pytest.mark.usefixtures("no_buffers", "unchecked_types")


def create(**options):
    return create_dispatch_buffer(**{"capacity": 16, **options})


def limits(buffer):
    return buffers.buffer_limits("x", buffer)


def exists(buffer):
    try:
        return bool(limits(buffer))
    except ValueError:
        return False


def test_a_buffer_is_its_limits():
    first = create()
    second = create(capacity=np.int32(7), deadline=1)
    assert (limits(first), limits(np.int64(second))) == ((16, None), (7, 1.0))
    assert type(first) is int
    destroy_dispatch_buffer(np.int32(first))
    assert not exists(first) and exists(second)
    third = create()
    destroy_all_dispatch_buffers()
    assert not exists(second) and not exists(third)
    destroy_all_dispatch_buffers()
    assert create() == third + 1  # ids are never reused


@pytest.mark.parametrize(
    "asked, milliseconds", [(0.25, 250), (1e-9, 1), (np.float32(2), 2000), (10**400, 10**11)]
)
def test_deadlines_are_whole_milliseconds_of_at_most_three_years(asked, milliseconds):
    assert in_milliseconds(limits(create(deadline=asked)).deadline) == milliseconds


@pytest.mark.parametrize(
    "value, needs",
    [
        *((value, "; it needs to be an integer of at least 1") for value in (0, -1, -(2**200))),
        (2**40, ", but row numbers have 32 bits. Pass at most 2147483647"),
    ],
)
def test_a_capacity_is_a_number_of_rows(value, needs):
    message = f"create_dispatch_buffer: capacity is {value}{needs}"
    with pytest.raises(ValueError, match=re.escape(message)):
        create(capacity=value)


@pytest.mark.parametrize("value", [True, np.True_, 8.0, "8", [8]])
def test_a_capacity_is_an_integer(value):
    message = f"dispatch_buffer: capacity is {re.escape(repr(value))}; it needs to be an integer"
    with pytest.raises(TypeError, match=message):
        create(capacity=value)


@pytest.mark.parametrize(
    "error, deadlines",
    [(ValueError, (0, -1.0, math.inf, math.nan)), (TypeError, (True, np.True_, "60", 1j))],
)
def test_deadlines_are_positive_seconds(error, deadlines):
    for deadline in deadlines:
        with pytest.raises(error, match=r"deadline is .*; it needs to be a positive number of sec"):
            create(deadline=deadline)


NAMING = [
    (destroy_dispatch_buffer, "destroy_dispatch_buffer"),
    (lambda buffer: buffers.buffer_limits("dispatch", buffer), "dispatch"),
]


@pytest.mark.parametrize("function, op", NAMING)
def test_ids_without_a_buffer(function, op):
    buffer = create()
    destroy_dispatch_buffer(buffer)
    with pytest.raises(ValueError, match=rf"{op}: buffer {buffer} has been destroyed\. Create"):
        function(buffer)
    with pytest.raises(ValueError, match=f"no buffer {buffer + 1}; ids so far are 1 to"):
        function(buffer + 1)
    for number in (0, -1, 2**63):
        with pytest.raises(ValueError, match=rf"{op}: buffer is {number}; .* is positive"):
            function(number)
    for other in (True, float(buffer), None, str(buffer)):
        with pytest.raises(TypeError, match=f"{op}: buffer is {re.escape(repr(other))}; it needs"):
            function(other)


def test_a_traced_id_is_rejected():
    with pytest.raises(TypeError, match=r"x: buffer is .*Tracer.*; it needs to be the int"):
        jax.make_jaxpr(limits)(create())


def in_threads(work, num_threads=8):
    """Runs `work(thread)` in threads that start together; returns what each returned."""
    start, results, errors = threading.Barrier(num_threads), {}, []

    def run(thread):
        start.wait()
        try:
            results[thread] = work(thread)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[thread]) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return [results[thread] for thread in range(num_threads)]


def test_create_dispatch_buffer_in_many_threads():
    before = create()

    def work(thread):
        ids = []
        for i in range(100):
            ids.append(create(capacity=thread + 1))
            assert limits(ids[-1]) == (thread + 1, None)
            if i % 2:
                destroy_dispatch_buffer(ids[-1])
        return ids

    ids = in_threads(work)
    given = sorted(id for mine in ids for id in mine)
    assert given == list(range(before + 1, before + 1 + 8 * 100))
    assert {id for id in given if exists(id)} == {id for mine in ids for id in mine[::2]}


def resources():
    """(bytes of memory, threads, open files) of this process."""
    num_pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    count = lambda folder: len(os.listdir(f"/proc/self/{folder}"))
    return num_pages * resource.getpagesize(), count("task"), count("fd")


def test_ten_thousand_buffers_leave_nothing_behind():
    def cycles(num_cycles):
        for _ in range(num_cycles):
            buffer = create()
            destroy_dispatch_buffer(buffer)
            with pytest.raises(ValueError):
                destroy_dispatch_buffer(buffer)
        gc.collect()

    # Fills holes in the heap that would hide a leak; an entry takes 96 bytes.
    filling = [np.empty(96, np.uint8) for _ in range(50_000)]
    cycles(1000)
    memory, *others = resources()
    cycles(10_000)
    memory_after, *others_after = resources()
    # Threads of other tests may have ended in the meantime.
    assert all(after <= before for before, after in zip(others, others_after, strict=True))
    assert memory_after - memory < 1 << 19  # 100 bytes per buffer would be twice that
    del filling
