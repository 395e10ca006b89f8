"""Exchanges of large rows between processes on one GPU, with delays: each row is checked.

    python tests/gpu/stress_processes.py --processes 8 --rounds 500 --megabytes 64
    python tests/gpu/stress_processes.py --rounds 40 --fault EXTENSION

The processes run under MPS, so that their kernels run at the same time; without it, they take
turns. Each runs `test_large_exchanges` of several_gpus.py, or the test that `--test` names.

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

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))

import launched
from planted_fault import package_with

LARGE = "test_large_exchanges"


@contextlib.contextmanager
def mps():
    """Runs MPS for the processes that are started inside; yields whether it runs."""
    with tempfile.TemporaryDirectory() as folder:
        places = {f"CUDA_MPS_{name}_DIRECTORY": folder for name in ("PIPE", "LOG")}
        # The processes share the GPU's hardware queues.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "2")
        os.environ.update(places)
        control = ["nvidia-cuda-mps-control"]
        try:
            subprocess.run([*control, "-d"], check=True, timeout=20)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"without MPS: {error}", flush=True)
            for name in places:
                del os.environ[name]
            yield False
            return
        try:
            yield True
        finally:
            subprocess.run(control, input="quit\n", text=True, timeout=20, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--megabytes", type=int, default=64, help="rows of each process")
    parser.add_argument("--test", default=LARGE, help="of several_gpus.py, on one GPU")
    parser.add_argument("--fault", default="", help="an extension of planted_fault.py")
    options = parser.parse_args()
    sizes = f"{options.rounds},{options.megabytes},{int(bool(options.fault))}"
    with mps() as has_mps, tempfile.TemporaryDirectory() as folder:
        if options.test != LARGE and not has_mps:
            sys.exit(f"{options.test} needs kernels of several processes at the same time")
        if options.fault:
            os.environ["PYTHONPATH"] = package_with(options.fault, pathlib.Path(folder))
        codes, outputs = launched.run(
            pathlib.Path(__file__).with_name("several_gpus.py"),
            options.processes,
            "cuda_ipc",
            options.test,
            f"--sizes={sizes}",
            slab=(8 * options.megabytes) << 20,
            fraction=".06",
        )
    print(launched.printed(codes, outputs))
    right = "all over cuda_ipc: ok"
    if options.test == LARGE:
        right = f"{options.rounds} rounds, 0 wrong rows, 0 errors"
    is_right = [right in out for out in outputs]
    if options.fault:  # all wrote how many they found, and some found it
        sys.exit(not all("wrong rows" in out for out in outputs) or all(is_right))
    sys.exit(any(codes) or not all(is_right))


if __name__ == "__main__":
    main()
