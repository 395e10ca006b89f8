"""Starts JAX's coordination of a job, so that it shuts down in order and errors name a process."""

import os
import resource
import socket
from typing import Any

import jax

from jax_cp_dispatch._jax_private import (
    distributed,
    get_distributed_runtime_client,
    get_distributed_runtime_service,
    xla_bridge,
)
from jax_cp_dispatch._ranks.job import is_in_job
from jax_cp_dispatch._ranks.processes.ending import end_in_order
from jax_cp_dispatch._ranks.processes.meeting import JobMember, meet
from jax_cp_dispatch._text import warn_caller

# Set by the launcher, which hosts the coordination service itself. If process 0 hosted it, its end
# would end all others, because JAX ends a process whose service is gone. The value is the address
# of the first meeting.
HOSTED_BY_LAUNCHER = "JAX_CP_DISPATCH_HOSTED_COORDINATION"
_NUM_PROCESSES = "JAX_NUM_PROCESSES"
_PROCESS_ID = "JAX_PROCESS_ID"


def job_environment(
    address: str, meeting: str, num_processes: int, process_id: int
) -> dict[str, str]:
    """Returns the variables from which `start` finds the job in a process of the launcher."""
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        _NUM_PROCESSES: str(num_processes),
        _PROCESS_ID: str(process_id),
        HOSTED_BY_LAUNCHER: meeting,
    }


def host_service(address: str, num_processes: int) -> Any:
    """Starts the coordination service of a job, in a process outside the job."""
    return get_distributed_runtime_service(
        address, num_processes, shutdown_timeout=5, recoverable=True
    )


def start(
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    host: str,
    timeout: float,
) -> bool:
    """Joins the job given by the arguments or the environment; returns whether there is one.

    On one host, JAX does not end a process because another one ended; this package reports the loss
    instead. Over several hosts JAX's watchdog ends it.

    Args:
      host: an id of the host; equal for all processes of one host.
      timeout: seconds to wait for the other processes.
    Raises:
      RuntimeError: a process did not join; raised in all that did. Or JAX has already started here,
        or this process may open too few files.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if num_processes is None and _NUM_PROCESSES in os.environ:
        num_processes = int(os.environ[_NUM_PROCESSES])
    if process_id is None and _PROCESS_ID in os.environ:
        process_id = int(os.environ[_PROCESS_ID])
    if address is None and num_processes is None and process_id is None:
        return False
    if num_processes != 1 and xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "initialize: JAX has already started in this process, with the devices of this process "
            "alone. Call initialize before jax.devices(), before you create an array, and before "
            "any other use of JAX."
        )
    is_one_host = False  # here only JAX knows the other processes
    meeting = os.environ.get(HOSTED_BY_LAUNCHER)
    if address is not None and num_processes is not None and process_id is not None:
        own = JobMember(process_id, num_processes, host, socket.gethostname())
        is_one_host = meet(meeting or address, own, timeout)
        if is_one_host:
            check_open_files(num_processes, max(jax.config.values["jax_num_cpu_devices"], 1))
    if jax.config.values["jax_cpu_collectives_implementation"] in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if meeting and address is not None and process_id is not None:
        _start_client(address, num_processes or 1, process_id, timeout)
        return True
    jax.config.update("jax_enable_recoverability", is_one_host)
    jax.distributed.initialize(
        address,
        num_processes,
        process_id,
        initialization_timeout=max(1, round(timeout)),
        shutdown_timeout_seconds=0,  # each process leaves independently
    )
    end_in_order()
    return True


def refuse_alone(op: str) -> None:
    """Rejects a call in a process of the launcher that has not joined the others."""
    if HOSTED_BY_LAUNCHER not in os.environ or os.environ.get(_NUM_PROCESSES) == "1":
        return
    if not is_in_job():
        raise RuntimeError(
            f"{op}: the launcher started {os.environ.get(_NUM_PROCESSES)} processes, but this one "
            "has not joined the others and would compute alone. Call jax_cp_dispatch.initialize() "
            "in every process, before JAX is used."
        )


def _start_client(address: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Does what `jax.distributed.initialize` does in every process except the first."""
    state = distributed.global_state
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    client = get_distributed_runtime_client(
        address, process_id, init_timeout=max(1, round(timeout)), use_compression=True
    )
    client.connect()
    state.client = client
    state.initialize_preemption_sync_manager()


# ---- Open files, counted before gloo runs into their limit.

# Counted on jax 0.10.2: JAX's client and its coordination, and gloo's device.
_OF_JAX, _OF_GLOO = 7, 4
_PER_NEIGHBOUR = 4  # its socket, its segment, and its process, watched twice
_SPARE = 1


def check_open_files(num_processes: int, num_devices: int) -> None:
    """Refuses a limit with which JAX cannot start; warns of one too small for XLA's collectives.

    Args:
      num_processes: of this job, on this host.
      num_devices: of each.
    Raises:
      RuntimeError: this process may open too few files.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    others = num_processes - 1
    need = len(os.listdir("/proc/self/fd")) + _OF_JAX + _OF_GLOO + _PER_NEIGHBOUR * others + _SPARE
    if limit < need:
        raise RuntimeError(
            f"initialize: this process may open {limit} files; with {num_processes} processes it "
            f"needs {need} or more. Raise the limit: ulimit -n 1024."
        )
    # Each device connects to all others.
    need += num_devices * (num_devices * num_processes - 1)
    if limit < need:
        warn_caller(
            f"initialize: this process may open {limit} files. XLA's collectives over all devices "
            f"of {num_processes} processes need about {need}, and fail with fewer. Raise the "
            f"limit: ulimit -n {max(1024, 2 * need)}.",
            RuntimeWarning,
        )
