"""Programs of several processes, by the launcher, and what they leave behind."""

import os
import pathlib
import socket
import subprocess
import sys

PROGRAMS = pathlib.Path(__file__).parents[1] / "processes"


def command(program, *arguments, processes=2, devices=1, grace=30.0):
    options = [f"--processes={processes}", f"--devices={devices}", f"--grace={grace}"]
    module = ["-m", "jax_cp_dispatch.launch"]
    return [sys.executable, *module, *options, str(program), *arguments]


def launch(*arguments, **options):
    return subprocess.run(
        command(*arguments, **options), capture_output=True, text=True, timeout=1200
    )


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def in_shared_memory():
    """Except what Python's multiprocessing in other programs of this machine makes."""
    others = "sem.mp-", "psm_"
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}
