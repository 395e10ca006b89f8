"""JAX's own coordination of a job, started so that what is left of it outlives a lost process."""

import os
from typing import Any

import jax
from jax._src import distributed
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

# Set by the launcher, which hosts the coordination service itself: a service in process 0 would
# take all other processes with it, since JAX ends a process whose service is gone.
HOSTED_BY_LAUNCHER = "JAX_CP_DISPATCH_HOSTED_COORDINATION"
_NUM_PROCESSES = "JAX_NUM_PROCESSES"
_PROCESS_ID = "JAX_PROCESS_ID"


def job_environment(address: str, num_processes: int, process_id: int) -> dict[str, str]:
    """What tells `start` in a process of the launcher where it belongs."""
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        _NUM_PROCESSES: str(num_processes),
        _PROCESS_ID: str(process_id),
        HOSTED_BY_LAUNCHER: "1",
    }


def host_service(address: str, num_processes: int) -> Any:
    """The coordination service of a job, in a process that is none of its own."""
    return _jax.get_distributed_runtime_service(
        address, num_processes, shutdown_timeout=5, recoverable=True
    )


def start(
    address: str | None, num_processes: int | None, process_id: int | None, timeout: float
) -> bool:
    """Joins the job that arguments or environment name; False if neither names one."""
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if num_processes is None and _NUM_PROCESSES in os.environ:
        num_processes = int(os.environ[_NUM_PROCESSES])
    if process_id is None and _PROCESS_ID in os.environ:
        process_id = int(os.environ[_PROCESS_ID])
    if address is None and num_processes is None and process_id is None:
        return False
    jax.config.update(
        "jax_enable_recoverability", True
    )  # JAX ends no process for another one's end
    if jax.config.values["jax_cpu_collectives_implementation"] in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if os.environ.get(HOSTED_BY_LAUNCHER) == "1" and address and process_id is not None:
        _start_client(address, num_processes or 1, process_id, timeout)
    else:
        jax.distributed.initialize(
            address, num_processes, process_id, initialization_timeout=max(1, round(timeout))
        )
    return True


def _start_client(address: str, num_processes: int, process_id: int, timeout: float) -> None:
    """What `jax.distributed.initialize` does in every process but the first one."""
    state = distributed.global_state
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    client = _jax.get_distributed_runtime_client(
        address, process_id, init_timeout=max(1, round(timeout)), use_compression=True
    )
    client.connect()
    state.client = client
    state.initialize_preemption_sync_manager()
