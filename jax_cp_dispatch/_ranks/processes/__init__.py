"""Connects the processes of a job, and chooses one transport for them."""

from jax_cp_dispatch._ranks.processes.coordination import refuse_alone
from jax_cp_dispatch._ranks.processes.initialize import (
    TransportChoice,
    initialize,
    num_cpu_devices_here,
    share_memory,
    transport_choice,
)

__all__ = [
    "TransportChoice",
    "initialize",
    "num_cpu_devices_here",
    "refuse_alone",
    "share_memory",
    "transport_choice",
]
