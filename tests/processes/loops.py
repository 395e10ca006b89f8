"""Calls back to back, each rank delayed by its own random time. Run by the launcher.

python -m jax_cp_dispatch.launch --processes 4 tests/processes/loops.py 10000
python -m jax_cp_dispatch.launch --processes 4 tests/processes/loops.py 1000 gemms
"""

import pathlib
import sys
import time

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import numpy as np
from movement_oracle import dispatched
from places import AXIS, T, draw, mesh_of_all, on_ranks, place, plan_of

import jax_cp_dispatch as cp

PER_PROGRAM = 100


def late(rng, x):
    """Returns `x` after this process's delay."""

    def wait(x):
        time.sleep(rng.choice([0, 0, 1e-4, 1e-3]))
        return x

    return jax.pure_callback(wait, jax.typeof(x), x)


def gemms(mesh, num_calls):
    """Alternates all-gathers and reduce-scatters; exact, because they permute columns."""
    W, K = jax.device_count(), 16 * jax.device_count()
    rng, order = np.random.default_rng(jax.process_index()), np.random.default_rng(0)
    forth = np.eye(K, dtype=np.float32)[:, order.permutation(K)]
    columns = forth.reshape(K, W, K // W).swapaxes(0, 1)  # of each rank
    whole = order.integers(-8, 8, (W, T, K)).astype(np.float32)

    def program(x, w):
        def step(x, _):
            for method in ("ring", "pipeline"):
                gathered = "ring" if method == "ring" else "none"
                h = cp.all_gather_matmul(late(rng, x), w, axis_name=AXIS, method=gathered)
                x = cp.matmul_reduce_scatter(late(rng, h), w.T, axis_name=AXIS, method=method)
            return x + 1, None

        return jax.lax.scan(step, x, None, length=PER_PROGRAM // 4)[0]

    run = on_ranks(program, mesh, check_vma=False)
    x, w = (place(a, mesh) for a in (whole, columns))
    mismatches = 0
    for _ in range(num_calls // PER_PROGRAM):
        x, whole = run(x, w), whole + PER_PROGRAM // 4
        for shard in x.addressable_shards:
            mismatches += not np.array_equal(np.asarray(shard.data), whole[shard.index])
    return mismatches


def dispatches(mesh, num_calls):
    """Sends rows on repeatedly; those that arrive are sent next."""
    W = jax.device_count()
    plan, capacity = plan_of(0, W)
    capacity = max(capacity, T)
    rng = np.random.default_rng(jax.process_index())

    def program(x, m):
        def step(x, _):
            x = late(rng, x)
            return cp.dispatch(x, m, axis_name=AXIS, capacity=capacity)[:T] + 1, None

        return jax.lax.scan(step, x, None, length=PER_PROGRAM)[0]

    run = on_ranks(program, mesh, check_vma=False)
    whole = draw(0, W, 4).astype(np.float32)
    x, m = jax.tree.map(lambda a: place(a, mesh), (whole, cp.Metadata(**plan)))
    mismatches = 0
    for _ in range(num_calls // PER_PROGRAM):
        x = run(x, m)
        for _ in range(PER_PROGRAM):
            whole = dispatched(plan, whole, capacity)[:, :T] + 1
        for shard in x.addressable_shards:
            mismatches += not np.array_equal(np.asarray(shard.data), whole[shard.index])
    return mismatches


def main():
    cp.initialize()
    num_calls, of_gemms = int(sys.argv[1]), sys.argv[2:] == ["gemms"]
    mesh = mesh_of_all()
    mismatches = (gemms if of_gemms else dispatches)(mesh, num_calls)
    what = "GEMMs" if of_gemms else "dispatches"
    print(f"{num_calls} {what}, {mismatches} mismatches", flush=True)
    sys.exit(1 if mismatches else 0)


if __name__ == "__main__":
    main()
