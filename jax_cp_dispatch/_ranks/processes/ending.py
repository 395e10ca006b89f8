"""Ends a job in order: the process that hosts JAX's coordination service leaves last.

JAX ends a process whose service is gone. JAX's own shutdown barrier does not help: it also holds a
process that has failed, while others wait for its exit.
"""

import os
import select
import sys
import time
from typing import Any

from jax_cp_dispatch._jax_private import distributed

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
