"""Mistakes at the start of a process; the launcher runs this file, or this module, with a name.

python -m jax_cp_dispatch.launch tests/processes/mistakes.py forgotten | used | devices
"""

import sys

import jax
import jax.numpy as jnp

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cpu_devices import start_cpu_devices


def forgotten():
    """Without `initialize`, each process would compute alone."""
    q = jnp.zeros((1, 8, 1, 8))
    mesh = jax.make_mesh((jax.device_count(),), ("cp",))
    cpd.context_parallel_attention(q, q, q, mesh=mesh, axis_name="cp", algorithm="ring")


def used():
    jax.devices()
    cpd.initialize()


def devices():
    """The number of devices is that of the launcher."""
    start_cpu_devices(1)
    start_cpu_devices(8)


MESSAGES = {
    forgotten: "context_parallel_attention: the launcher started 2 processes, but this one has "
    "not joined the others and would compute alone. Call jax_cp_dispatch.initialize()",
    used: "initialize: JAX has already started in this process, with the devices of this process "
    "alone. Call initialize before jax.devices()",
    devices: "start_cpu_devices: this is one of 2 processes with 1 CPU devices each, but "
    "num_devices is 8. Call it only in a program of one process",
}

mistake = {function.__name__: function for function in MESSAGES}[sys.argv[1]]
try:
    mistake()
except RuntimeError as error:
    assert str(error).startswith(MESSAGES[mistake]), error
    print(mistake.__name__, "is reported", flush=True)
else:
    sys.exit("nothing was reported")
