"""Counts by key, and each element's place among those of its key: sums over blocks, no sort."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jax_cp_dispatch._arrays import known_inside
from jax_cp_dispatch._scans import running_sum

_BLOCK = 32  # elements that are compared with each other; the others are counted


def places_by_key(
    key: Int32[Array, " n"], num_keys: int
) -> tuple[Int32[Array, " n"], Int32[Array, " num_keys"]]:
    """Returns how many earlier elements have the key of each, and how many elements each key has.

    Keys outside of [0, num_keys) do not count; the places of their elements are undefined.
    """
    size = len(key)
    num_blocks = max(1, -(-size // _BLOCK))
    key = jnp.where((key >= 0) & (key < num_keys), key, num_keys)
    key = jnp.pad(key, (0, num_blocks * _BLOCK - size), constant_values=num_keys)
    key = key.reshape(num_blocks, _BLOCK)
    at = key * num_blocks + np.arange(num_blocks, dtype=np.int32)[:, None]
    in_block = jnp.zeros((num_keys + 1) * num_blocks, jnp.int32)
    in_block = in_block.at[at.astype(jnp.uint32)].add(1, mode="promise_in_bounds")
    until = running_sum(in_block.reshape(num_keys + 1, num_blocks))
    before = until.reshape(-1) - in_block
    is_same = (key[:, None] == key[:, :, None]) & np.tri(_BLOCK, k=-1, dtype=bool)[None]
    places = known_inside(before, at) + is_same.sum(2, dtype=jnp.int32)
    return places.reshape(-1)[:size], until[:num_keys, -1]
