"""Connects GPUs of several processes, names missing ranks, raises errors that GPUs report late."""

from jax_cp_dispatch._ranks.gpu import GpuWorld, connect_gpus
from jax_cp_dispatch._ranks.gpu_waits import WaitingCall, waiting_calls
from jax_cp_dispatch._ranks.runtime import check_before_save, raise_gpu_errors

__all__ = [
    "GpuWorld",
    "WaitingCall",
    "check_before_save",
    "connect_gpus",
    "raise_gpu_errors",
    "waiting_calls",
]
