"""Where the document of each token of packed rows starts and ends."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Integer

from jax_cp_dispatch._scans import running_max


def document_starts(
    segment_ids: Integer[Array, "B T"], positions: Integer[Array, "B T"] | None
) -> Int32[Array, "B T"]:
    """Returns the column at which each column's document starts; -1 at padding (segment <= 0)."""
    starts = running_max(columns_of_begins(segment_ids, positions))
    return jnp.where(segment_ids > 0, starts, -1)


def columns_of_begins(
    segment_ids: Integer[Array, "B T"], positions: Integer[Array, "B T"] | None
) -> Int32[Array, "B T"]:
    """Returns the column of each column at which a document or padding begins; 0 elsewhere."""
    column = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    if positions is not None:
        new |= positions[:, 1:] <= positions[:, :-1]
    new = jnp.pad(new, ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(new, column, 0)


def document_ends(starts: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns one past the last column of each column's document."""
    column = jnp.arange(starts.shape[1], dtype=jnp.int32)
    is_last = jnp.pad(starts[:, 1:] != starts[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = jnp.where(is_last, column, starts.shape[1])
    return 1 - jnp.flip(running_max(jnp.flip(-last, axis=1)), axis=1)
