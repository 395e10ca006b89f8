"""The processes of a job: JAX's coordination from start to end, values exchanged by its service.

A process of the launcher that has not joined the others is refused, and so is a forked one.
"""

import json
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from jax_cp_dispatch._jax_private import (
    distributed,
    get_distributed_runtime_client,
    xla_bridge,
)
from jax_cp_dispatch._ranks.sockets import JobMember, meet
from jax_cp_dispatch._text import warn_caller

# ---- Values of all processes.


def is_in_job() -> bool:
    return _client() is not None


def place_in_job() -> tuple[int, int]:
    """Returns (process, number of processes)."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def coordinator_host() -> str:
    """Returns the host at which all processes of the job reach JAX's coordination service."""
    address = distributed.global_state.coordinator_address or ""
    return address.rpartition(":")[0].strip("[]")


def _client() -> Any:
    return distributed.global_state.client


def publish(op: str, name: str, value: Any, may_repeat: bool = False) -> None:
    """Publishes `value` for the other processes of the job.

    A second value under the same name is an error, or if `may_repeat` is true replaces the first.
    """
    key = f"jax_cp_dispatch/{op}/{name}/{place_in_job()[0]}"
    _client().key_value_set(key, json.dumps(value), may_repeat)


def read_published(op: str, name: str) -> dict[int, Any]:
    """Returns, by process, the values published by `publish` so far."""
    found = _client().key_value_dir_get(f"jax_cp_dispatch/{op}/{name}")
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}


def publish_and_read_all(op: str, name: str, value: Any, timeout: float) -> list[Any]:
    """Publishes `value`, in JSON, and returns the values of all processes of the job.

    Every process must call `op`, which uses each name once. It raises RuntimeError if this process
    belongs to no job, or if another one publishes nothing within `timeout` seconds.
    """
    if not is_in_job():
        raise RuntimeError(
            f"{op}: this process belongs to no job. Call jax.distributed.initialize() first."
        )
    publish(op, name, value)
    return [read_from(op, name, other, timeout) for other in range(place_in_job()[1])]


def read_from(op: str, name: str, process: int, timeout: float) -> Any:
    """Returns what one process publishes; raises RuntimeError after `timeout` seconds."""
    key = f"jax_cp_dispatch/{op}/{name}/{process}"
    try:
        return json.loads(_client().blocking_key_value_get(key, round(1000 * timeout)))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"{op}: process {place_in_job()[0]} waited {timeout:g} s for process {process}, "
            f"expected its '{name}', seen nothing. Every process of the job must call {op}(); "
            f"check whether that one raised its own error. ({error})"
        ) from error


def first_failure(name: str, attempt: Callable[[], str], timeout: float) -> str:
    """Calls `attempt` in all processes of the job at once; all return the first failure, or "".

    `attempt` may use all devices, and returns why it failed, or "". No process calls it if not all
    come within `timeout` seconds. Use each name once.
    """
    if jax.process_count() == 1:
        return attempt()
    try:
        _client().wait_at_barrier(f"jax_cp_dispatch/{name}", round(1000 * timeout))
    except jax.errors.JaxRuntimeError:
        return f"{name}: not all processes came within {timeout:g} s"
    failures = publish_and_read_all(name, "failure", attempt(), timeout)
    return next((failure for failure in failures if failure), "")


# ---- Joins a job.

# Set by the launcher, which hosts the coordination service itself. If process 0 hosted it, its end
# would end all others, because JAX ends a process whose service is gone. The value is the address
# of the first meeting.
HOSTED_BY_LAUNCHER = "JAX_CP_DISPATCH_HOSTED_COORDINATION"
ADDRESS, NUM_PROCESSES = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"


def join(
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    host: str,
    timeout: float,
) -> bool:
    """Joins the job given by the arguments or the environment; returns whether there is one.

    On one host, JAX does not end a process because another one ended; this package reports the loss
    instead. Over several hosts JAX's watchdog ends it. `host` is equal for all processes of a host.

    Raises:
      RuntimeError: a process did not join in `timeout` seconds; raised in all that did. Or JAX has
        already started here, or this process may open too few files.
    """
    address = address or os.environ.get(ADDRESS)
    if num_processes is None and NUM_PROCESSES in os.environ:
        num_processes = int(os.environ[NUM_PROCESSES])
    if process_id is None and PROCESS_ID in os.environ:
        process_id = int(os.environ[PROCESS_ID])
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
        # As `jax.distributed.initialize` does in every process except the first.
        state: Any = distributed.global_state
        state.coordinator_address, state.process_id = address, process_id
        state.num_processes = num_processes or 1
        client = get_distributed_runtime_client(
            address, process_id, init_timeout=max(1, round(timeout)), use_compression=True
        )
        client.connect()
        state.client = client
        state.initialize_preemption_sync_manager()
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


