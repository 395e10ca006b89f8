"""Registered buffers of `dispatch` and of overlapped GEMMs: created, listed, destroyed by id."""

from jax_cp_dispatch._dispatch import (
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
)
from jax_cp_dispatch.comm_gemm import (
    CommOverlapBuffer,
    CommOverlapConfig,
    CommOverlapMethod,
    CommOverlapType,
    comm_overlap_buffer_bytes,
    create_comm_overlap_buffer,
    destroy_all_comm_overlap_buffers,
    destroy_comm_overlap_buffer,
    list_comm_overlap_buffers,
)

__all__ = [
    "CommOverlapBuffer",
    "CommOverlapConfig",
    "CommOverlapMethod",
    "CommOverlapType",
    "comm_overlap_buffer_bytes",
    "create_comm_overlap_buffer",
    "create_dispatch_buffer",
    "destroy_all_comm_overlap_buffers",
    "destroy_all_dispatch_buffers",
    "destroy_comm_overlap_buffer",
    "destroy_dispatch_buffer",
    "list_comm_overlap_buffers",
]
