"""Stress test of several processes; prints the outcome of each kind of run.

    python tests/stress/stress_processes.py                         all of it, about an hour
    python tests/stress/stress_processes.py --trials 9 kill loops   some of it, shorter

Runs the suite of every operation with 2, 4 and 8 processes, trials of every failure, jobs that lose
processes one by one, and dispatches back to back with delays. Exits with 1 if a run failed or left
shared-memory segments behind.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name) for name in ("processes", "oracles", "support")
)

import jax
import numpy as np
from movement_oracle import dispatched
from places import AXIS, T, draw, mesh_of_all, on_ranks, place, plan_of

import jax_cp_dispatch as cp

PROGRAMS = pathlib.Path(__file__).parents[1] / "processes"
FAILURES = ("late", "shapes", "operation", "metadata", "constants", "batch", "stop")
FAILURES += ("gemm late", "gemm shapes", "gemm stop", "ring shapes")
KILLS = ("kill", "gemm kill")


def launch(program, *arguments, processes, devices=1):
    options = [f"--processes={processes}", f"--devices={devices}"]
    return subprocess.run(
        [
            *(sys.executable, "-m", "jax_cp_dispatch.launch", *options),
            *(str(PROGRAMS / program), *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_suite(_):
    """Every operation."""
    for processes, devices in ((2, 1), (4, 1), (8, 1), (2, 4), (4, 2)):
        done = launch("suite.py", processes=processes, devices=devices)
        num_right = len(re.findall(r"^\[\d+\] all \d+ ok$", done.stdout, re.M))
        yield num_right, processes, f"processes with {devices} devices passed", done


def run_failures(options):
    """One process fails repeatedly and survives."""
    for kind in FAILURES:
        done = launch("failures.py", f"--trials={options.trials}", kind, processes=3)
        found = re.findall(rf"{kind}: (\d+) of", done.stdout)
        yield min(map(int, found), default=0), options.trials, f"trials of {kind}", done


def run_kill(options):
    """Each job loses two of four processes; the next job starts at once."""
    for kind in KILLS:
        num_right = num_killed = 0
        done = None
        while num_killed < options.trials:
            done = launch("failures.py", "--trials=2", kind, processes=4)
            num_killed += 2
            found = [int(n) for n in re.findall(rf"{kind}: (\d+) of 2", done.stdout)]
            num_right += min(found) if len(found) == 2 else 0
            if num_right < num_killed:
                break
        yield num_right, num_killed, f"trials of {kind}", done


def run_loops(options):
    """Calls back to back, each rank delayed by its own times."""
    number = str(options.dispatches)
    for processes, devices in ((2, 1), (4, 1), (2, 4)):
        for what, arguments in (("dispatches", []), ("GEMMs", ["gemms"])):
            job = __file__, "--loops", number, *arguments
            done = launch(*job, processes=processes, devices=devices)
            num_right = done.stdout.count(f"{number} {what}, 0 mismatches")
            text = f"processes with {devices} devices made {number} {what} without a mismatch"
            yield num_right, processes, text, done


# ---- Calls back to back, in each process.

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


def loops(number, *what):
    cp.initialize()
    mismatches = (gemms if what else dispatches)(mesh_of_all(), int(number))
    print(f"{number} {'GEMMs' if what else 'dispatches'}, {mismatches} mismatches", flush=True)
    sys.exit(1 if mismatches else 0)


# ---- All.


def in_shared_memory():
    return set(os.listdir("/dev/shm"))


def main():
    parts = {"suite": run_suite, "failures": run_failures, "kill": run_kill, "loops": run_loops}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="of each kind of failure")
    parser.add_argument("--dispatches", type=int, default=10_000)
    parser.add_argument("parts", nargs="*", default=list(parts), help=", ".join(parts))
    options = parser.parse_args()
    is_right, before = True, in_shared_memory()
    for name in options.parts:
        begin = time.monotonic()
        for num_right, number, text, done in parts[name](options):
            seconds = time.monotonic() - begin
            print(f"{num_right} of {number} {text} ({seconds:.0f} s)", flush=True)
            begin = time.monotonic()
            if num_right != number:
                is_right = False
                print(done.stdout[-4000:])
    left = in_shared_memory() - before
    print(f"{len(left)} segments left behind", *left)
    sys.exit(0 if is_right and not left else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--loops"]:
        loops(*sys.argv[2:])
    main()
