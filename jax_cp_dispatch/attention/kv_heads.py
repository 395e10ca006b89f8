"""How often KV heads repeat, so that the devices that share the heads divide them."""

from __future__ import annotations

import math


def kv_copies(num_heads: int, num_kv_heads: int, num_devices: int) -> int:
    """Returns how often to repeat each KV head, so that the devices of the heads divide them.

    The least common multiple of K and the devices divides N if both do, and query head n reads the
    same head as before, n // (N / K).
    """
    if num_heads % num_kv_heads:
        return 1  # local attention raises the error
    return math.lcm(num_kv_heads, num_devices) // num_kv_heads
