"""The implementations of exchanges and GEMMs: one object each, in one table."""

from jax_cp_dispatch._ranks.implementations.cpu import IN_PROCESS, ON_CPU, SHARED_MEMORY
from jax_cp_dispatch._ranks.implementations.gpu import CUDA_IPC, CUDA_PEER, NVSHMEM, ON_GPU
from jax_cp_dispatch._ranks.implementations.implementation import Implementation, Operation
from jax_cp_dispatch._ranks.implementations.table import (
    IMPLEMENTATIONS,
    Availability,
    available_implementations,
    check_groups,
    check_implementation,
    choose_implementation,
    choose_on_one_device,
    default_platform,
    fall_back_to_xla,
    moves_beside_work,
    program_platform,
    refuse_here,
    register_lowering,
)
from jax_cp_dispatch._ranks.implementations.xla import XLA

__all__ = [
    "CUDA_IPC",
    "CUDA_PEER",
    "IMPLEMENTATIONS",
    "IN_PROCESS",
    "NVSHMEM",
    "ON_CPU",
    "ON_GPU",
    "SHARED_MEMORY",
    "XLA",
    "Availability",
    "Implementation",
    "Operation",
    "available_implementations",
    "check_groups",
    "check_implementation",
    "choose_implementation",
    "choose_on_one_device",
    "default_platform",
    "fall_back_to_xla",
    "moves_beside_work",
    "program_platform",
    "refuse_here",
    "register_lowering",
]
