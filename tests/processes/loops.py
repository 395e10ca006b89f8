"""Dispatches back to back, each rank late by a random time of its own. Run by the launcher.

python -m jax_cp_dispatch.launch --processes 4 tests/processes/loops.py 10000
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np
from movement_oracle import dispatched
from places import AXIS, T, draw, mesh_of_all, on_ranks, place, plan_of

import jax_cp_dispatch as cp

PER_PROGRAM = 100


def main():
    cp.initialize()
    num_dispatches = int(sys.argv[1])
    mesh, W = mesh_of_all(), jax.device_count()
    plan, capacity = plan_of(0, W)
    capacity = max(capacity, T)
    rng = np.random.default_rng(jax.process_index())

    def late(x):
        time.sleep(rng.choice([0, 0, 1e-4, 1e-3]))
        return x

    def program(x, m):
        """Rows go on and on; those that arrive are the next to be sent."""

        def step(x, _):
            x = jax.pure_callback(late, jax.typeof(x), x)
            return cp.dispatch(x, m, axis_name=AXIS, capacity=capacity)[:T] + 1, None

        return jax.lax.scan(step, x, None, length=PER_PROGRAM)[0]

    run = on_ranks(program, mesh, check_vma=False)
    whole = draw(0, W, 4).astype(np.float32)
    x, m = jax.tree.map(lambda a: place(a, mesh), (whole, cp.Metadata(**plan)))
    mismatches = 0
    for _ in range(num_dispatches // PER_PROGRAM):
        x = run(x, m)
        for _ in range(PER_PROGRAM):
            whole = dispatched(plan, whole, capacity)[:, :T] + 1
        for shard in x.addressable_shards:
            mismatches += not np.array_equal(np.asarray(shard.data), whole[shard.index])
    print(f"{num_dispatches} dispatches, {mismatches} mismatches", flush=True)
    sys.exit(1 if mismatches else 0)


if __name__ == "__main__":
    main()
