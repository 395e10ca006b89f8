"""Connects the processes of a job, and chooses one transport for them."""

from jax_cp_dispatch._ranks.processes.coordination import refuse_alone
from jax_cp_dispatch._ranks.processes.initialize import (
    TransportChoice,
    initialize,
    num_cpu_devices_here,
    share_memory,
    transport_choice,
)
from jax_cp_dispatch._ranks.processes.watch_programs import program_begins

__all__ = [
    "TransportChoice",
    "initialize",
    "num_cpu_devices_here",
    "program_begins",
    "refuse_alone",
    "share_memory",
    "transport_choice",
]
