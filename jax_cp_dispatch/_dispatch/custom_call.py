"""The custom call of an exchange: what CPUs and GPUs read alike, and its lowering for CPUs."""

import functools
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.lowering import Chosen, prepare_cpu_devices, rank_and_group


def handler_name(exchange: Exchange) -> str:
    """Returns the name of the handler."""
    return runtime.DISPATCH_TARGET if exchange.sums is None else runtime.COMBINE_TARGET


def start_handler_name(exchange: Exchange) -> str:
    """Returns the name of the handler of the first of two calls, on GPUs."""
    return f"{handler_name(exchange)}_start"


def handler_attributes(exchange: Exchange) -> dict[str, Any]:
    """Returns what a handler reads besides the places of the ranks."""
    groups = exchange.groups
    return {
        "op": exchange.op,
        **exchange.comm.attributes(),
        "capacity_names": ",".join(group.capacity_name for group in groups),
        "has_src_offset": _span(group.has_src_offset for group in groups),
        "has_fingerprint": _span(group.has_fingerprint for group in groups),
        "num_arrays": _span(group.num_arrays for group in groups),
        "num_tokens": _span(group.num_tokens for group in groups),
        "capacity": _span(group.capacity for group in groups),
        "buffer": _span(group.buffer for group in groups),
    }


def storage_aliases(exchange: Exchange, operands: Any) -> dict[int, int]:
    """Returns which operand of the handler is the storage of which result.

    `operands` are those of the primitive; the handler's begin with rank and group.
    """
    num_storage = exchange.num_storage(operands)
    return {2 + len(operands) - num_storage + i: i for i in range(num_storage)}


def _span(values: Any) -> np.ndarray:
    return np.array(list(values), np.int64)


def call_handler(
    avals_out: Any, exchange: Exchange, attributes: dict[str, Any], *operands: Any
) -> list[Any]:
    """Makes the call; `operands` are those of the primitive."""
    handler = jax.ffi.ffi_call(
        handler_name(exchange),
        like(avals_out),
        input_output_aliases=storage_aliases(exchange, operands),
    )
    return list(handler(*places(exchange), *operands, **attributes))


def places(exchange: Exchange) -> list[Any]:
    """Returns the device's rank and group, the first operands; 0 if one device holds all ranks."""
    return rank_and_group(Communicator() if exchange.is_global else exchange.comm)


def like(avals: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes alone."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def lower_on_cpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank between CPU devices."""
    prepare_cpu_devices()
    ranks = choice.rank_attributes(ctx, exchange.comm, _what(exchange))
    attributes = handler_attributes(exchange) | ranks
    call = functools.partial(call_handler, ctx.avals_out, exchange, attributes)
    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _what(exchange: Exchange) -> str:
    """Describes the operation, and the properties of its groups that shapes do not show."""
    rows = "; ".join(f"{x.num_tokens} tokens, capacity {x.capacity}" for x in exchange.groups)
    return f"{handler_name(exchange).rpartition('.')[2]} of {rows}"
