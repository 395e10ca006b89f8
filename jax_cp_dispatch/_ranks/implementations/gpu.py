"""Between NVIDIA GPUs: of this process, and of several with one GPU each."""

import functools
import os
from collections.abc import Sequence

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Groups
from jax_cp_dispatch._ranks.gpu import connected_gpus, gpu_attributes
from jax_cp_dispatch._ranks.implementations.implementation import Implementation

_GRAPH_MODE = "xla_gpu_command_buffer_scheduling_mode"
_GRAPH_REGION = "xla_gpu_graph_enable_concurrent_region"


def _why_not(name: str, platforms: Sequence[str], groups: Groups | None) -> str | None:
    """Does not look for a GPU: programs can be lowered without one."""
    other = [platform for platform in platforms if platform != "cuda"]
    if other:
        return f"the platform is {other[0]!r}, but it serves NVIDIA GPUs"
    if runtime.cuda is None:
        return runtime.cuda_reason
    if flag := _concurrent_graphs():
        return f"XLA_FLAGS has {flag}: XLA would run calls that share a buffer at the same time"
    if name == "cuda_peer":
        if jax.process_count() > 1:
            return f"there are {jax.process_count()} processes, but it serves the GPUs of one"
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


def _transport(name: str, serves: str, *, spans_processes: bool = True) -> Implementation:
    return Implementation(
        name=name,
        platform="cuda",
        spans_processes=spans_processes,
        why_not=functools.partial(_why_not, name),
        serves=lambda: serves,
        remedy="Pass implementation='xla'.",
        rank_attributes=functools.partial(gpu_attributes, "slab" if spans_processes else "devices"),
    )


CUDA_PEER = _transport(
    "cuda_peer", "the GPUs of this process reach each other's memory", spans_processes=False
)
NVSHMEM = _transport(
    "nvshmem", "one process per GPU, over NVSHMEM: through pointers, or over the network"
)
CUDA_IPC = _transport(
    "cuda_ipc", "one process per GPU of one host, whose memory CUDA maps into all of them"
)

ON_GPU = (CUDA_PEER, NVSHMEM, CUDA_IPC)
