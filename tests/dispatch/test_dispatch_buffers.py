"""Dispatch buffers: ids and limits on the host; in calls, their errors and lifetime.

All else is as without a buffer.
"""

import gc
import math
import pathlib
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from dispatch_cases import (
    CAPACITY,
    HOME,
    METADATA,
    PLAN,
    SENT,
    X_OF_RANKS as X,
    Y_OF_RANKS as Y,
    T,
    W,
    combine_rows,
    fails,
    milliseconds_of,
    send,
)
from inner import calls_in_flight
from movement_oracle import dispatched, random_plan
from on_mesh import AXIS, Gate, all_fail, mesh_of, on_ranks

from jax_cp_dispatch import Metadata, dispatch_qkv
from jax_cp_dispatch.buffers import (
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
)

pytestmark = pytest.mark.usefixtures("no_buffers", "unchecked_types")


def create(**options):
    return create_dispatch_buffer(**{"capacity": CAPACITY, **options})


def sending(buffer, **options):
    return on_ranks(lambda x, m: send(x, m, buffer=buffer, **options), mesh_of(W))


# ---- On the host.


def rows_of(buffer):
    """Returns the rows of a result of each rank."""
    return jax.eval_shape(sending(buffer), X, METADATA).shape[1]


def exists(buffer):
    """Whether a buffer exists; not any more."""
    try:
        destroy_dispatch_buffer(buffer)
    except ValueError:
        return False
    return True


def test_a_buffer_is_its_limits():
    first = create()
    second = create(capacity=np.int32(7), deadline=1)
    assert (rows_of(first), rows_of(np.int64(second))) == (CAPACITY, 7)
    assert type(first) is int
    destroy_dispatch_buffer(np.int32(first))
    assert not exists(first) and rows_of(second) == 7
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


@pytest.mark.parametrize("function", [destroy_dispatch_buffer, rows_of])
def test_ids_without_a_buffer(function):
    buffer, op = create(), "dispatch" if function is rows_of else function.__name__
    destroy_dispatch_buffer(buffer)
    with pytest.raises(ValueError, match=rf"{op}: buffer {buffer} has been destroyed\. Create"):
        function(buffer)
    with pytest.raises(ValueError, match=f"no buffer {buffer + 1}; ids so far are 1 to"):
        function(buffer + 1)
    for number in (0, -1, 2**63):
        with pytest.raises(ValueError, match=rf"{op}: buffer is {number}; .* is positive"):
            function(number)
    for other in (True, float(buffer), str(buffer)):
        with pytest.raises(TypeError, match=f"{op}: buffer is {re.escape(repr(other))}; it needs"):
            function(other)


def test_a_traced_id_is_rejected():
    with pytest.raises(TypeError, match=r"dispatch: buffer is .*Tracer.*; it needs to be the int"):
        jax.make_jaxpr(rows_of)(create())


def test_thousands_of_buffers_leave_nothing_behind():
    """In several threads, too, each gets its own ids."""

    def resident():
        num_pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return num_pages * resource.getpagesize()

    def cycles(num_cycles):
        buffer = -1
        for _ in range(num_cycles):
            buffer = create()
            assert exists(buffer) and not exists(buffer)
        gc.collect()
        return buffer

    # Fills holes in the heap that would hide a leak; an entry takes 96 bytes.
    filling = [np.empty(96, np.uint8) for _ in range(50_000)]
    cycles(1000)
    memory = resident()
    last = cycles(10_000)
    assert resident() - memory < 1 << 19  # 100 bytes per buffer would be twice that
    del filling
    create_many = lambda _: [create() for _ in range(50)]
    with ThreadPoolExecutor(8) as threads:
        ids = [id for mine in threads.map(create_many, range(8)) for id in mine]
    assert sorted(ids) == list(range(last + 1, last + 401)) and all(map(exists, ids))


# ---- In calls.


def test_capacity_comes_from_the_buffer():
    for more in (0, 7):
        buffer = create(capacity=CAPACITY + more)
        got = sending(buffer)(X, METADATA)
        np.testing.assert_array_equal(got, dispatched(PLAN, X, CAPACITY + more))
        assert calls_in_flight(buffer) == 0
    buffer = create(capacity=5)
    fails(sending(buffer)(X, METADATA), r"would receive \d+ tokens but capacity is 5")
    assert calls_in_flight(buffer) == 0


@pytest.mark.parametrize(
    "asked, milliseconds",
    [(0.25, "250"), (1e-9, "1"), (np.float32(2), "2000"), (10**400, "100000000000")],
)
def test_deadlines_are_whole_milliseconds_of_at_most_three_years(asked, milliseconds):
    buffer = create(deadline=asked)
    assert milliseconds_of(buffer=buffer) == [milliseconds]
    assert milliseconds_of(buffer=buffer, deadline=3.0) == ["3000"]  # of the call


# ---- Destroyed buffers, and buffers in use.


