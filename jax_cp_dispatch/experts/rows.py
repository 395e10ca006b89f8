"""Rows of received tokens and rows grouped by expert: one from the other, by gathers alone.

A token has a row for each of its choices on this rank. `expand` copies it there, `weighted_sum`
adds these rows up. Sums are float32 (float64 for float64, complex for complex), in the order of
the choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int32, Shaped

from jax_cp_dispatch._arrays import sum_dtype


class Places(NamedTuple):
    """Which row belongs to which choice of which token, both ways."""

    row: Int32[Array, "R k"]  # the grouped row of each choice; M if it has none here
    choice: Int32[Array, " M"]  # token * k + choice of each grouped row; R * k if there is none

    @classmethod
    def of_rows(cls, row: Int32[Array, "R k"], capacity: int) -> Places:
        """Makes it from the row of each choice, in [0, capacity) if it has one here."""
        row = jnp.where((row >= 0) & (row < capacity), row, capacity)
        number = jnp.arange(row.size, dtype=jnp.int32)
        none = jnp.full(capacity, row.size, jnp.int32)
        # Choices without a row all write to the same place outside, so they are not unique.
        return cls(row, none.at[row.reshape(-1)].set(number, mode="drop"))

    @property
    def token(self) -> Int32[Array, " M"]:
        return self.choice // self.row.shape[1]


def take(x: Shaped[Array, "n ..."], index: Int32[Array, " m"]) -> Shaped[Array, "m ..."]:
    """Returns these rows; zeros for those outside."""
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def expand(x: Shaped[Array, "R ..."], places: Places) -> Shaped[Array, "M ..."]:
    """Copies each token to its rows; rows without a token are zero."""
    return take(x, places.token)


def weighted_sum(
    y: Inexact[Array, "M ..."], weights: Float[Array, "R k"] | None, places: Places
) -> Inexact[Array, "R ..."]:
    """Adds up the rows of each token, times the weights of its choices if there are any."""
    total = jnp.zeros((len(places.row), *y.shape[1:]), sum_dtype(y.dtype))
    for i in range(places.row.shape[1]):
        total = _add(total, y, places.row[:, i], None if weights is None else weights[:, i])
    return total.astype(y.dtype)


@jax.jit  # one function of the program, called for each choice; XLA fuses the calls
def _add(total, y, row, weight):
    added = take(y, row).astype(total.dtype)
    if weight is not None:  # that of a choice without a row may be anything
        weight = jnp.where(row < len(y), weight, 0).astype(total.dtype)
        added = added * for_rows(weight, y)
    return total + added


def for_rows(x: Any, like: Array) -> Array:
    """Returns a number of each row in the dimensions of the rows."""
    return x.reshape(-1, *[1] * (like.ndim - 1))
