"""Connects GPUs of several processes, and raises errors that a GPU reports late."""

from jax_cp_dispatch._ranks.gpu import GpuWorld, connect_gpus
from jax_cp_dispatch._ranks.runtime import raise_gpu_errors

__all__ = ["GpuWorld", "connect_gpus", "raise_gpu_errors"]
