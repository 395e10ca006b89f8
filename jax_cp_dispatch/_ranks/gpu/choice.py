"""Chooses the transport of a program for GPUs, and says why the others cannot serve."""

import os
from collections.abc import Sequence

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu.world import connected_gpus

_GRAPH_MODE = "xla_gpu_command_buffer_scheduling_mode"
_GRAPH_REGION = "xla_gpu_graph_enable_concurrent_region"

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
    if flag := _concurrent_graphs():
        return f"XLA_FLAGS has {flag}: XLA would run calls that share a buffer at the same time"
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


def _concurrent_graphs() -> str | None:
    """Returns the flag by which recorded calls may run at the same time, if it is set.

    XLA then orders the calls of a command buffer by their operands only. Compiler options of a
    single program have the same effect but are not seen here.
    """
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.lstrip("-").partition("=")
        if name == _GRAPH_MODE and value.upper().startswith("CONCURRENT"):
            return flag
        if name == _GRAPH_REGION and value.lower() in ("", "true", "1"):
            return flag
    return None


def choose_gpu_implementation(platforms: Sequence[str]) -> tuple[str | None, str]:
    """Returns the first transport that can serve and why; or None and what the likeliest needs."""
    lacks = {name: what_gpu_lacks(name, platforms) for name in GPU_IMPLEMENTATIONS}
    for name, missing in lacks.items():
        if missing is None:
            return name, GPU_IMPLEMENTATIONS[name]
    return None, str(lacks["nvshmem" if jax.process_count() > 1 else "cuda_peer"])
