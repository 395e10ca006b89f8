"""Checks of single arguments, shared by many functions so that their errors read alike."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def check_array(op: str, name: str, x: Any) -> None:
    """Requires an array of JAX or NumPy, or its shape and dtype."""
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        remedy = f"Pass numpy.asarray({name})." if x is not None else "Pass it."
        raise TypeError(
            f"{op}: {name} is of type {type(x).__name__}; it needs to be an array. {remedy}"
        )


def check_type(op: str, name: str, value: Any, kind: type, remedy: str) -> None:
    """Requires an object of this class."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{op}: {name} is of type {type(value).__name__}; it needs to be of type "
            f"{kind.__name__}. {remedy}"
        )


def check_integer(op: str, name: str, value: Any) -> None:
    """Requires an integer of Python or NumPy, not a boolean."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be an integer.")


def check_positive(op: str, **values: Any) -> None:
    """Requires integers of at least 1."""
    for name, value in values.items():
        check_integer(op, name, value)
        if value < 1:
            raise ValueError(f"{op}: {name} is {value}; it needs to be at least 1.")


def is_on_host(x: jax.Array | np.ndarray) -> bool:
    """Whether this process knows all values, also while a program is traced."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)
