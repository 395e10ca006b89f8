"""Looks for races between processes on one GPU: exchanges under MPS, with delays, row by row.

    python tests/gpu/races.py [--processes 8] [--limit 90] [--mutant FILE] [--output FILE]

Without MPS, processes take turns on a GPU and never race; if it does not start, that is said. Three
groups of processes, one after another: channels in the GPU's memory; channels in pinned memory of
the host; and, if `--mutant` names one of build_mutant.py, an extension that signals before its rows
are there. Fails if one of the first two finds a row that is wrong, or if the last finds none: then
the test could not have found a race.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

WORKER = pathlib.Path(__file__).with_name("races_worker.py")
_DAEMON = "nvidia-cuda-mps-control"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds in all")
    parser.add_argument("--rounds", type=int, default=500, help="of each group, at most")
    parser.add_argument("--megabytes", type=int, default=64, help="of rows of each process")
    parser.add_argument("--mutant", default="", help="an extension _cuda with a fault")
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    return parser.parse_args()


@contextlib.contextmanager
def mps() -> Iterator[tuple[dict[str, str], str]]:
    """Yields the environment of MPS and what to say of it; changes no setting of the GPU."""
    if shutil.which(_DAEMON) is None:
        yield {}, f"MPS: no {_DAEMON}; the processes take turns"
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: f"{folder}/{name}" for name in ("pipe", "log")}
        for path in paths.values():
            os.mkdir(path)
        own = {
            "CUDA_MPS_PIPE_DIRECTORY": paths["pipe"],
            "CUDA_MPS_LOG_DIRECTORY": paths["log"],
        }
        environment = {**os.environ, **own}
        run = lambda *arguments, **options: subprocess.run(
            [_DAEMON, *arguments],
            env=environment, capture_output=True, text=True, timeout=20, **options,
        )  # fmt: skip
        started = run("-d")
        if started.returncode:
            said = (started.stderr or started.stdout).strip()
            yield {}, f"MPS did not start ({said}); the processes take turns"
            return
        try:
            yield own, "MPS"
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run(input="quit\n")


def group(name: str, options: argparse.Namespace, limit: float, environment, *more: str) -> Any:
    """Runs one group of processes; returns what was found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    slab = (10 * options.megabytes + 64) << 20
    all_of_them = {
        **os.environ,
        **environment,
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu" if on_cpu else "cuda",
        "JAX_CP_DISPATCH_GPU_TRANSPORT": "cuda_ipc",
        "JAX_CP_DISPATCH_SYMMETRIC_BYTES": str(slab),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".07",
        "XLA_FLAGS": "" if on_cpu else "--xla_gpu_autotune_level=0",
    }
    command = [sys.executable, str(WORKER), address, str(options.processes)]
    end = time.monotonic() + limit
    said = [f"--rounds={options.rounds}", f"--seconds={max(2.0, limit - 25):.0f}"]
    said += [f"--megabytes={options.megabytes}", *more]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(options.processes)]
        workers = []
        for process, file in enumerate(files):
            worker = subprocess.Popen(
                [*command, str(process), *said],
                env=all_of_them, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, end - time.monotonic()))
        codes = [worker.poll() for worker in workers]
        for worker in workers:
            worker.kill()
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read().decode(errors="replace"))
    results = [
        json.loads(line.removeprefix("result "))
        for output in outputs
        for line in output.splitlines()
        if line.startswith("result ")
    ]
    row = {
        "group": name,
        "processes": options.processes,
        "finished": len(results),
        "rounds": min((one["rounds"] for one in results), default=0),
        "seconds": max((one["seconds"] for one in results), default=0.0),
        "mismatches": sum(one["mismatches"] for one in results),
        "errors": sum(one["errors"] for one in results),
    }
    print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    errors = sorted({one["error"] for one in results if one["error"]})
    print(*(f"  error: {error}" for error in errors[:3]), sep="\n", flush=True)
    if len(results) < options.processes:
        for process, (code, output) in enumerate(zip(codes, outputs, strict=True)):
            if "result " not in output:
                print(f"--- process {process}: {code}", *output.splitlines()[-12:], sep="\n")
    return row


def main() -> None:
    options = parse()
    end = time.monotonic() + options.limit
    groups: list[tuple[str, list[str]]] = [
        ("memory of the GPU", []),
        ("pinned memory of the host", ["--host-memory"]),
    ]
    if os.environ.get("JAX_PLATFORMS") == "cpu":  # a rehearsal, through shared memory
        groups = groups[:1]
    if options.mutant:
        groups.append(("mutant", [f"--extension={options.mutant}", "--rounds=40"]))
    rows = []
    with mps() as (environment, how):
        print(how, flush=True)
        for number, (name, more) in enumerate(groups):
            left = end - time.monotonic()
            limit = max(10.0, left / (len(groups) - number))
            rows.append(group(name, options, limit, environment, *more) | {"mps": how})
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [
        row["group"]
        for row in rows
        if row["group"] != "mutant"
        and (row["mismatches"] or row["errors"] or row["finished"] < row["processes"])
    ]
    if wrong:
        sys.exit(f"rows are wrong, or processes did not end: {', '.join(wrong)}")
    for row in rows:
        if row["group"] == "mutant" and not (row["mismatches"] or row["errors"]):
            sys.exit("the mutant was not found: this run could not have found a race")
    print("ok")


if __name__ == "__main__":
    main()
