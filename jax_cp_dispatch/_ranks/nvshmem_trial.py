"""Starts NVSHMEM in a child of each process first, because it ends a process in which it fails.

This file is also the program of the child, which needs neither JAX nor this package.
"""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

_SECONDS = 90.0  # for the children of all processes
_SLAB_BYTES, _HEAP_BYTES = 1 << 20, 64 << 20
_ADVICE = "set NVSHMEM_DEBUG=INFO for details, or JAX_CP_DISPATCH_GPU_TRANSPORT=nvshmem to skip it"


def why_nvshmem_ends(job: Any, extension: str, library: str) -> str:
    """Returns why NVSHMEM does not start in the children; "" if it does, in all of them.

    All processes of the job, a `GpuJob`, call this. `extension` is the file of `_nvshmem`, and
    `library`, if not "", that of NVSHMEM's library, which is opened before it.
    """
    end = time.monotonic() + _SECONDS
    common = [sys.executable, __file__, extension, library]
    common += map(str, (job.process, len(job.hosts), job.device))
    environment = {**os.environ, "NVSHMEM_SYMMETRIC_SIZE": str(_HEAP_BYTES)}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        output = stack.enter_context(open(folder / "output", "wb"))

        def start(world: str) -> subprocess.Popen[bytes]:
            child = subprocess.Popen(
                [*common, world], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(lambda: (child.kill(), child.wait()))
            return child

        child = start(str(folder / "id")) if job.process == 0 else None
        world = job.publish("nvshmem_trial_id", child and _read_id(folder / "id", child, end))[0]
        child = child or (start(world) if world else None)
        reason = _ended(child, folder / "output", end) if child else ""
    failed = job.publish("nvshmem_trial", reason)
    return next((f"process {p}: {why}" for p, why in enumerate(failed) if why), "")


def _read_id(file: pathlib.Path, child: subprocess.Popen[bytes], end: float) -> str:
    """Returns the id of the world that the child makes; "" if it makes none."""
    while not file.exists():
        if child.poll() is not None or time.monotonic() > end:
            return ""
        time.sleep(0.02)
    return file.read_text()


def compute_modes() -> list[str]:
    """Returns the compute mode of each GPU of this host; none if nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []


def _ended(child: subprocess.Popen[bytes], output: pathlib.Path, end: float) -> str:
    try:
        code = child.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"NVSHMEM did not start in a child process within {_SECONDS:g} s; {_ADVICE}"
    if code == 0:
        return ""
    if "Exclusive_Process" in compute_modes():
        return (
            f"a child process cannot try NVSHMEM (it ended with {code}): a GPU is in compute mode "
            "EXCLUSIVE_PROCESS, which lets one process use it; run nvidia-smi "
            "--compute-mode=DEFAULT, or set JAX_CP_DISPATCH_GPU_TRANSPORT=nvshmem to skip the trial"
        )
    last = (output.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    return f"NVSHMEM ended the child process that tried it, with {code}: {last}; {_ADVICE}"


def main() -> None:
    """Starts NVSHMEM, and allocates memory that all processes reach."""
    extension, library, process, num_processes, device, world = sys.argv[1:]
    if library:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    spec: Any = importlib.util.spec_from_file_location("_nvshmem", extension)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if process == "0":
        unique_id = module.unique_id()
        whole = pathlib.Path(f"{world}.part")
        whole.write_text(unique_id.hex())
        whole.rename(world)
    else:
        unique_id = bytes.fromhex(world)
    module.start(int(process), int(num_processes), unique_id, int(device))
    module.make_slab(_SLAB_BYTES)
    os._exit(0)  # without NVSHMEM's own end, which waits for the others


if __name__ == "__main__":
    main()
