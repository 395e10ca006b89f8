"""Measures dispatch and combine between processes of one host, against memcpy and gloo.

Each process has one device and sends one segment of random length to every other. All methods must
give the same result, which is checked first. The benchmark starts the processes itself.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import common
import jax
import numpy as np

import jax_cp_dispatch as cp
from jax_cp_dispatch.bench_command.movement import Exchange
from jax_cp_dispatch.bench_command.ranks import Ranks

FEATURES = 2048  # rows of 8 kB
ALL_BYTES = (128 << 20, 2 << 20)


def rows_of_processes(program: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows that the first process of each job of `program` prints, one per line."""
    rows = []
    for processes in (2, 4):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "jax_cp_dispatch.launch", f"--processes={processes}"),
                *(program, f"--repeats={arguments.repeats}"),
                *(["--quick"] if arguments.quick else []),
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=pathlib.Path(__file__).parents[1],
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("[0] {")]
        rows += [json.loads(line.removeprefix("[0] ")) for line in lines]
    return rows


def is_one_of_a_job() -> bool:
    return "JAX_CP_DISPATCH_HOSTED_COORDINATION" in os.environ


def main() -> None:
    arguments = common.options(common.parser(__doc__))
    rows = rows_of_processes(__file__, arguments)
    for row in rows:
        print(
            "{processes} processes, {MB:4d} MB: {what:<46}{ms:9.2f} ms{of_memcpy:8.3f} of memcpy"
            "{times_gloo:8.1f} x gloo's faster way".format(**row)
        )
    row_kB = 4 * FEATURES // 1024
    title = f"dispatch between processes of one host, rows of {row_kB} kB in random segments"
    common.write(arguments.output, title, rows)


def work() -> None:
    """Runs in each of the processes."""
    arguments = common.options(common.parser(None))
    cp.initialize()
    for num_bytes in ALL_BYTES[arguments.quick :]:
        seconds = measure(num_bytes, arguments.repeats)
        if jax.process_index() == 0:
            memcpy = seconds["memcpy, one thread"]
            gloo = min(value for name, value in seconds.items() if name.startswith("gloo"))
            for what, value in seconds.items():
                row = {
                    "processes": jax.process_count(),
                    "MB": num_bytes >> 20,
                    "what": what,
                    "ms": round(1e3 * value, 3),
                    "of_memcpy": round(memcpy / value, 3),
                    "times_gloo": round(gloo / value, 2),
                }
                print(json.dumps(row), flush=True)


def measure(num_bytes: int, repeats: int) -> dict[str, float]:
    """Returns median seconds; in the first process, also of a copy by the host."""
    ranks = Ranks.of_devices(jax.device_count(), repeats)
    tokens = num_bytes // (ranks.count * FEATURES * 4)
    exchange = Exchange(ranks, tokens, (FEATURES,), np.float32)
    exchange.check()
    gloo = {f"gloo: {name}": run for name, run in exchange.collectives.items()}
    runs = {"memcpy, one thread": exchange.limit(), **exchange.runs, **gloo}
    seconds = common.interleaved(runs, repeats, longest=None)
    return {name.removesuffix(", one replica"): value for name, value in seconds.items()}


if __name__ == "__main__":
    if is_one_of_a_job():
        work()
    else:
        main()
