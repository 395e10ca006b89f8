"""The deadline of a call: how long its ranks wait for each other."""

import math
import numbers

DEFAULT_DEADLINE = 60.0
"""Seconds that the ranks of one call wait for the last of them."""

_LONGEST = 1e8  # three years; the handlers' clock counts nanoseconds in 64 bits


def check_deadline(op: str, deadline: float) -> None:
    """Requires seconds; `op` is for error messages."""
    needs = "a positive number of seconds"
    if isinstance(deadline, bool) or not isinstance(deadline, numbers.Real):
        raise TypeError(f"{op}: deadline is {deadline!r}; it needs to be {needs}.")
    if not 0 < deadline < math.inf:
        raise ValueError(f"{op}: deadline is {deadline}; it needs to be {needs}.")


def in_milliseconds(deadline: float | None) -> int:
    """Converts a checked deadline from seconds to the handlers' unit."""
    seconds = DEFAULT_DEADLINE if deadline is None else deadline
    return max(1, round(1000 * float(min(seconds, _LONGEST))))
