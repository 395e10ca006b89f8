"""Starts programs that use GPUs, in one process or in several, and keeps what they print."""

import os

from inner import gpus_here
from launching import free_address, run_job

# Seconds for all processes, less than a test has; a waiting call ends before.
LIMIT = float(os.environ.get("JAX_CP_DISPATCH_PROCESS_LIMIT", "30"))


def num_gpus():
    return gpus_here()[0]


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
    environment = {
        "JAX_PLATFORMS": "cuda",
        "PYTHONUNBUFFERED": "1",
        **({"JAX_CP_DISPATCH_GPU_TRANSPORT": transport} if transport else {}),
        "JAX_CP_DISPATCH_GPU_POINTERS": str(int(pointers)),
        "JAX_CP_DISPATCH_SYMMETRIC_BYTES": str(slab),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction,
        "NVSHMEM_REMOTE_TRANSPORT": "none",
    }
    address, processes = free_address(), range(num_processes)
    places = [
        (address, num_processes, process) if num_processes > 1 else () for process in processes
    ]
    codes, said = run_job([(program, *place, *arguments) for place in places], environment, LIMIT)
    return codes, ["".join(of_process) for of_process in said]


def printed(codes, outputs):
    return "\n".join(
        f"--- process {process}: {f'not over after {LIMIT} s' if code is None else code}\n{output}"
        for process, (code, output) in enumerate(zip(codes, outputs, strict=True))
    )
