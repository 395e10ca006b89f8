"""Starts programs that use GPUs, in one process or in several, and keeps what they print."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time

from jax_cp_dispatch._ranks import runtime

# Seconds for all processes, less than a test has; a waiting call ends before.
LIMIT = float(os.environ.get("JAX_CP_DISPATCH_PROCESS_LIMIT", "30"))


def num_gpus():
    return runtime.cuda.device_count()[0] if runtime.cuda else 0


def run(program, num_processes, transport, *arguments, pointers=True, slab=64 << 20, fraction=".1"):
    """Returns each process's exit status, None past the limit, and its output.

    Args:
      program: its arguments are the coordinator's address, the number of processes and the index of
        one, then `arguments`; none of the first three if there is one process.
      transport: cuda_ipc or nvshmem; None for one process.
      pointers: whether NVSHMEM uses pointers, not puts and gets.
      slab: bytes of each process for its channels.
      fraction: of a GPU's memory for each process's JAX.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda",
        "PYTHONUNBUFFERED": "1",
        **({"JAX_CP_DISPATCH_GPU_TRANSPORT": transport} if transport else {}),
        "JAX_CP_DISPATCH_GPU_POINTERS": str(int(pointers)),
        "JAX_CP_DISPATCH_SYMMETRIC_BYTES": str(slab),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction,
        "NVSHMEM_REMOTE_TRANSPORT": "none",
    }
    job = [[address, str(num_processes), str(process)] for process in range(num_processes)]
    codes, outputs = [], []
    with contextlib.ExitStack() as stack:
        # Files, not pipes: they keep the output of a process that never ends.
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in job]
        workers = [
            subprocess.Popen(
                [sys.executable, program, *(place if num_processes > 1 else ()), *arguments],
                env=environment, stdout=file, stderr=subprocess.STDOUT,
            )
            for place, file in zip(job, files, strict=True)
        ]  # fmt: skip
        end = time.monotonic() + LIMIT
        try:
            for worker in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(max(0.0, end - time.monotonic()))
            codes = [worker.poll() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        for file in files:
            file.seek(0)
            outputs.append(file.read().decode(errors="replace"))
    return codes, outputs


def printed(codes, outputs):
    return "\n".join(
        f"--- process {process}: {f'not over after {LIMIT} s' if code is None else code}\n{output}"
        for process, (code, output) in enumerate(zip(codes, outputs, strict=True))
    )
