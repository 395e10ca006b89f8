"""Moving tokens between ranks: the public calls, their primitives, and what implements them."""

from jax_cp_dispatch.dispatch.api import combine, combine_qkv, dispatch, dispatch_qkv
from jax_cp_dispatch.dispatch.buffers import (
    DEFAULT_DEADLINE,
    DispatchBuffer,
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
    grow_dispatch_buffer,
    list_dispatch_buffers,
)
from jax_cp_dispatch.dispatch.checks import check_axis_name, check_mesh
from jax_cp_dispatch.dispatch.exchange import AxisName, check_deadline, move, outgoing, returning
from jax_cp_dispatch.dispatch.implementations import (
    Implementation,
    available_implementations,
    check_implementation,
)
from jax_cp_dispatch.dispatch.placement import find_mesh, is_traced

__all__ = [
    "DEFAULT_DEADLINE",
    "AxisName",
    "DispatchBuffer",
    "Implementation",
    "available_implementations",
    "check_axis_name",
    "check_deadline",
    "check_implementation",
    "check_mesh",
    "combine",
    "combine_qkv",
    "create_dispatch_buffer",
    "destroy_all_dispatch_buffers",
    "destroy_dispatch_buffer",
    "dispatch",
    "dispatch_qkv",
    "find_mesh",
    "grow_dispatch_buffer",
    "is_traced",
    "list_dispatch_buffers",
    "move",
    "outgoing",
    "returning",
]
