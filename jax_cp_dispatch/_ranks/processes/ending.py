"""Ends a job in order: the process that hosts JAX's coordination service leaves last.

JAX ends a process whose service is gone. JAX's own shutdown barrier does not help: it has a time
limit, and it blocks a process that has failed, while others wait for its exit.
"""

import os
import select
import sys
import threading
import time
from typing import Any, NoReturn

from jax_cp_dispatch._jax_private import distributed

_ENDED = "jax_cp_dispatch/ended"
_POLL_SECONDS = 0.05
_SILENT_SECONDS = 30.0

_pid_fds: dict[int, int] = {}  # of processes of this host
_statuses: list[Any] = []  # with which `sys.exit` ends this process


def watch_process(process: int, pid_fd: int) -> None:
    """Watches for the end of `process`, whatever its cause. Keeps a copy of the descriptor."""
    if pid_fd >= 0:
        _pid_fds[process] = os.dup(pid_fd)


def end_in_order() -> None:
    """Makes JAX's shutdown in process 0 wait for all other live processes.

    It does not wait if an exception ends process 0, or `sys.exit` with a status other than 0.
    """
    state: Any = distributed.global_state
    shut_down, pid = state.shutdown, os.getpid()
    if state.process_id == 0:
        sys.exit = _exit

    def shut_down_in_order():
        try:
            if state.client is not None and os.getpid() == pid:
                if state.process_id != 0:
                    state.client.key_value_set(f"{_ENDED}/{state.process_id}", "")
                elif not _is_failing():
                    _wait_for_others(state.client, state.num_processes)
                elif _statuses:  # otherwise there is a traceback
                    _say(
                        f"process 0 ends with exit status {_statuses[0]!r}; JAX ends the other "
                        "processes because it hosts JAX's coordination service"
                    )
        finally:
            shut_down()

    state.shutdown = shut_down_in_order


class _Exit(SystemExit):
    """Records the status of the interpreter's exit, which Python hides from callbacks at exit.

    The interpreter reads `code` outside any Python frame; a caller that catches the exit does not.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:
            _statuses.append(value)
        return value


def _exit(status: Any = None, /) -> NoReturn:
    """Replaces `sys.exit`."""
    in_main = threading.current_thread() is threading.main_thread()
    raise (_Exit if in_main else SystemExit)(status)


def _is_failing() -> bool:
    if getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None:
        return True
    return any(status not in (None, 0) for status in _statuses)


def _wait_for_others(client: Any, num_processes: int) -> None:
    begin, has_said = time.monotonic(), False
    ended: set[int] = set()
    while True:
        ended |= {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(_ENDED)}
        running = [p for p in range(1, num_processes) if p not in ended and not _has_died(p)]
        if not running:
            break
        if not has_said and time.monotonic() > begin + _SILENT_SECONDS:
            has_said = True
            _say(
                f"process 0 is done and waits for processes {running} because it hosts JAX's "
                "coordination service"
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
