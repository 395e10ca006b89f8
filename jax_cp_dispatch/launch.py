"""Runs a program in several processes of this host: `python -m jax_cp_dispatch.launch program.py`.

    python -m jax_cp_dispatch.launch --processes 4 [--devices 2] program.py [its arguments]
    python -m jax_cp_dispatch.launch --processes 4 -m package.module [its arguments]

The program calls `jax_cp_dispatch.initialize()` first. Each line of output begins with the number
of its process. When a process fails, the others have `--grace` seconds to finish before they are
killed. The exit code is that of the first process that failed, or 128 + n after signal n.
"""

import argparse
import contextlib
import errno
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

from jax_cp_dispatch._jax_private import get_distributed_runtime_service
from jax_cp_dispatch._ranks.job import ADDRESS, HOSTED_BY_LAUNCHER, NUM_PROCESSES, PROCESS_ID

_POLL_SECONDS = 0.02
_TERMINATION_SECONDS = 3.0


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        return _launch(options)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return _refuse(
            f"cannot start {options.processes} processes: {error.strerror}. Each needs pipes here; "
            f"raise the limit with `ulimit -n`, which is {limit}, or pass fewer --processes."
        )


def _launch(options: argparse.Namespace) -> int:
    address, meeting = _free_addresses(2)
    # Outside the job, so that no process ends with the service.
    service = get_distributed_runtime_service(
        address, options.processes, shutdown_timeout=5, recoverable=True
    )
    what = ["-m", options.program] if options.module else [options.program]
    workers: list[subprocess.Popen] = []
    printers: list[threading.Thread] = []
    output = _Output()
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    try:
        for process in range(options.processes):
            worker = subprocess.Popen(
                [sys.executable, "-u", *what, *options.arguments],
                env={**os.environ, **_environment(options, address, meeting, process)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            workers.append(worker)
            for pipe, stream in ((worker.stdout, sys.stdout), (worker.stderr, sys.stderr)):
                printers.append(
                    threading.Thread(target=output.print_lines, args=(process, pipe, stream))
                )
                printers[-1].start()
        code = _wait(workers, received, options.grace)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        for printer in printers:
            printer.join(timeout=5)  # a grandchild may keep the pipe open
        service.shutdown()
    return code or output.code()


def _refuse(reason: str) -> int:
    print(f"launch: {reason}", file=sys.stderr)
    return 2


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jax_cp_dispatch.launch",
        description="Runs a program in several processes of this host.",
    )
    parser.add_argument("--processes", type=int, default=2, help="number (default: 2)")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of each (default: 1)")
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds that the others may run after a process has failed (default: 30)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the program is a module, as in python -m"
    )
    parser.add_argument("program", help="a Python file, which calls jax_cp_dispatch.initialize()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    options = parser.parse_args(arguments)
    for name in ("processes", "devices"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it needs to be at least 1")
    if not 0 <= options.grace < math.inf:
        parser.error(f"--grace is {options.grace:g}; it needs to be a number of seconds from 0")
    return options


def _free_addresses(number: int) -> list[str]:
    """Returns addresses with different free ports, chosen by the system."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def _environment(
    options: argparse.Namespace, address: str, meeting: str, process: int
) -> dict[str, str]:
    threads = max(len(os.sched_getaffinity(0)), 2 * options.devices)  # see cpu_devices.py
    return {
        ADDRESS: address,
        NUM_PROCESSES: str(options.processes),
        PROCESS_ID: str(process),
        HOSTED_BY_LAUNCHER: meeting,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(options.devices),
        "PJRT_NPROC": str(threads),
    }


class _Output:
    """The lines of all processes. If they cannot be written, the processes still run to their end.

    Otherwise a process would wait for room in its pipe.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._errors: dict[IO[str], OSError] = {}

    def print_lines(self, process: int, pipe: IO[bytes], stream: IO[str]) -> None:
        for line in pipe:
            text = line.decode(errors="replace").removesuffix("\n")
            with self._lock:
                if stream in self._errors:
                    continue
                try:
                    stream.write(f"[{process}] {text}\n")
                    stream.flush()
                except OSError as error:
                    self._errors[stream] = error
                    # Python flushes once more at its end.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def code(self) -> int:
        """Returns 2 and says why if lines were lost; not if the reader has seen enough."""
        lost = [x for x in self._errors.values() if not isinstance(x, BrokenPipeError)]
        if not lost:
            return 0
        return _refuse(
            f"cannot write the output: {lost[0].strerror}. Free some space, or write elsewhere."
        )


def _wait(workers: list[subprocess.Popen], received: list[int], grace: float) -> int:
    """Waits for all processes; forwards signals, and ends the others after a failure."""
    code, end = 0, None
    while any(worker.poll() is None for worker in workers):
        while received:
            number = received.pop()
            code = code or 128 + number
            for worker in workers:
                if worker.poll() is None:
                    worker.send_signal(number)
            end = min(end or float("inf"), time.monotonic() + _TERMINATION_SECONDS)
        code = code or _first_failure(workers)
        if code and end is None:
            end = time.monotonic() + grace
            _report(workers, grace)
        if end is not None and time.monotonic() > end:
            for worker in workers:
                worker.kill()  # also a stopped one
        time.sleep(_POLL_SECONDS)
    return code or _first_failure(workers)


def _report(workers: list[subprocess.Popen], grace: float) -> None:
    """Says which processes have failed: the errors of the others may not name them."""
    for process, worker in enumerate(workers):
        if worker.poll():
            how = f"exit code {worker.returncode}"
            if worker.returncode < 0:
                how = signal.Signals(-worker.returncode).name
            print(
                f"launch: process {process} (pid {worker.pid}) ended with {how}; the others have "
                f"{grace:g} s to end",
                file=sys.stderr,
                flush=True,
            )


def _first_failure(workers: list[subprocess.Popen]) -> int:
    for worker in workers:
        if worker.poll():
            return 128 - worker.returncode if worker.returncode < 0 else worker.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
