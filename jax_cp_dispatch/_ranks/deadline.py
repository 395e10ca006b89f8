"""How long the ranks of one call wait for the last of them."""

import math
import numbers

DEFAULT_DEADLINE = 60.0
"""Seconds that the ranks of one call wait for the last of them."""

_LONGEST = 1e8  # three years; the handlers' clock counts nanoseconds in 64 bits


def check_deadline(op: str, deadline: float | None) -> float:
    """Seconds; None is the default."""
    deadline_milliseconds(op, deadline)
    return DEFAULT_DEADLINE if deadline is None else deadline


def deadline_milliseconds(op: str, deadline: float | None) -> int:
    """What the handlers take for `deadline` in seconds; `op` begins the message of an error."""
    deadline = DEFAULT_DEADLINE if deadline is None else deadline
    needs = "a positive number of seconds"
    if isinstance(deadline, bool) or not isinstance(deadline, numbers.Real):
        raise TypeError(f"{op}: deadline is {deadline!r}; it needs to be {needs}.")
    if not 0 < deadline < math.inf:
        raise ValueError(f"{op}: deadline is {deadline}; it needs to be {needs}.")
    return max(1, round(1000 * float(min(deadline, _LONGEST))))
