"""Runs a program in two or more processes of this host that meet at one address."""

import os
import socket
import subprocess
import sys


def outputs_of_two(program, **environment):
    return outputs_of(2, program, **environment)


def outputs_of(num_processes, program, **environment):
    """Runs `program address process` in several processes on CPU; returns what each printed.

    Options for XLA are not inherited. All must end with 0.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, program, address, str(process)],
            env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(num_processes)
    ]  # fmt: skip
    try:
        results = [process.communicate(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, error) in zip(processes, results, strict=True):
        assert process.returncode == 0, out + error
    return [out for out, _ in results]
