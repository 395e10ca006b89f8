"""Chooses the transport of a program for GPUs, and says why the others cannot serve."""

from collections.abc import Sequence

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu.world import connected_gpus

GPU_IMPLEMENTATIONS = {
    "cuda_peer": "the GPUs of this process reach each other's memory",
    "nvshmem": "one process per GPU, over NVSHMEM: through pointers, or over the network",
    "cuda_ipc": "one process per GPU of one host, whose memory CUDA maps into all of them",
}
"""What each transport serves, by name; preferred ones first."""


def what_gpu_lacks(name: str, platforms: Sequence[str]) -> str | None:
    """Returns why transport `name` cannot serve a program lowered for `platforms`, or None.

    Does not check for a GPU: programs can be lowered without one.
    """
    other = [platform for platform in platforms if platform != "cuda"]
    if other:
        return f"the platform is {other[0]!r}, and it serves NVIDIA GPUs"
    if runtime.cuda is None:
        return runtime.cuda_reason
    if name == "cuda_peer":
        if jax.process_count() > 1:
            return f"there are {jax.process_count()} processes, and it serves the GPUs of one"
        return None
    if jax.process_count() == 1:
        return "there is one process"
    world = connected_gpus()
    if world is None:
        return "jax_cp_dispatch.gpu.connect_gpus() has not been called in this process"
    return None if world.implementation == name else world.reason


def choose_gpu_implementation(platforms: Sequence[str]) -> tuple[str | None, str]:
    """Returns the first transport that can serve and why; or None and what the likeliest needs."""
    lacks = {name: what_gpu_lacks(name, platforms) for name in GPU_IMPLEMENTATIONS}
    for name, missing in lacks.items():
        if missing is None:
            return name, GPU_IMPLEMENTATIONS[name]
    return None, str(lacks["nvshmem" if jax.process_count() > 1 else "cuda_peer"])
