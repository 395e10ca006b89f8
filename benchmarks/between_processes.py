"""Movement and GEMMs between processes of this host, started by the launcher.

This file is also the program that they run.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence

import jax
import numpy as np

from jax_cp_dispatch import initialize
from jax_cp_dispatch.tools import bench
from jax_cp_dispatch.tools.programs import Ranks, Shape

ROW_ELEMENTS = 2048  # of float32: rows of 8 kB
_LIMIT = 300  # seconds


def measure(
    processes: int,
    num_bytes: int,
    shapes: Sequence[Shape],
    repeats: int,
    methods: Mapping[str, Sequence[str]],
) -> Generator[bench.Row, None, None]:
    """Starts the processes, with one device each, and yields the rows of the first as they come.

    Measures an exchange of `num_bytes`, unless 0, and GEMMs of these shapes by these methods.

    Raises:
      RuntimeError: they failed, or did not end in time.
    """
    options = {"num_bytes": num_bytes, "shapes": shapes, "repeats": repeats}
    arguments = json.dumps(options | {"methods": dict(methods)})
    launch = ["-m", "jax_cp_dispatch.launch", f"--processes={processes}", "--grace=5", __file__]
    program = [sys.executable, *launch, arguments]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=said, text=True) as launcher,
    ):
        clock = threading.Timer(_LIMIT, launcher.terminate)
        clock.start()
        try:
            for line in launcher.stdout or ():
                if line.startswith("[0] {"):
                    yield json.loads(line.removeprefix("[0] "))
            code, in_time = launcher.wait(), clock.is_alive()
        finally:  # also after Ctrl-C
            clock.cancel()
            launcher.terminate()  # it ends its processes
            launcher.wait()
        if not in_time:
            raise RuntimeError(f"{processes} processes did not end within {_LIMIT} s.")
        if code:
            said.seek(0)
            last = (said.read() or "nothing").strip().splitlines()[-1]
            raise RuntimeError(f"{processes} processes ended with {code}: {last}")


def main() -> None:
    initialize()
    options = json.loads(sys.argv[1])
    ranks = Ranks.of_devices(jax.device_count(), options["repeats"])
    tokens = options["num_bytes"] // (ranks.count * ROW_ELEMENTS * 4)
    for rows in (
        bench.movement(ranks, tokens, (ROW_ELEMENTS,), np.float32) if tokens else (),
        bench.gemms(ranks, options["shapes"], "float32", options["methods"]),
    ):
        for row in rows:
            if jax.process_index() == 0:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
