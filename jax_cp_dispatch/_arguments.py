"""Checks of single arguments, shared by many functions so that their errors read alike."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

HostOrDevice: TypeAlias = Array | np.ndarray


def check_type(op: str, name: str, value: Any, kind: type, remedy: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"{op}: {name} is of type {type(value).__name__}; it needs to be of type "
            f"{kind.__name__}. {remedy}"
        )


def check_integer(op: str, name: str, value: Any) -> None:
    """Requires an integer of Python or NumPy, not a boolean."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be an integer.")


MOST_ROWS = 2**31 - 1
"""Row numbers, offsets and counts of rows have 32 bits."""


def check_rows(op: str, name: str, num_rows: int) -> None:
    """Requires rows that 32-bit numbers can count."""
    if num_rows > MOST_ROWS:
        raise ValueError(
            f"{op}: {name} is {num_rows}, but row numbers have 32 bits. Pass at most {MOST_ROWS}: "
            "no plan needs more."
        )


def check_positive(op: str, **values: Any) -> None:
    for name, value in values.items():
        check_integer(op, name, value)
        if value < 1:
            raise ValueError(f"{op}: {name} is {value}; it needs to be at least 1.")


def clip_to_int32(x: Any, dtype: Any = np.int32) -> Any:
    """Returns integers as int32, those beyond it as its limits.

    NumPy gives NumPy, and so do 64-bit arrays that are known here. As uint32, negative ones become
    2**31 or more.
    """
    if x.dtype.itemsize == 8 and isinstance(x, jax.Array) and is_on_host(x):
        x = np.asarray(x)  # operations of JAX on it need `jax.enable_x64`
    if x.dtype.itemsize >= 4 and x.dtype not in (np.int32, dtype):
        xp = jnp if isinstance(x, jax.Array) else np
        x = xp.minimum(x, x.dtype.type(np.iinfo(dtype).max))
        if np.iinfo(x.dtype).min:
            x = xp.maximum(x, x.dtype.type(np.iinfo(np.int32).min))
    return x.astype(dtype)


def read_int32(
    op: str, name: str, x: Any, low: int = -(2**31), high: int = MOST_ROWS, *, remedy: str = ""
) -> Any:
    """Returns a caller's integers as int32, of which known ones need to be in [low, high].

    Traced ones beyond int32 become its limits. Those are wrong too, and are found where they are
    compared with sizes.
    """
    if is_on_host(x):
        known = np.asarray(x)
        wrong = np.argwhere((known < low) | (known > high))
        if len(wrong):
            at = wrong[0].tolist()
            raise ValueError(
                f"{op}: {name}{at} is {known[tuple(at)]}; it needs to be in [{low}, {high}]."
                + (remedy and f" {remedy}")
            )
    return clip_to_int32(x)


def read_wide(op: str, name: str, x: Any) -> Any:
    """Returns a caller's integers with 32 bits, or with 64 if JAX has them; it cuts others."""
    is_wide = x.dtype.itemsize >= 4 and jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
    return x if is_wide else read_int32(op, name, x)


def check_value_of(op: str, name: str, value: Any, dtype: Any) -> None:
    """Requires a number that an array of this dtype can hold."""
    dtype = np.dtype(dtype)
    lowest, highest = 0, 1
    if jnp.issubdtype(dtype, np.integer):
        lowest, highest = (int(x) for x in (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max))
    elif dtype.kind != "b":
        return
    if value != value or value != int(value) or not lowest <= value <= highest:
        raise ValueError(
            f"{op}: {name} is {value!r}, but an array has dtype {dtype}. Pass an integer in "
            f"[{lowest}, {highest}], or cast the array."
        )


def is_on_host(x: Any) -> bool:
    """Whether this process knows all values, also while a program is traced."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def host_value(value: Any) -> np.ndarray | None:
    """Returns the values as NumPy, or None if they are traced or on other hosts."""
    if isinstance(value, Tracer):
        return None
    if isinstance(value, jax.Array) and not (
        value.is_fully_addressable or value.is_fully_replicated
    ):
        return None
    return np.asarray(value)
