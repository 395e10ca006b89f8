"""The numbers of tokens of a mask: their checks, and their remainders."""

from typing import Any

import jax
from jax import lax

from jax_cp_dispatch._arguments import check_integer


def check_tokens(mask: Any, name: str, value: Any, *, minimum: int) -> None:
    """Requires an integer of at least `least`, and sets it as one of Python."""
    op = type(mask).__name__
    check_integer(op, name, value)
    if value < minimum:
        raise ValueError(f"{op}: {name} is {value}; it needs to be at least {minimum}.")
    object.__setattr__(mask, name, int(value))


def no_limit_if_large(value: int | None) -> int | None:
    """Returns None for numbers that no document reaches: positions have 32 bits."""
    return None if value is None or value >= 2**31 else value


def remainder(x: Any, size: int) -> Any:
    """Returns x % size of numbers that are not negative, on the device in one operation."""
    if isinstance(x, jax.Array):
        return lax.rem(x, jax.numpy.asarray(size, x.dtype))
    return x % size
