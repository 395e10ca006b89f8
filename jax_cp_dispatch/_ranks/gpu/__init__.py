"""Ranks on NVIDIA GPUs: the available transports, device placement, memory shared by processes."""

from jax_cp_dispatch._ranks.gpu.choice import (
    GPU_IMPLEMENTATIONS,
    choose_gpu_implementation,
    what_gpu_lacks,
)
from jax_cp_dispatch._ranks.gpu.errors import raise_gpu_errors
from jax_cp_dispatch._ranks.gpu.mover import chosen_mover
from jax_cp_dispatch._ranks.gpu.places import (
    all_ranks_here,
    gpu_attributes,
    remember_mesh,
    what_pointers_lack,
)
from jax_cp_dispatch._ranks.gpu.stream import on_collective_stream
from jax_cp_dispatch._ranks.gpu.world import GpuWorld, connect_gpus, connected_gpus

__all__ = [
    "GPU_IMPLEMENTATIONS",
    "GpuWorld",
    "all_ranks_here",
    "choose_gpu_implementation",
    "chosen_mover",
    "connect_gpus",
    "connected_gpus",
    "gpu_attributes",
    "on_collective_stream",
    "raise_gpu_errors",
    "remember_mesh",
    "what_gpu_lacks",
    "what_pointers_lack",
]
