"""Dispatch buffers: ids and limits on the host; in calls, their errors and lifetime.

All else is as without a buffer.
"""

import gc
import math
import os
import pathlib
import re
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, Gate, mesh_of, on_ranks

from jax_cp_dispatch import Metadata, combine, dispatch, dispatch_qkv
from jax_cp_dispatch._dispatch import buffers  # inner: what a call reads of a buffer
from jax_cp_dispatch._ranks import runtime  # inner: how many calls use a buffer
from jax_cp_dispatch.buffers import (
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
)

pytestmark = pytest.mark.usefixtures("no_buffers", "unchecked_types")

W, S, T, F = 8, 3, 8, 2
CAPACITY = W * T * 2  # enough for every plan with two replicas
RNG = np.random.default_rng(0)
PLAN = random_plan(RNG, W, S, T, 2)
METADATA = Metadata(**PLAN)
X = RNG.integers(-8, 9, (W, T, F)).astype(np.float32)
Y = RNG.integers(-8, 9, (W, CAPACITY, F)).astype(np.float32)


def create(**options):
    return create_dispatch_buffer(**{"capacity": CAPACITY, **options})


# ---- On the host.


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
    assert (limits(first), limits(np.int64(second))) == ((CAPACITY, None), (7, 1.0))
    assert type(first) is int
    destroy_dispatch_buffer(np.int32(first))
    assert not exists(first) and exists(second)
    third = create()
    destroy_all_dispatch_buffers()
    assert not exists(second) and not exists(third)
    destroy_all_dispatch_buffers()
    assert create() == third + 1  # ids are never reused


REFUSED = {
    ValueError: {"capacity": (0, -1, -(2**200), 2**40), "deadline": (0, -1.0, math.inf, math.nan)},
    TypeError: {
        "capacity": (True, np.True_, 8.0, "8", [8]),
        "deadline": (True, np.True_, "60", 1j),
    },
}
NEEDS = {
    "capacity": "(it needs to be an integer|Pass at most 2147483647)",
    "deadline": "it needs to be a positive number of sec",
}


@pytest.mark.parametrize("error", REFUSED)
@pytest.mark.parametrize("name", NEEDS)
def test_limits_that_are_refused(error, name):
    for value in REFUSED[error][name]:
        says = f"^create_dispatch_buffer: {name} is {re.escape(repr(value))}.*{NEEDS[name]}"
        with pytest.raises(error, match=says):
            create(**{name: value})


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


def test_create_dispatch_buffer_in_many_threads():
    before, together = create(), threading.Barrier(8)

    def work(thread):
        together.wait()
        ids = []
        for i in range(100):
            ids.append(create(capacity=thread + 1))
            assert limits(ids[-1]) == (thread + 1, None)
            if i % 2:
                destroy_dispatch_buffer(ids[-1])
        return ids

    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(work, range(8)))
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
            assert not exists(buffer)
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


# ---- In calls.


def num_in_use(buffer):
    """Returns the calls in flight that use a buffer, one per rank."""
    return runtime.native.find_buffer("test", buffer)


def program(fn, *, check_vma=True):
    """Runs `fn(x, metadata)` on every rank."""
    return on_ranks(fn, mesh_of(W), check_vma=check_vma)


def sending(buffer):
    return program(lambda x, m: dispatch(x, m, axis_name=AXIS, buffer=buffer))


def slow(x, rounds):
    """Returns `x` after arithmetic that it depends on."""
    busy = jnp.broadcast_to(x[:1, :1], (256, 256))
    busy = jax.lax.fori_loop(0, rounds, lambda _, a: jnp.sin(a) + 0.5, busy)
    return x + (busy[0, 0] > 1e6)


def slow_sending(buffer):
    """Returns a program (x, rounds of arithmetic before the call, metadata)."""
    send = lambda x, rounds, m: dispatch(slow(x, rounds), m, axis_name=AXIS, buffer=buffer)
    return program(send, check_vma=False)


