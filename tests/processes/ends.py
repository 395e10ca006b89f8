"""A process of a job without the launcher; it still has work when process 0 is done.

python ends.py ADDRESS NUM_PROCESSES PROCESS FOLDER HOW

HOW is explicitly, raises, exits or leaves.
"""

import pathlib
import re
import sys
import time
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, PartitionSpec as P

import jax_cp_dispatch as cp
from jax_cp_dispatch._ranks.processes import ending

address, num_processes, process = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
last_line, how = pathlib.Path(sys.argv[4], "0 is at its last line"), sys.argv[5]
assert cp.initialize(address, num_processes, process).implementation == "shared_memory"
assert len(jax.devices()) == num_processes
if process == 0:
    last_line.touch()
    if how == "explicitly":
        jax.distributed.shutdown()
    if how == "raises":
        raise RuntimeError("process 0 fails")
    if how == "exits":
        sys.exit(3)
    if how == "leaves":
        ending._LONGEST_SECONDS = 0.5
else:
    while not last_line.exists():
        time.sleep(0.01)
    plan, _ = cp.compute_metadata(np.full((2, 1), 4), np.array([[1], [0]]))
    move = lambda: cp.dispatch(np.zeros((4, 1)), plan, axis_name="cp", capacity=4, deadline=0.5)
    mesh = Mesh(np.array(jax.devices()), ("cp",))
    try:
        jax.block_until_ready(
            jax.jit(jax.shard_map(move, mesh=mesh, in_specs=(), out_specs=P("cp")))()
        )
    except jax.errors.JaxRuntimeError as error:
        print(*re.findall(r"missing ranks \[0\]", str(error)), flush=True)
    time.sleep(3)  # enough time for JAX to end this process, if no other process waited for it
    client: Any = distributed.global_state.client
    client.key_value_set("still", "there")
    print("done", flush=True)
