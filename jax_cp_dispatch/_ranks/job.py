"""The processes of a job: values exchanged by JAX's service; forked processes are refused."""

import json
import os
from collections.abc import Callable
from typing import Any

import jax

from jax_cp_dispatch._jax_private import distributed, xla_bridge


def is_in_job() -> bool:
    """Whether this process belongs to a JAX job."""
    return distributed.global_state.client is not None


def place_in_job() -> tuple[int, int]:
    """Returns (process, number of processes)."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def coordinator_host() -> str:
    """Returns the host at which all processes of the job reach JAX's coordination service."""
    address = distributed.global_state.coordinator_address or ""
    return address.rpartition(":")[0].strip("[]")


def publish(op: str, name: str, value: Any, may_repeat: bool = False) -> None:
    """Publishes `value`; other processes of the job read it with `read_published`.

    A second value under the same name is an error, or if `may_repeat` is true replaces the first.
    """
    client: Any = distributed.global_state.client
    key = f"jax_cp_dispatch/{op}/{name}/{place_in_job()[0]}"
    client.key_value_set(key, json.dumps(value), may_repeat)


def read_published(op: str, name: str) -> dict[int, Any]:
    """Returns, by process, the values published by `publish` so far."""
    client: Any = distributed.global_state.client
    found = client.key_value_dir_get(f"jax_cp_dispatch/{op}/{name}")
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}


def publish_and_read_all(op: str, name: str, value: Any, timeout: float) -> list[Any]:
    """Publishes `value` and returns the values of all processes of the job, this one included.

    Args:
      op: the function that every process must call, for error messages.
      name: of the value; use each name once.
      value: must be serializable as JSON.
      timeout: seconds to wait for each of the other processes.
    Raises:
      RuntimeError: this process belongs to no job, or another one published nothing within
        `timeout` seconds.
    """
    if not is_in_job():
        raise RuntimeError(
            f"{op}: this process belongs to no job. Call jax.distributed.initialize() first."
        )
    publish(op, name, value)
    return [read_from(op, name, other, timeout) for other in range(place_in_job()[1])]


def read_from(op: str, name: str, process: int, timeout: float) -> Any:
    """Returns the value that one process publishes by `publish`, within `timeout` seconds.

    Raises:
      RuntimeError: it published nothing.
    """
    client: Any = distributed.global_state.client
    key = f"jax_cp_dispatch/{op}/{name}/{process}"
    try:
        return json.loads(client.blocking_key_value_get(key, round(1000 * timeout)))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"{op}: process {place_in_job()[0]} waited {timeout:g} s for process {process}, "
            f"expected its '{name}', seen nothing. Every process of the job must call {op}(); "
            f"check whether that one raised its own error. ({error})"
        ) from error


def first_failure(name: str, attempt: Callable[[], str], timeout: float) -> str:
    """Calls `attempt` in all processes of the job at once; all return the same.

    Args:
      name: of the attempt; use each name once.
      attempt: may use all devices; returns why it failed, or "".
      timeout: seconds to wait for the other processes to come, and then for their results.
    Returns:
      The first process's failure, or that not all came (then none calls `attempt`); else "".
    """
    client: Any = distributed.global_state.client
    try:
        client.wait_at_barrier(f"jax_cp_dispatch/{name}", round(1000 * timeout))
    except jax.errors.JaxRuntimeError:
        return f"{name}: not all processes came within {timeout:g} s"
    failures = publish_and_read_all(name, "failure", attempt(), timeout)
    return next((failure for failure in failures if failure), "")


# A fork does not copy threads, so a program over several devices would hang in the child. The mark
# is part of JAX's compilation cache key: calls that the parent has compiled are traced again in the
# child, and refused. The parent pays nothing.
_is_marked = jax.make_user_context(default_value=False)


def refuse_after_fork(op: str) -> None:
    """Raises in a forked process. Call wherever an operation is traced.

    Raises:
      RuntimeError: this process was forked after JAX had started.
    """
    if _is_marked.value:
        raise RuntimeError(
            f"{op}: process {os.getpid()} was forked from process {os.getppid()} after JAX had "
            "started there. JAX's threads are not copied, so the call would hang. Start processes "
            "with multiprocessing.get_context('spawn') or subprocess, or fork before JAX is used."
        )


def _mark() -> None:
    if xla_bridge._backends:  # backends_are_initialized takes a lock, which a fork can leave held
        _is_marked(True).__enter__()  # never left: this thread is the child's only one


os.register_at_fork(after_in_child=_mark)