def refuses(fn, match):
    """The running program fails, and the process survives: the next result is correct."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(fn())
    np.testing.assert_array_equal(
        program(lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=CAPACITY))(X, METADATA),
        dispatched(PLAN, X, CAPACITY),
    )


def test_capacity_comes_from_the_buffer():
    buffer, other = create(), create(capacity=CAPACITY + 7)
    send = sending(buffer)
    for _ in range(3):
        np.testing.assert_array_equal(send(X, METADATA), dispatched(PLAN, X, CAPACITY))
    got = sending(other)(X, METADATA)
    np.testing.assert_array_equal(got, dispatched(PLAN, X, CAPACITY + 7))
    assert num_in_use(buffer) == num_in_use(other) == 0


def test_plan_that_exceeds_the_buffer():
    buffer = create(capacity=5)
    refuses(lambda: sending(buffer)(X, METADATA), r"would receive \d+ tokens but capacity is 5")
    assert num_in_use(buffer) == 0


def deadline_of(**options):
    run = program(lambda x, m: dispatch(x, m, axis_name=AXIS, **options))
    return re.findall(r"deadline_ms = (\d+) : i64", run.lower(X, METADATA).as_text())


@pytest.mark.parametrize(
    "asked, milliseconds",
    [(0.25, "250"), (1e-9, "1"), (np.float32(2), "2000"), (10**400, "100000000000")],
)
def test_deadlines_are_whole_milliseconds_of_at_most_three_years(asked, milliseconds):
    buffer = create(deadline=asked)
    assert deadline_of(buffer=buffer) == [milliseconds]
    assert deadline_of(buffer=buffer, deadline=3.0) == ["3000"]  # of the call


# ---- Destroyed buffers.


def test_destroyed_id_in_a_compiled_program():
    """Every rank gets the error; none keeps waiting, whichever arrives first."""
    buffer = create()
    send = slow_sending(buffer)
    rounds = np.arange(W, dtype=np.int32)
    np.testing.assert_array_equal(send(X, rounds, METADATA), dispatched(PLAN, X, CAPACITY))
    destroy_dispatch_buffer(buffer)
    for shift in range(3):
        refuses(
            lambda shift=shift: send(X, np.roll(rounds, shift), METADATA),
            rf"dispatch over axis 'cp': buffer {buffer} has been destroyed. Create another",
        )
    assert create() == buffer + 1  # its id is not reused
    refuses(lambda: send(X, rounds, METADATA), rf"buffer {buffer} has been destroyed")


def test_a_buffer_in_use_is_kept():
    """One rank keeps the call open; the ranks that have arrived use the buffer."""
    buffer, spare = create(), create()
    gate = Gate(rank=3)
    send = lambda x, m: dispatch(gate.wait_at(x), m, axis_name=AXIS, buffer=buffer)
    late = program(send, check_vma=False)(X, METADATA)
    while num_in_use(buffer) < W - 1:
        assert not late.is_ready()
        time.sleep(1e-4)
    with pytest.raises(ValueError, match=f"buffer {buffer} is in use by 7 calls in flight, one pe"):
        destroy_dispatch_buffer(buffer)
    with pytest.raises(ValueError, match=rf"use buffers {buffer} \(7 calls\); none has been destr"):
        destroy_all_dispatch_buffers()
    assert (num_in_use(buffer), num_in_use(spare)) == (W - 1, 0)
    gate.may_go.set()
    np.testing.assert_array_equal(late, dispatched(PLAN, X, CAPACITY))
    destroy_dispatch_buffer(buffer)


def test_a_buffer_can_be_destroyed_once_results_are_ready():
    """Every call releases the buffer before its result is ready."""
    buffer = create()
    send = sending(buffer)
    for _ in range(200):  # as `destroy` requires; a new buffer would need a new program
        jax.block_until_ready(send(X, METADATA))
        assert num_in_use(buffer) == 0
    destroy_dispatch_buffer(buffer)


def test_a_late_rank_gets_the_error_of_the_others():
    """The group failed without it: it waits for no new meeting. The buffer tells when."""
    buffer = create()
    gate = Gate(rank=2)
    options = {"axis_name": AXIS, "buffer": buffer, "deadline": 2.0}
    send = lambda x, m: dispatch(gate.wait_at(x), m, **options)
    result = program(send, check_vma=False)(X, METADATA)
    while num_in_use(buffer) < W - 1:
        time.sleep(1e-4)
    while num_in_use(buffer) > 0:
        time.sleep(1e-4)
    gate.may_go.set()
    for shard in result.addressable_shards:
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"deadline of 2000 ms passed: 7/8 ranks arrived.*missing ranks \[2\]",
        ):
            np.asarray(shard.data)


# ---- All else is as without a buffer.


def test_combine():
    buffer = create()
    combine_rows = program(lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=T, buffer=buffer))
    np.testing.assert_array_equal(combine_rows(Y, METADATA), combined(PLAN, Y, T))
    longer = np.concatenate([Y, Y[:, :1]], axis=1)
    message = rf"y has {CAPACITY + 1} rows per rank but the capacity of buffer {buffer} is"
    with pytest.raises(ValueError, match=message):
        combine_rows(longer, METADATA)


def test_queries_and_keys_have_separate_buffers():
    kv_plan = random_plan(np.random.default_rng(1), W, 5, T, 1)
    q_buffer, kv_buffer = create(), create(capacity=W * T)
    send = program(
        lambda x, kv, m, n: dispatch_qkv(
            x, kv, m, n, axis_name=AXIS, q_buffer=q_buffer, kv_buffer=kv_buffer
        )
    )
    kv = (X + 1, np.tile(X, (1, 1, 3)))
    q, (k, v) = send(X, kv, METADATA, Metadata(**kv_plan))
    np.testing.assert_array_equal(q, dispatched(PLAN, X, CAPACITY))
    np.testing.assert_array_equal(k, dispatched(kv_plan, kv[0], W * T))
    np.testing.assert_array_equal(v, dispatched(kv_plan, kv[1], W * T))
    destroy_dispatch_buffer(kv_buffer)
    refuses(lambda: send(X, kv, METADATA, Metadata(**kv_plan)), f"buffer {kv_buffer} has been des")
    assert num_in_use(q_buffer) == 0


def test_gradients():
    """The calls of the backward pass use the buffer too."""
    buffer = create()
    send = sending(buffer)
    y, pull = jax.vjp(lambda x: send(x, METADATA), X)
    np.testing.assert_array_equal(y, dispatched(PLAN, X, CAPACITY))
    np.testing.assert_array_equal(pull(Y)[0], combined(PLAN, Y, T))
    destroy_dispatch_buffer(buffer)
    op = "the transpose of dispatch over axis 'cp'"
    refuses(lambda: pull(Y), f"{op}: buffer {buffer} has been destroyed")
