"""A process of a job without the launcher; it still has work when process 0 is done.

python ends.py ADDRESS NUM_PROCESSES PROCESS FOLDER [explicitly | raises | exits | goes_on]
"""

import argparse
import contextlib
import pathlib
import sys
import time
from typing import Any

import jax
from jax._src import distributed

import jax_cp_dispatch as cp

address, num_processes, process = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
last_line, how = pathlib.Path(sys.argv[4], "0 is at its last line"), sys.argv[5:]
assert cp.initialize(address, num_processes, process).implementation == "shared_memory"
assert len(jax.devices()) == num_processes
if process == 0:
    last_line.touch()
    if how == ["explicitly"]:
        jax.distributed.shutdown()
    if how == ["raises"]:
        raise RuntimeError("process 0 fails")
    if how == ["exits"]:
        sys.exit(3)
    if how == ["goes_on"]:
        with contextlib.suppress(SystemExit):
            argparse.ArgumentParser().parse_args(["--unknown"])
else:
    while not last_line.exists():
        time.sleep(0.01)
    time.sleep(3)  # enough time for JAX to end this process, if no other process waited for it
    client: Any = distributed.global_state.client
    client.key_value_set("still", "there")
    print("done", flush=True)
