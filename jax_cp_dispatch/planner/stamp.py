"""Checksums that tie a plan to the batch for which it was made.

They are sums over columns, so each rank computes the checksum of its own columns locally.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from jax_cp_dispatch.planner.segment_ids import mix

Words = Int32[Array, "B T"] | Int32[np.ndarray, "B T"]


def checksums(x: Words | None, num_ranks: int) -> Int32[Array, " W"]:
    """Returns the checksum of each rank's columns of `words`; 0 for None.

    Different batches have equal checksums with probability 2**-32.
    """
    if x is None:
        return jnp.zeros(num_ranks, jnp.int32)
    batch, columns = x.shape
    columns //= num_ranks
    x = jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.uint32)
    x = x.reshape(batch, num_ranks, columns)
    place = jnp.arange(batch * columns, dtype=jnp.uint32).reshape(batch, 1, columns)
    mixed = mix(x * np.uint32(0x9E3779B1) + (place + np.uint32(1)) * np.uint32(0x27D4EB2F))
    return _signed(mixed.sum((0, 2), dtype=jnp.uint32))


@partial(jax.jit, static_argnames=("num_ranks", "window"))
def make_stamp(
    ids: Words,
    positions: Words | None,
    *,
    num_ranks: int,
    window: int | None,
) -> Int32[Array, "W 3"]:
    """Returns, per rank, the checksum of the whole batch and window, and of its own columns.

    Args:
      ids, positions: `words` of all ranks' values.
    Returns:
      In each rank's row: checksums of the batch, of its ids, of its positions.
    """
    own = jnp.stack([checksums(x, num_ranks) for x in (ids, positions)], axis=1)
    place = jnp.arange(own.size, dtype=jnp.uint32).reshape(own.shape)
    seed = np.uint32(0 if window is None else (window + 1) & 0xFFFFFFFF)
    bits = jax.lax.bitcast_convert_type(own, jnp.uint32)
    batch = mix(bits + (place + np.uint32(1)) * np.uint32(0x165667B1))
    batch = mix(batch.sum(dtype=jnp.uint32) + seed)
    return jnp.concatenate([jnp.broadcast_to(_signed(batch), (num_ranks, 1)), own], axis=1)


def rank_stamp(
    stamp: Int32[Array, " 3"],
    ids: Words | None,
    positions: Words | None,
) -> Int32[Array, " 5"]:
    """Returns the checksums sent with an exchange: the batch, then pairs (expected, seen).

    Args:
      stamp: this rank's row of the plan's stamp.
      ids, positions: `words` of this rank's columns; None counts as expected.
    """
    batch, *expected = stamp
    pairs = [
        (expect, expect if x is None else checksums(x, 1)[0])
        for expect, x in zip(expected, (ids, positions), strict=True)
    ]
    return jnp.stack([batch, *(value for pair in pairs for value in pair)])


def _signed(x: UInt32[Array, "..."]) -> Int32[Array, "..."]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
