"""Several processes of one job: how they come to one transport, and which one that is."""

from jax_cp_dispatch._ranks.processes.choice import TransportChoice, share_memory, transport_choice
from jax_cp_dispatch._ranks.processes.initialize import initialize
from jax_cp_dispatch._ranks.processes.programs import program_begins

__all__ = [
    "TransportChoice",
    "initialize",
    "program_begins",
    "share_memory",
    "transport_choice",
]
