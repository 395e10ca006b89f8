"""What the processes of a job tell each other, through JAX's coordination service."""

import json
from typing import Any

import jax
from jax._src import distributed


def is_in_job() -> bool:
    """Whether this process belongs to a job of JAX."""
    return distributed.global_state.client is not None


def place_in_job() -> tuple[int, int]:
    """(process, number of processes)"""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def coordinator_host() -> str:
    """The host at which all processes of the job reach JAX's coordination service."""
    address = distributed.global_state.coordinator_address or ""
    return address.rpartition(":")[0].strip("[]")


def tell(op: str, name: str, value: Any) -> None:
    """Gives `value` to those processes of the job that look for it by `told`."""
    client: Any = distributed.global_state.client
    client.key_value_set(f"jax_cp_dispatch/{op}/{name}/{place_in_job()[0]}", json.dumps(value))


def told(op: str, name: str) -> dict[int, Any]:
    """What processes have given by `tell` until now, by process."""
    client: Any = distributed.global_state.client
    found = client.key_value_dir_get(f"jax_cp_dispatch/{op}/{name}")
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}


def tell_and_hear(op: str, name: str, value: Any, timeout: float) -> list[Any]:
    """Gives `value` to all processes of the job; returns theirs by process, its own among them.

    Args:
      op: what every process has to call for it, for messages.
      name: of the value; each is told once.
      value: what JSON can say.
      timeout: seconds to wait for each of the other processes.
    Raises:
      RuntimeError: this process is in no job; another one has told nothing in `timeout` seconds.
    """
    if not is_in_job():
        raise RuntimeError(
            f"{op}: this process belongs to no job. Call jax.distributed.initialize() first."
        )
    process, num_processes = place_in_job()
    client: Any = distributed.global_state.client
    prefix = f"jax_cp_dispatch/{op}/{name}"
    tell(op, name, value)
    heard = []
    for other in range(num_processes):
        try:
            text = client.blocking_key_value_get(f"{prefix}/{other}", round(1000 * timeout))
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"{op}: process {process} waited {timeout:g} s for process {other}, expected its "
                f"'{name}', seen nothing. Every process of the job must call {op}(); see whether "
                f"that one raised an error of its own. ({error})"
            ) from error
        heard.append(json.loads(text))
    return heard
