"""Exchanges of large rows between processes on one GPU, with delays: each row is checked.

    python tests/gpu/stress_processes.py --processes 8 --rounds 500 --megabytes 64
    python tests/gpu/stress_processes.py --rounds 40 --fault EXTENSION

The processes run under MPS, so that their kernels run at the same time; without it, they take
turns. Every round has another plan, other rows and random delays of the host and of the GPU before
it, and sends the rows there and back. What a row has to be follows from its sender and the round,
so the GPU checks all of them.

`--fault` names an extension of planted_fault.py; the stress then succeeds if it finds wrong rows or
errors. Otherwise it could not have found a race.
"""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name) for name in ("processes", "oracles", "support")
)

import jax
import jax.numpy as jnp
import launched
import numpy as np
from movement_oracle import named_rows, random_plan
from places import AXIS, RANKS, mesh_of_all, place_all
from planted_fault import package_with

from jax_cp_dispatch import Metadata, combine, dispatch
from jax_cp_dispatch.gpu import connect_gpus, raise_gpu_errors

SLOTS, COLUMNS, NUM_PLANS = 16, 1024, 4
CHECKED_AT_ONCE = 25  # rounds that the host enqueues before it waits
MOST_SPINS, LONGEST_SLEEP = 200, 0.002  # of a loop on the GPU; seconds of the host


def rows_of(ids, number):
    """Returns rows [..., COLUMNS] that differ by sender's row and round; zero for id -1."""
    mixed = (ids.astype(jnp.uint32) * np.uint32(2654435761)) ^ (
        number.astype(jnp.uint32) * np.uint32(0x9E3779B9)
    )
    columns = jnp.arange(COLUMNS, dtype=jnp.uint32) * np.uint32(0x85EBCA6B)
    return jnp.where(ids[..., None] >= 0, (mixed[..., None] ^ columns) | 1, 0)


def worker(options) -> None:
    address, (num_ranks, rank) = options.place[0], map(int, options.place[1:])
    jax.distributed.initialize(address, num_ranks, rank, local_device_ids=[0])
    world = connect_gpus()
    if world.implementation != "cuda_ipc":
        sys.exit(f"not connected by CUDA IPC: {world.reason}")
    mesh, tokens = mesh_of_all(), (options.megabytes << 20) // (4 * COLUMNS)
    common = np.random.default_rng(0)  # the same in all processes
    plans = [random_plan(common, num_ranks, SLOTS, tokens) for _ in range(NUM_PLANS)]
    capacity = max(int(plan["num_total_recv_tokens"].max()) for plan in plans)
    mine = np.arange(num_ranks * tokens, dtype=np.int32).reshape(num_ranks, tokens)

    def case_of(plan):
        sources = np.full((num_ranks, capacity), -1, np.int32)
        returned = np.full(mine.shape, -1, np.int32)
        for sender, row, receiver, at in named_rows(plan):
            sources[receiver, at] = returned[sender, row] = mine[sender, row]
        return place_all((mine, Metadata(**plan), sources, returned), mesh)

    cases = [case_of(plan) for plan in plans]
    deadline = 3.0 if options.fault else 20.0
    where: Any = {"axis_name": AXIS, "implementation": "cuda_ipc", "deadline": deadline}

    def step(mine, metadata, sources, returned, number, spins):
        x = rows_of(mine[0], number[0])
        delay = jax.lax.fori_loop(
            0, spins[0], lambda _, y: jnp.sin(y), x[:1, 0].astype(jnp.float32)
        )
        x, _ = jax.lax.optimization_barrier((x, delay))
        came = dispatch(x, metadata, capacity=capacity, **where)
        wrong = jnp.any(came != rows_of(sources[0], number[0]), axis=1).sum()
        if not options.fault:  # after an error, a program ends before its next exchange
            home = combine(came, metadata, num_tokens=tokens, **where)
            wrong += jnp.any(home != rows_of(returned[0], number[0]), axis=1).sum()
        return wrong[None]

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=RANKS, out_specs=RANKS))
    own = np.random.default_rng(1000 + rank)  # delays differ
    wrong, num_errors, begun = [], 0, time.monotonic()
    for number in range(options.rounds):
        time.sleep(own.uniform(0, LONGEST_SLEEP))
        # Of which a process places its own part.
        spins = np.full(num_ranks, own.integers(MOST_SPINS), np.int32)
        scalars = place_all((np.full(num_ranks, number, np.int32), spins), mesh)
        case = cases[common.integers(NUM_PLANS)]
        try:
            of_round = step(*case, *scalars)
            if options.fault or number % CHECKED_AT_ONCE == 0:
                jax.block_until_ready(of_round)
            wrong.append(of_round)
        except Exception as error:  # the exchange was enqueued all the same
            if not options.fault:
                raise
            num_errors += 1
            print(str(error).splitlines()[0][:200], flush=True)
    total = sum(int(np.asarray(x.addressable_data(0))[0]) for x in wrong)
    if not options.fault:
        raise_gpu_errors()
    took = time.monotonic() - begun
    found = f"{options.rounds} rounds, {total} wrong rows, {num_errors} errors"
    print(f"process {rank}: {found}, {took:.1f} s", flush=True)


# ---- Processes.


@contextlib.contextmanager
def mps():
    """Runs MPS for the processes that are started inside; says so if it cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        places = {f"CUDA_MPS_{name}_DIRECTORY": folder for name in ("PIPE", "LOG")}
        # The processes share the GPU's hardware queues.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "2"
        os.environ.update(places)
        control = ["nvidia-cuda-mps-control"]
        try:
            subprocess.run([*control, "-d"], check=True, timeout=20)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"without MPS: {error}", flush=True)
            for name in places:
                del os.environ[name]
            yield
            return
        try:
            yield
        finally:
            subprocess.run(control, input="quit\n", text=True, timeout=20, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--megabytes", type=int, default=64, help="rows of each process")
    parser.add_argument("--fault", default="", help="an extension of planted_fault.py")
    parser.add_argument("place", nargs="*", help="of a process that this program starts")
    options = parser.parse_args()
    if options.place:
        return worker(options)
    arguments = [f"--{x}={getattr(options, x)}" for x in ("rounds", "megabytes", "fault")]
    with mps(), tempfile.TemporaryDirectory() as folder:
        if options.fault:
            os.environ["PYTHONPATH"] = package_with(options.fault, pathlib.Path(folder))
        codes, outputs = launched.run(
            __file__,
            options.processes,
            "cuda_ipc",
            *arguments,
            slab=(8 * options.megabytes) << 20,
            fraction=".06",
        )
    print(launched.printed(codes, outputs))
    is_right = [f"{options.rounds} rounds, 0 wrong rows, 0 errors" in out for out in outputs]
    if options.fault:  # all wrote how many they found, and some found it
        sys.exit(not all("wrong rows" in out for out in outputs) or all(is_right))
    sys.exit(any(codes) or not all(is_right))


if __name__ == "__main__":
    main()
