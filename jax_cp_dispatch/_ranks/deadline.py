"""The deadline of a call: how long its ranks wait for each other."""

import math
import numbers
import os

DEFAULT_DEADLINE, DEFAULT_DEADLINE_ON_GPUS = 60.0, 600.0
"""Seconds that the ranks of one call wait for the last of them.

On GPUs, a rank that comes later costs its channel: the device cannot ask whether it still lives.
The default outlasts a checkpoint, or a compilation in another process.
"""

_VARIABLE = "JAX_CP_DISPATCH_DEADLINE"
_LONGEST = 1e8  # three years; the handlers' clock counts nanoseconds in 64 bits
_NEEDS = "a positive number of seconds"


def check_deadline(op: str, deadline: float) -> None:
    """Requires seconds; `op` is for error messages."""
    if isinstance(deadline, bool) or not isinstance(deadline, numbers.Real):
        raise TypeError(f"{op}: deadline is {deadline!r}; it needs to be {_NEEDS}.")
    if not 0 < deadline < math.inf:
        raise ValueError(f"{op}: deadline is {deadline}; it needs to be {_NEEDS}.")


def in_milliseconds(deadline: float | None) -> int | None:
    """Converts a checked deadline from seconds to the handlers' unit."""
    return None if deadline is None else max(1, round(1000 * float(min(deadline, _LONGEST))))


def default_deadline_ms(on_gpus: bool = False) -> int:
    """Returns the deadline of calls that name none: of the environment, or of the platform."""
    text = os.environ.get(_VARIABLE)
    if text is None:
        return round(1000 * (DEFAULT_DEADLINE_ON_GPUS if on_gpus else DEFAULT_DEADLINE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{_VARIABLE} is {text!r}; it needs to be {_NEEDS}.")
    return in_milliseconds(seconds) or 1
