"""Who is missing where a GPU waits: read at any time, and printed after a minute."""

import atexit
import functools
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jax_cp_dispatch._ranks import runtime


class WaitingCall(NamedTuple):
    """A call that GPUs of this process have begun, and that waits for other ranks.

    Attributes:
      op: the function that was called, and its axis.
      call: its number on its channel; 0 if the processes still agree how it is made.
      ranks: of this process, that wait.
      missing: ranks that have not come to the call.
      processes: of the missing ranks.
      seconds: for how long this process has seen it wait.
    """

    op: str
    call: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    processes: tuple[int, ...]
    seconds: float

    def describe(self) -> str:
        """Returns the text that is printed."""
        who = f"process {self.processes[0]}"
        if self.call:
            others = f"ranks {list(self.missing)} (processes {list(self.processes)})"
            who = f"{others} to come to call {self.call}"
        return (
            f"{self.op} has waited {self.seconds:.0f} s for {who}. They may be compiling, saving, "
            "or in a debugger; after the deadline, or if one has ended, the call fails. See "
            "jax_cp_dispatch.gpu.waiting_calls()."
        )


class WaitLog:
    """For how long calls have waited, and what to print: after 1, 10, 100, ... minutes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[Any, float] = {}
        self._printed_at: dict[Any, float] = {}

    def update(self, found: Iterable[tuple], now: float) -> dict[Any, WaitingCall]:
        """Returns the calls that wait, by channel and number.

        `found` are (channel, op, rank, call, missing ranks, their processes) of each rank that
        waits; `now` is in seconds.
        """
        with self._lock:
            of_calls: dict[Any, list[tuple]] = {}
            for one in found:
                of_calls.setdefault((one[0], one[3]), []).append(one)
            self._since = {key: self._since.get(key, now) for key in of_calls}
            return {
                key: WaitingCall(
                    op=rows[0][1],
                    call=key[1],
                    ranks=tuple(sorted(row[2] for row in rows if row[2] >= 0)),
                    missing=tuple(sorted({rank for row in rows for rank in row[4]})),
                    processes=tuple(sorted({process for row in rows for process in row[5]})),
                    seconds=now - self._since[key],
                )
                for key, rows in of_calls.items()
            }

    def due(self, found: Iterable[tuple], now: float) -> list[str]:
        """Returns what is to be printed now; arguments as of `update`."""
        calls, texts = self.update(found, now), []
        self._printed_at = {key: self._printed_at.get(key, _FIRST_SECONDS) for key in calls}
        for key, call in calls.items():
            if call.seconds >= self._printed_at[key]:
                texts.append(call.describe())
                while call.seconds >= self._printed_at[key]:
                    self._printed_at[key] *= 10
        return texts


_FIRST_SECONDS, _EVERY_SECONDS = 60.0, 10.0
_log = WaitLog()
first_calls: dict[str, int] = {}
"""The process for which the lowering of a program waits, or the making of a channel, by name."""


def _found() -> list[tuple]:
    first = "the first call of a program"
    makes = [(name, first, -1, 0, (), (process,)) for name, process in first_calls.copy().items()]
    return makes + list(runtime.cuda.waiting_ranks() if runtime.cuda is not None else ())


def waiting_calls() -> list[WaitingCall]:
    """Returns the calls in which GPUs of this process wait for other ranks now.

    Call on any thread, at any time. A GPU that shares one hardware queue with other streams
    (`CUDA_DEVICE_MAX_CONNECTIONS=1`) may not be readable, and is then left out. After a minute of
    waiting, the same is printed.
    """
    return list(_log.update(_found(), time.monotonic()).values())


@functools.cache
def start_watch() -> None:
    """Starts the thread that prints who is missing."""
    if jax.default_backend() != "gpu":  # the program is for another machine
        return
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_EVERY_SECONDS):
            for text in _log.due(_found(), time.monotonic()):
                print(f"jax_cp_dispatch: {text}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=watch, name="jax_cp_dispatch waits", daemon=True)
    thread.start()
    atexit.register(lambda: (stop.set(), thread.join(_EVERY_SECONDS)))
