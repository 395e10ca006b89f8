"""Moves tokens between ranks: the public calls, their primitives and implementations."""

from jax_cp_dispatch._dispatch.api import combine, combine_qkv, dispatch, dispatch_qkv
from jax_cp_dispatch._dispatch.buffers import (
    DispatchBuffer,
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
    grow_dispatch_buffer,
    list_dispatch_buffers,
)
from jax_cp_dispatch._dispatch.exchange import move, outgoing, returning

__all__ = [
    "DispatchBuffer",
    "combine",
    "combine_qkv",
    "create_dispatch_buffer",
    "destroy_all_dispatch_buffers",
    "destroy_dispatch_buffer",
    "dispatch",
    "dispatch_qkv",
    "grow_dispatch_buffer",
    "list_dispatch_buffers",
    "move",
    "outgoing",
    "returning",
]
