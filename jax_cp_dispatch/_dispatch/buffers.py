"""Dispatch buffers: a capacity and a deadline under an id that compiled programs can use."""

import operator
import threading
from typing import Any, NamedTuple, SupportsIndex

from jax_cp_dispatch._arguments import check_rows
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import check_deadline

_MOST = 2**63 - 1  # ids have 64 bits

_lock = threading.Lock()


class BufferLimits(NamedTuple):
    """What a buffer allows, read when a call is traced; see `create_dispatch_buffer`."""

    capacity: int
    deadline: float | None


_limits: dict[int, BufferLimits] = {}


def create_dispatch_buffer(*, capacity: SupportsIndex, deadline: float | None = None) -> int:
    """Creates a buffer, whose capacity and deadline apply to `dispatch(..., buffer=id)`.

    Between CPU devices, rows are copied directly from the sender's array into the receiver's, and a
    buffer owns no memory. On GPUs, calls with a buffer have memory of their own to exchange rows,
    which is freed with the buffer.

    Call on the host, from any thread; inside a traced function it runs once per trace.

    Args:
      capacity: rows of the result of a call, on each rank, at least 1.
      deadline: seconds until the ranks that have arrived give up on the others; rounded to
        milliseconds. None is 60, on GPUs 43200 (600 in a job of one process), or
        `JAX_CP_DISPATCH_DEADLINE`.
    Returns:
      The id, a positive int. It is never reused in this process, and is not valid in others.
    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.
    """
    op, needs = "create_dispatch_buffer", "an integer of at least 1"
    num_rows = read_integer(op, "capacity", capacity, needs)
    if num_rows < 1:
        raise ValueError(f"{op}: capacity is {num_rows}; it needs to be {needs}.")
    check_rows(op, "capacity", num_rows)
    if deadline is not None:
        check_deadline(op, deadline)
    with _lock:
        id = runtime.native.create_buffer()
        _limits[id] = BufferLimits(num_rows, deadline)
    return id


def destroy_dispatch_buffer(buffer: SupportsIndex) -> None:
    """Destroys a buffer; programs that use it then fail on every rank.

    Call on the host, from any thread, after the calls that use the buffer have finished.

    Args:
      buffer: the id.
    Raises:
      TypeError: `buffer` is not an integer.
      ValueError: calls in flight use the buffer; or it was destroyed or never existed.
    """
    op = "destroy_dispatch_buffer"
    id = _id(op, buffer)
    with _lock:
        runtime.native.destroy_buffer(op, id)
        del _limits[id]
    runtime.release_buffer(id)


def destroy_all_dispatch_buffers() -> None:
    """Destroys all buffers of this process, or none if calls in flight use any of them.

    Call on the host, from any thread.

    Raises:
      ValueError: calls in flight use buffers; the message names them.
    """
    with _lock:
        runtime.native.destroy_all_buffers("destroy_all_dispatch_buffers")
        ids = list(_limits)
        _limits.clear()
    for id in ids:
        runtime.release_buffer(id)


def buffer_limits(op: str, buffer: SupportsIndex) -> BufferLimits:
    """Returns the limits of `buffer` when a call is traced; `op` is for error messages."""
    id = _id(op, buffer)
    with _lock:
        runtime.native.find_buffer(op, id)
        return _limits[id]


def read_integer(op: str, name: str, value: Any, needs: str) -> int:
    """Returns `value` as a Python integer; rejects bool, although it has `__index__`."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{op}: {name} is {value!r}; it needs to be {needs}.") from None


def _id(op: str, buffer: SupportsIndex) -> int:
    """Returns an id in the registry's range; the registry checks that it exists."""
    needs = "the int that create_dispatch_buffer returned"
    value = read_integer(op, "buffer", buffer, needs)
    if not 0 < value <= _MOST:
        raise ValueError(f"{op}: buffer is {value}; it needs to be {needs}, which is positive.")
    return value
