"""Array operations that XLA compiles to few, and the dtypes of sums."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Integer, Shaped


def only_where(mask: Bool[Array, "..."], x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns `x` where the mask of its first axes is true, else zero."""
    return chosen(mask, x, lax.full_like(x, 0))


def chosen(
    mask: Bool[Array, "..."], x: Shaped[Array, "..."], other: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """Returns `x` where the mask of its first axes is true, else `other`."""
    axes, sharding = tuple(range(mask.ndim)), jax.typeof(x).sharding
    return lax.select(lax.broadcast_in_dim(mask, x.shape, axes, out_sharding=sharding), x, other)


class At(NamedTuple):
    """Places in arrays: their indices in some axes, which are in bounds."""

    places: Int32[Array, "P axes"]
    axes: tuple[int, ...]

    def take(self, x: Shaped[Array, "..."]) -> Shaped[Array, "P ..."]:
        """Returns what is there. (`x[...]` is several operations more.)"""
        offset = tuple(range(1, 1 + x.ndim - len(self.axes)))
        numbers = lax.GatherDimensionNumbers(offset, self.axes, self.axes)
        sizes = tuple(1 if i in self.axes else n for i, n in enumerate(x.shape))
        return lax.gather(x, self.places, numbers, sizes, mode="promise_in_bounds")

    def add(self, x: Shaped[Array, "..."], y: Shaped[Array, "P ..."]) -> Shaped[Array, "..."]:
        """Adds to what is there."""
        window = tuple(range(1, 1 + x.ndim - len(self.axes)))
        numbers = lax.ScatterDimensionNumbers(window, self.axes, self.axes)
        return lax.scatter_add(x, self.places, y, numbers, mode="promise_in_bounds")


def divided(x: Integer[Array, "..."], divisor: int):
    """Int32 quotient and remainder of numbers in [0, 2**31); signed division compiles to more."""
    x = x.astype(jnp.uint32)
    quotient, remainder = lax.div(x, np.uint32(divisor)), lax.rem(x, np.uint32(divisor))
    return quotient.astype(jnp.int32), remainder.astype(jnp.int32)


def known_inside(
    x: Shaped[Array | np.ndarray, "..."],
    index: Integer[Array | np.ndarray, "..."] | int,
    *,
    axis: int = 0,
) -> Shaped[Array, "..."]:
    """Returns `jnp.take` of indices in [0, size); others would compile to more."""
    x, place = jnp.asarray(x), jnp.asarray(index).astype(jnp.uint32)
    if place.ndim == 0:
        return lax.dynamic_index_in_dim(x, place, axis, False, allow_negative_indices=False)
    return x.at[(slice(None),) * axis + (place,)].get(mode="promise_in_bounds")


def sum_dtype(*dtypes: Any) -> np.dtype:
    """Returns the dtype of sums: float64 if any of these types is float64, else float32.

    Of complex numbers, that of two such floats.
    """
    given = [np.dtype(dtype) for dtype in dtypes]
    is_double = any(dtype in (np.float64, np.complex128) for dtype in given)
    if any(dtype.kind == "c" for dtype in given):
        return np.dtype(np.complex128 if is_double else np.complex64)
    return np.dtype(np.float64 if is_double else np.float32)
