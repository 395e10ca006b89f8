"""Mistakes at the start of a process, one after the other; the launcher runs this module.

python -m jax_cp_dispatch.launch -m mistakes
"""

import sys

import jax
import jax.numpy as jnp

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cpu_devices import start_cpu_devices


def devices():
    """The number of devices is that of the launcher."""
    start_cpu_devices(1)
    start_cpu_devices(8)


def forgotten():
    """Without `initialize`, each process would compute alone."""
    q = jnp.zeros((1, 8, 1, 8))
    mesh = jax.make_mesh((jax.device_count(),), ("cp",))
    cpd.context_parallel_attention(q, q, q, mesh=mesh, axis_name="cp", algorithm="ring")


def late():
    """The mistake before this one has started JAX."""
    cpd.initialize()


MESSAGES = {
    devices: "start_cpu_devices: this is one of 2 processes with 1 CPU devices each, but "
    "num_devices is 8. Call it only in a program of one process",
    forgotten: "context_parallel_attention: the launcher started 2 processes, but this one has "
    "not joined the others and would compute alone. Call jax_cp_dispatch.initialize()",
    late: "initialize: JAX has already started in this process, with the devices of this process "
    "alone. Call initialize before jax.devices()",
}

for mistake, message in MESSAGES.items():
    try:
        mistake()
    except RuntimeError as error:
        assert str(error).startswith(message), error
        print(mistake.__name__, "is reported", flush=True)
    else:
        sys.exit(f"{mistake.__name__} was not reported")