# ---- Open files, counted before gloo runs into their limit.

# Counted on jax 0.10.2: JAX's client and its coordination, and gloo's device.
_OF_JAX, _OF_GLOO = 7, 4
_PER_NEIGHBOUR = 4  # its socket, its segment, and its process, watched twice
_SPARE = 1


def check_open_files(num_processes: int, num_devices: int) -> None:
    """Refuses a limit with which JAX cannot start; warns of one too small for XLA's collectives.

    The job has `num_processes` on this host, with `num_devices` each.
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


# ---- Ends a job in order: the process that hosts JAX's coordination service leaves last.
#
# JAX ends a process whose service is gone. JAX's own shutdown barrier does not help: it also holds
# a process that has failed, while others wait for its exit.

_ENDED = "jax_cp_dispatch/ended"
_POLL_SECONDS = 0.05
_SILENT_SECONDS = 30.0
_LONGEST_SECONDS = 300.0  # as JAX's barrier

_pid_fds: dict[int, int] = {}  # of processes of this host


def watch_process(process: int, pid_fd: int) -> None:
    """Watches for the end of `process`, whatever its cause. Keeps a copy of the descriptor."""
    if pid_fd >= 0:
        _pid_fds[process] = os.dup(pid_fd)


def end_in_order() -> None:
    """Makes JAX's shutdown in process 0 wait for all other live processes, up to five minutes.

    It does not wait if an exception ends process 0. Python shows no exit status to a program at its
    end, so `sys.exit(1)` waits as well; docs/decisions/process_0_waits_at_its_end.md says why.
    """
    state: Any = distributed.global_state
    shut_down, pid = state.shutdown, os.getpid()

    def shut_down_in_order():
        try:
            if state.client is not None and os.getpid() == pid:
                if state.process_id != 0:
                    state.client.key_value_set(f"{_ENDED}/{state.process_id}", "")
                elif getattr(sys, "last_exc", getattr(sys, "last_value", None)) is None:
                    _wait_for_others(state.client, state.num_processes)
        finally:
            shut_down()

    state.shutdown = shut_down_in_order


def _wait_for_others(client: Any, num_processes: int) -> None:
    begin, has_said = time.monotonic(), False
    ended: set[int] = set()
    while True:
        ended |= {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(_ENDED)}
        running = [p for p in range(1, num_processes) if p not in ended and not _has_died(p)]
        waited = time.monotonic() - begin
        if not running:
            break
        if waited > _LONGEST_SECONDS:
            _say(f"process 0 has waited {waited:.0f} s and leaves; JAX ends processes {running}")
            return
        if not has_said and waited > _SILENT_SECONDS:
            has_said = True
            _say(
                f"process 0 is done and waits for processes {running} because it hosts JAX's "
                f"coordination service, {_LONGEST_SECONDS:.0f} s at most"
            )
        time.sleep(_POLL_SECONDS)
    # A process leaves the service just after it reports its end. This call returns when all have
    # left.
    client.get_live_nodes([0, *(p for p in ended if not _has_died(p))])


def _say(text: str) -> None:
    print(f"jax_cp_dispatch: {text}", file=sys.stderr, flush=True)


def _has_died(process: int) -> bool:
    pid_fd = _pid_fds.get(process)
    if pid_fd is None:
        return False
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    return bool(poll.poll(0))


# ---- Forked processes.

# A fork does not copy threads, so a program over several devices would hang in the child. The mark
# is part of JAX's compilation cache key: calls that the parent has compiled are traced again in the
# child, and refused. The parent pays nothing.
_is_marked = jax.make_user_context(default_value=False)


def refuse_here(op: str) -> None:
    """Rejects calls in a process that was forked after JAX had started, or has not joined its job.

    Call wherever one is traced.
    """
    if _is_marked.value:
        raise RuntimeError(
            f"{op}: process {os.getpid()} was forked from process {os.getppid()} after JAX had "
            "started there. JAX's threads are not copied, so the call would hang. Start processes "
            "with multiprocessing.get_context('spawn') or subprocess, or fork before JAX is used."
        )
    num_processes = os.environ.get(NUM_PROCESSES)
    if HOSTED_BY_LAUNCHER in os.environ and num_processes != "1" and not is_in_job():
        raise RuntimeError(
            f"{op}: the launcher started {num_processes} processes, but this one has not joined "
            "the others and would compute alone. Call jax_cp_dispatch.initialize() in every "
            "process, before JAX is used."
        )


def _mark() -> None:
    if xla_bridge._backends:  # backends_are_initialized takes a lock, which a fork can leave held
        _is_marked(True).__enter__()  # never left: this thread is the child's only one


os.register_at_fork(after_in_child=_mark)
