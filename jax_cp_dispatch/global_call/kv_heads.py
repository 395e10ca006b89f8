"""The KV heads of each of the devices that share the heads."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def kv_copies(num_heads: int, num_kv_heads: int, num_devices: int) -> int:
    """Returns how often to repeat each KV head, so that the devices of the heads divide them.

    The least common multiple of K and the devices divides N if both do, and query head n reads the
    same head as before, n // (N / K).
    """
    if num_heads % num_kv_heads:
        return 1  # local attention raises the error
    return math.lcm(num_kv_heads, num_devices) // num_kv_heads


class OwnHeads(NamedTuple):
    """The KV heads that a device keeps of those that several devices have computed alike; static.

    Attributes:
      axes: mesh axes that share these heads, major axis first.
      copies: how often each head is repeated first; see `kv_copies`.
      num_heads: that each device keeps.
    """

    axes: tuple[str, ...]
    copies: int
    num_heads: int

    def of(self, x: Float[Array, "R K H"]) -> Float[Array, "R own H"]:
        """Returns the device's own heads."""
        first = self.num_heads * lax.axis_index(self.axes)
        repeated = jnp.repeat(x, self.copies, axis=1)
        return lax.dynamic_slice_in_dim(repeated, first, self.num_heads, axis=1)