def test_destroyed_id_in_a_compiled_program():
    """Every rank gets the error; none keeps waiting, whichever arrives last."""
    buffer = create()
    gates = [Gate(rank=rank) for rank in range(W)]

    def at_its_gate(x, m, late):
        waits = [lambda x, gate=gate: gate.wait_at(x) for gate in gates]
        return send(jax.lax.switch(late, waits, x), m, buffer=buffer)

    run = on_ranks(at_its_gate, mesh_of(W), check_vma=False)
    gates[0].may_go.set()
    np.testing.assert_array_equal(run(X, METADATA, np.zeros(W, np.int32)), SENT)
    destroy_dispatch_buffer(buffer)
    says = rf"dispatch over axis 'cp': buffer {buffer} has been destroyed. Create another"
    for rank in range(1, W):
        out = run(X, METADATA, np.full(W, rank, np.int32))
        assert gates[rank].has_come.wait(600)
        gates[rank].may_go.set()
        fails(out, says)
    assert create() == buffer + 1  # its id is not reused
    fails(run(X, METADATA, np.zeros(W, np.int32)), f"buffer {buffer} has been destroyed")


def test_a_buffer_in_use_is_kept():
    """One rank keeps the call open; the ranks that have arrived use the buffer."""
    buffer, spare = create(), create()
    gate = Gate(rank=3)
    late_send = lambda x, m: send(gate.wait_at(x), m, buffer=buffer)
    late = on_ranks(late_send, mesh_of(W), check_vma=False)(X, METADATA)
    while calls_in_flight(buffer) < W - 1:
        assert not late.is_ready()
        time.sleep(1e-4)
    with pytest.raises(ValueError, match=f"buffer {buffer} is in use by 3 calls in flight, one pe"):
        destroy_dispatch_buffer(buffer)
    with pytest.raises(ValueError, match=rf"use buffers {buffer} \(3 calls\); none has been destr"):
        destroy_all_dispatch_buffers()
    assert (calls_in_flight(buffer), calls_in_flight(spare)) == (W - 1, 0)
    gate.may_go.set()
    np.testing.assert_array_equal(late, SENT)
    destroy_dispatch_buffer(buffer)


def test_a_buffer_can_be_destroyed_once_results_are_ready():
    """Every call releases the buffer before its result is ready."""
    buffer = create()
    run = sending(buffer)
    for _ in range(200):  # as `destroy` requires; a new buffer would need a new program
        jax.block_until_ready(run(X, METADATA))
        assert calls_in_flight(buffer) == 0
    destroy_dispatch_buffer(buffer)


def test_a_late_rank_gets_the_error_of_the_others():
    """The group failed without it: it waits for no new meeting. The buffer tells when."""
    buffer, gate = create(), Gate(rank=2)
    late_send = lambda x, m: send(gate.wait_at(x), m, buffer=buffer, deadline=2.0)
    result = on_ranks(late_send, mesh_of(W), check_vma=False)(X, METADATA)
    while calls_in_flight(buffer) < W - 1:
        time.sleep(1e-4)
    while calls_in_flight(buffer) > 0:
        time.sleep(1e-4)
    gate.may_go.set()
    all_fail(result, r"deadline of 2000 ms passed: 3/4 ranks arrived.*missing ranks \[2\]")


# ---- All else is as without a buffer.


def test_combine():
    buffer = create()
    run = on_ranks(lambda y, m: combine_rows(y, m, buffer=buffer), mesh_of(W))
    np.testing.assert_array_equal(run(Y, METADATA), HOME)
    longer = np.concatenate([Y, Y[:, :1]], axis=1)
    message = rf"y has {CAPACITY + 1} rows per rank but the capacity of buffer {buffer} is"
    with pytest.raises(ValueError, match=message):
        run(longer, METADATA)


def test_queries_and_keys_have_separate_buffers():
    kv_plan = random_plan(np.random.default_rng(1), W, 5, T, 1)
    q_buffer, kv_buffer = create(), create(capacity=W * T)
    buffers = {"q_buffer": q_buffer, "kv_buffer": kv_buffer}
    run = on_ranks(lambda *args: dispatch_qkv(*args, axis_name=AXIS, **buffers), mesh_of(W))
    operands = X, (X + 1, np.tile(X, (1, 1, 3))), METADATA, Metadata(**kv_plan)
    q, kv = run(*operands)
    np.testing.assert_array_equal(q, SENT)
    for got, rows in zip(kv, operands[1], strict=True):
        np.testing.assert_array_equal(got, dispatched(kv_plan, rows, W * T))
    destroy_dispatch_buffer(kv_buffer)
    fails(run(*operands), f"buffer {kv_buffer} has been des")
    assert calls_in_flight(q_buffer) == 0


def test_gradients():
    """The calls of the backward pass use the buffer too."""
    buffer = create()
    y, pull = jax.vjp(lambda x: sending(buffer)(x, METADATA), X)
    np.testing.assert_array_equal(y, SENT)
    np.testing.assert_array_equal(pull(Y)[0], HOME)
    destroy_dispatch_buffer(buffer)
    op = "the transpose of dispatch over axis 'cp'"
    fails(pull(Y), f"{op}: buffer {buffer} has been destroyed")
