"""Ranks on NVIDIA GPUs: the available transports, device placement, memory shared by processes."""

from jax_cp_dispatch._ranks.gpu.peers import (
    all_ranks_here,
    gpu_attributes,
    what_pointers_lack,
    why_no_peer_access,
)
from jax_cp_dispatch._ranks.gpu.world import (
    GpuWorld,
    connect_gpus,
    connected_gpus,
    connected_slabs,
)
from jax_cp_dispatch._ranks.runtime import raise_gpu_errors

__all__ = [
    "GpuWorld",
    "all_ranks_here",
    "connect_gpus",
    "connected_gpus",
    "connected_slabs",
    "gpu_attributes",
    "raise_gpu_errors",
    "what_pointers_lack",
    "why_no_peer_access",
]
