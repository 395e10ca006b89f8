"""Programs of several processes, by the launcher, and what they leave behind."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading

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


def launch(*arguments, **options):
    """Runs the launcher in this process, which has imported JAX already."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = {number: signal.getsignal(number) for number in numbers}
    end = threading.Timer(LIMIT, os.kill, (os.getpid(), signal.SIGTERM))  # as a user ends it
    end.start()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = launcher.main(arguments_of(*arguments, **options))
        finally:
            end.cancel()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess((), code, out.read(), err.read())


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def in_shared_memory():
    """Except what Python's multiprocessing in other programs of this machine makes."""
    others = "sem.mp-", "psm_"
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}
