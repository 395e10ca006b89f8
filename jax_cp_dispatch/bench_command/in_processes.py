"""Movement and GEMMs between processes of this host, started by the launcher.

This file is also the program that they run.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np

from jax_cp_dispatch._ranks.processes import initialize
from jax_cp_dispatch.bench_command import gemm, movement
from jax_cp_dispatch.bench_command.ranks import Ranks, Row

SECTION = "processes"
ROW_ELEMENTS = 2048  # of float32: rows of 8 kB
_LIMIT = 300  # seconds


def measure(
    processes: int, num_bytes: int, shapes: tuple[tuple[str, int, int, int], ...], repeats: int
) -> Iterator[Row]:
    """Starts the processes, with one device each, and yields the rows of the first.

    Raises:
      RuntimeError: they failed, or did not end in time.
    """
    arguments = json.dumps({"num_bytes": num_bytes, "shapes": shapes, "repeats": repeats})
    launch = ["-m", "jax_cp_dispatch.launch", f"--processes={processes}", "--grace=5", __file__]
    try:
        done = subprocess.run(
            [sys.executable, *launch, arguments], capture_output=True, text=True, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{processes} processes did not end within {_LIMIT} s.") from None
    if done.returncode:
        last = (done.stderr or done.stdout or "nothing").strip().splitlines()[-1]
        raise RuntimeError(f"{processes} processes ended with {done.returncode}: {last}")
    for line in done.stdout.splitlines():
        if line.startswith("[0] {"):
            yield Row(**json.loads(line.removeprefix("[0] ")))


def main() -> None:
    initialize()
    options = json.loads(sys.argv[1])
    ranks = Ranks.of_devices(jax.device_count(), options["repeats"])
    tokens = options["num_bytes"] // (ranks.count * ROW_ELEMENTS * 4)
    for rows in (
        movement.large(ranks, tokens, (ROW_ELEMENTS,), np.float32, SECTION),
        gemm.measure(ranks, options["shapes"], "float32", SECTION),
    ):
        for row in rows:
            if jax.process_index() == 0:
                print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
