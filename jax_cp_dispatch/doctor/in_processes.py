"""The self-test of shared memory: two processes of this host, started by the launcher.

This file is also the program that they run.
"""

import subprocess
import sys
import time

from jax_cp_dispatch._ranks.processes import initialize
from jax_cp_dispatch.doctor.machine import Finding
from jax_cp_dispatch.doctor.self_test import move

_PROCESSES, _LIMIT = 2, 60  # seconds
_RIGHT = "right"


def try_processes() -> Finding:
    """Runs the processes and reports the result."""
    start = time.perf_counter()
    launch = ["-m", "jax_cp_dispatch.launch", f"--processes={_PROCESSES}", __file__]
    try:
        done = subprocess.run(
            [sys.executable, *launch], capture_output=True, text=True, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return _finding(f"{_PROCESSES} processes did not end within {_LIMIT} s")
    said = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    if done.returncode == 0 and said.count(_RIGHT) == _PROCESSES:
        seconds = time.perf_counter() - start
        return Finding(
            "transport shared_memory",
            f"dispatch and combine are correct between {_PROCESSES} processes, {seconds:.1f} s",
        )
    last = (done.stderr or done.stdout or "nothing").strip().splitlines()[-1]
    return _finding(f"{_PROCESSES} processes ended with {done.returncode}: {last}")


def _finding(wrong: str) -> Finding:
    return Finding("transport shared_memory", wrong, "wrong", "Report this with the output.")


def main() -> None:
    initialize()
    print(move("shared_memory") or _RIGHT, flush=True)


if __name__ == "__main__":
    main()
