"""Moves tokens between ranks: the public calls, their primitives and implementations."""

from jax_cp_dispatch._dispatch.arguments import Argument, outgoing, returning
from jax_cp_dispatch._dispatch.buffers import (
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
)
from jax_cp_dispatch._dispatch.movement import (
    combine,
    combine_qkv,
    combine_start,
    dispatch,
    dispatch_qkv,
    dispatch_start,
    exchange_done,
    move,
    start,
)
from jax_cp_dispatch._dispatch.primitives import name_of_transpose
from jax_cp_dispatch._dispatch.ragged_all_to_all import ragged_all_to_all

__all__ = [
    "Argument",
    "combine",
    "combine_qkv",
    "combine_start",
    "create_dispatch_buffer",
    "destroy_all_dispatch_buffers",
    "destroy_dispatch_buffer",
    "dispatch",
    "dispatch_qkv",
    "dispatch_start",
    "exchange_done",
    "move",
    "name_of_transpose",
    "outgoing",
    "ragged_all_to_all",
    "returning",
    "start",
]
