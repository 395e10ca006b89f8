"""Between NVIDIA GPUs: of this process, and of several with one GPU each."""

import functools
import os
from collections.abc import Sequence

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Groups
from jax_cp_dispatch._ranks.gpu import (
    connected_gpus,
    connected_slabs,
    gpu_attributes,
    why_no_peer_access,
)
from jax_cp_dispatch._ranks.implementations.implementation import (
    Implementation,
    all_groups,
    process_numbers,
    why_not_one_process,
)

MAX_RANKS = 64
"""As in csrc/kernels/call.h: ranks are bits of a word."""

_GRAPH_MODE = "xla_gpu_command_buffer_scheduling_mode"
_GRAPH_REGION = "xla_gpu_graph_enable_concurrent_region"


def _why_not_cuda(platforms: Sequence[str]) -> str | None:
    """Does not look for a GPU: programs can be lowered without one."""
    other = [platform for platform in platforms if platform != "cuda"]
    if other:
        return f"the platform is {other[0]!r}, but it serves NVIDIA GPUs"
    if runtime.cuda is None:
        return runtime.cuda_reason
    if flag := _concurrent_graphs():
        return f"XLA_FLAGS has {flag}: XLA would run calls that share a buffer at the same time"
    return None


def _why_too_many(groups: Groups | None) -> str | None:
    most = max(map(len, all_groups(groups)), default=0)
    if most <= MAX_RANKS:
        return None
    return f"there are {most} ranks, but a call on GPUs takes at most {MAX_RANKS}"


def _why_not_in_one_process(platforms: Sequence[str], groups: Groups | None) -> str | None:
    return (
        _why_not_cuda(platforms)
        or why_not_one_process(groups)
        or _why_too_many(groups)
        or why_no_peer_access(all_groups(groups))
    )


def _why_not_connected(name: str, platforms: Sequence[str], groups: Groups | None) -> str | None:
    missing = _why_not_cuda(platforms)
    if missing is not None:
        return missing
    if jax.process_count() == 1:
        return "there is one process"
    world = connected_gpus()
    if world is None:
        return "jax_cp_dispatch.gpu.connect_gpus() has not been called in this process"
    slabs = connected_slabs()
    if slabs is not None and slabs.transport != name:
        return f"{slabs.transport} connects the processes: {world.reason}"
    if slabs is None or not all(map(slabs.reach, map(process_numbers, all_groups(groups)))):
        return world.reason
    return _why_too_many(groups)


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


_REMEDY = "Pass implementation='xla'."

CUDA_PEER = Implementation(
    name="cuda_peer",
    platform="cuda",
    spans_processes=False,
    why_not=_why_not_in_one_process,
    serves=lambda: "the GPUs of this process reach each other's memory",
    remedy=_REMEDY,
    rank_attributes=functools.partial(gpu_attributes, "devices"),
)

NVSHMEM = Implementation(
    name="nvshmem",
    platform="cuda",
    spans_processes=True,
    why_not=functools.partial(_why_not_connected, "nvshmem"),
    serves=lambda: "one process per GPU, over NVSHMEM: through pointers, or over the network",
    remedy=_REMEDY,
    rank_attributes=functools.partial(gpu_attributes, "slab"),
)

CUDA_IPC = Implementation(
    name="cuda_ipc",
    platform="cuda",
    spans_processes=True,
    why_not=functools.partial(_why_not_connected, "cuda_ipc"),
    serves=lambda: "one process per GPU of one host, whose memory CUDA maps into all of them",
    remedy=_REMEDY,
    rank_attributes=functools.partial(gpu_attributes, "slab"),
)

ON_GPU = (CUDA_PEER, NVSHMEM, CUDA_IPC)
