"""Checks of single arguments that many functions share, so that they are refused in one text."""

from typing import Any

import jax
import numpy as np


def check_array(op: str, name: str, x: Any) -> None:
    """An array of JAX or NumPy, or its shape and dtype."""
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{op}: {name} is of type {type(x).__name__}; it needs to be an array. Pass "
            f"numpy.asarray({name})."
        )


def check_integer(op: str, name: str, value: Any) -> None:
    """An integer of Python or NumPy, not a truth value."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be an integer.")


def check_positive(op: str, **values: Any) -> None:
    """Integers of at least 1."""
    for name, value in values.items():
        check_integer(op, name, value)
        if value < 1:
            raise ValueError(f"{op}: {name} is {value}; it needs to be at least 1.")
