"""Dispatch buffers: limits that many calls share, under an id that compiled programs can use."""

import operator
from typing import NamedTuple, SupportsIndex

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.deadline import DEFAULT_DEADLINE, check_deadline, in_milliseconds

MOST_BYTES = 2**48  # of one array; processors address no more
_MOST = 2**63 - 1  # the registry counts in 64 bits


class DispatchBuffer(NamedTuple):
    """The limits of one buffer, and its usage.

    Attributes:
      capacity: rows of the result of a call, on each rank.
      row_bytes: bytes of one row, over all arrays of one call; the largest so far.
      deadline: seconds until the ranks that have arrived give up on those that have not.
      groups: independent groups of ranks of one call.
      num_in_use: calls in flight; each rank counts separately.
      num_calls: calls so far; each rank counts separately.
    """

    capacity: int
    row_bytes: int
    deadline: float
    groups: int
    num_in_use: int
    num_calls: int


def create_dispatch_buffer(
    *,
    capacity: SupportsIndex,
    row_bytes: SupportsIndex = 1,
    deadline: float = DEFAULT_DEADLINE,
    groups: SupportsIndex = 1,
) -> int:
    """Creates a buffer, whose limits apply to every call with `dispatch(..., buffer=id)`.

    Between the devices of one process, rows are copied directly from the sender's array into the
    receiver's. A buffer then owns no memory: it is a set of limits and counters of about a hundred
    bytes. A transport that needs registered memory owns it through the same id.

    Call on the host, from any thread; inside a traced function it runs once per trace.

    Args:
      capacity: rows of the result of a call, on each rank, at least 1.
      row_bytes: bytes of one row, over all arrays of one call, at least 1. Grows automatically when
        a call has wider rows, so you may omit it.
      deadline: seconds until the ranks that have arrived give up on the others; rounded to
        milliseconds.
      groups: independent groups of ranks of one call: the product of the sizes of the other mesh
        axes.
    Returns:
      The id, a positive int. It is never reused in this process, and is not valid in others.
    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.
    """
    op = "create_dispatch_buffer"
    check_deadline(op, deadline)
    return runtime.native.create_buffer(
        capacity=_limit(op, "capacity", capacity),
        row_bytes=_at_least_one(op, "row_bytes", row_bytes),
        deadline_ms=in_milliseconds(deadline),
        num_groups=_at_least_one(op, "groups", groups),
    )


def grow_dispatch_buffer(
    buffer: SupportsIndex,
    *,
    capacity: SupportsIndex | None = None,
    row_bytes: SupportsIndex | None = None,
    groups: SupportsIndex | None = None,
) -> None:
    """Raises limits of a buffer; limits that are already large enough do not change.

    Its id stays valid in compiled programs, which keep the capacity with which they were compiled.
    Call on the host, from any thread, also with calls in flight.

    Args:
      buffer: the id.
      capacity, row_bytes, groups: as in `create_dispatch_buffer`; None means no change.
    Raises:
      TypeError, ValueError: an argument is not an integer or is out of range; or the buffer was
        destroyed or never existed.
    """
    op = "grow_dispatch_buffer"
    asked = {"capacity": capacity, "row_bytes": row_bytes, "groups": groups}
    asked = {  # every limit is at least 1, so 1 changes nothing
        name: 1 if limit is None else _limit(op, name, limit) for name, limit in asked.items()
    }
    runtime.native.grow_buffer(
        op,
        _id(op, buffer),
        capacity=asked["capacity"],
        row_bytes=asked["row_bytes"],
        num_groups=asked["groups"],
    )


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
    runtime.native.destroy_buffer(op, _id(op, buffer))
    runtime.release_buffer(_id(op, buffer))


def destroy_all_dispatch_buffers() -> None:
    """Destroys all buffers of this process, or none if calls in flight use any of them.

    Call on the host, from any thread.

    Raises:
      ValueError: calls in flight use buffers; the message names them.
    """
    ids = list(runtime.native.list_buffers())
    runtime.native.destroy_all_buffers("destroy_all_dispatch_buffers")
    for id in ids:
        runtime.release_buffer(id)


def list_dispatch_buffers() -> dict[int, DispatchBuffer]:
    """Returns a snapshot of this process's buffers, by id, oldest first."""
    return {id: _from_native(entry) for id, entry in runtime.native.list_buffers().items()}


def buffer_limits(op: str, buffer: SupportsIndex) -> DispatchBuffer:
    """Returns the limits of `buffer` when a call is traced; `op` is for error messages."""
    return _from_native(runtime.native.find_buffer(op, _id(op, buffer)))


def _from_native(entry: tuple[int, int, int, int, int, int]) -> DispatchBuffer:
    capacity, row_bytes, deadline_ms, *rest = entry
    return DispatchBuffer(capacity, row_bytes, deadline_ms / 1000, *rest)


def _integer(op: str, name: str, value: SupportsIndex, needs: str) -> int:
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
    value = _integer(op, "buffer", buffer, needs)
    if not 0 < value <= _MOST:
        raise ValueError(f"{op}: buffer is {value}; it needs to be {needs}, which is positive.")
    return value


def _limit(op: str, name: str, value: SupportsIndex) -> int:
    number = _at_least_one(op, name, value)
    if name == "capacity" and number >= MOST_BYTES:
        raise ValueError(f"{op}: capacity is {number}; it needs to be below 2**48 rows.")
    return number


def _at_least_one(op: str, name: str, value: SupportsIndex) -> int:
    needs = "an integer of at least 1"
    number = _integer(op, name, value, needs)
    if not 1 <= number <= _MOST:
        raise ValueError(f"{op}: {name} is {number}; it needs to be {needs} and below 2**63.")
    return number
