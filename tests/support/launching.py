"""Programs of several processes, by the launcher or without it, and what they leave behind."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from jax_cp_dispatch import launch as launcher

LIMIT = 1200  # seconds. Only a deadlock takes this long.
PROGRAMS = pathlib.Path(__file__).parents[1] / "processes"


def arguments_of(program, *arguments, processes=2, devices=1, grace=30.0):
    options = [f"--processes={processes}", f"--devices={devices}", f"--grace={grace}"]
    return [*options, str(program), *arguments]


def command(*arguments, **options):
    """The launcher as a user starts it."""
    module = [sys.executable, "-m", "jax_cp_dispatch.launch"]
    return [*module, *arguments_of(*arguments, **options)]


def launch(*arguments, out=None, **options):
    """Runs the launcher in this process, which has imported JAX; `out` may get its output."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = {number: signal.getsignal(number) for number in numbers}
    end = threading.Timer(LIMIT, os.kill, (os.getpid(), signal.SIGTERM))  # as a user ends it
    end.start()
    with tempfile.TemporaryFile("w+") as kept, tempfile.TemporaryFile("w+") as err:
        try:
            with contextlib.redirect_stdout(out or kept), contextlib.redirect_stderr(err):
                code = launcher.main(arguments_of(*arguments, **options))
        finally:
            end.cancel()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for file in (kept, err):
            file.seek(0)
        return subprocess.CompletedProcess((), code, kept.read(), err.read())


def run_job(programs, environment, limit: float = LIMIT):
    """Runs Python programs, one in each process, and kills those that take longer than `limit`.

    Variables that are None are not inherited. Returns exit codes, None for a killed one, and of
    each what it printed and its errors.
    """
    codes, said = [], []
    variables = {**os.environ, **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    with contextlib.ExitStack() as stack:
        # Files, not pipes: they keep the output of a process that never ends.
        file = lambda: stack.enter_context(tempfile.TemporaryFile())
        files = [(file(), file()) for _ in programs]
        job = [
            subprocess.Popen(
                [sys.executable, *map(str, program)],
                env=variables, stdout=out, stderr=err,
            )
            for program, (out, err) in zip(programs, files, strict=True)
        ]  # fmt: skip
        end = time.monotonic() + limit
        try:
            for process in job:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
            codes = [process.poll() for process in job]
        finally:
            for process in job:
                process.kill()
                process.wait()
        for of_process in files:
            for file in of_process:
                file.seek(0)
            said.append([file.read().decode(errors="replace") for file in of_process])
    return codes, said


def outputs_of(num_processes, program, **environment):
    """Runs `program address process` in several processes on CPU; returns what each printed.

    Options for XLA are not inherited. All must end with 0.
    """
    address = free_address()
    plain = {name: None for name in os.environ if name.startswith("XLA_")}
    environment = {**plain, "JAX_PLATFORMS": "cpu", **environment}
    programs = [(program, address, process) for process in range(num_processes)]
    codes, said = run_job(programs, environment)
    assert codes == [0] * num_processes, said
    return [out for out, _ in said]


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def in_shared_memory():
    """Except what Python's multiprocessing in other programs of this machine makes."""
    others = "sem.mp-", "psm_"
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}
