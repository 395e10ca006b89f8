"""The custom call of an exchange: what CPUs and GPUs read alike, and its lowering for CPUs."""

from typing import Any

import jax
import numpy as np

from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.lowering import Choice, lower_rank_and_group, prepare_cpu_devices


def target_of(exchange: Exchange) -> str:
    """Returns the name of the handler."""
    return runtime.DISPATCH_TARGET if exchange.sums is None else runtime.COMBINE_TARGET


def start_target_of(exchange: Exchange) -> str:
    """Returns the name of the handler of the first of two calls, on GPUs."""
    return f"{target_of(exchange)}_start"


def attributes_of(exchange: Exchange) -> dict[str, Any]:
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


def aliases_of(exchange: Exchange, operands: Any) -> dict[int, int]:
    """Returns which operand of the handler is the storage of which result.

    `operands` are those of the primitive; the handler's begin with rank and group.
    """
    num_storage = exchange.num_storage(operands)
    return {2 + len(operands) - num_storage + i: i for i in range(num_storage)}


def _span(values: Any) -> np.ndarray:
    return np.array(list(values), np.int64)


def lower_on_cpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Choice) -> Any:
    """Lowers the part of one rank between CPU devices."""
    prepare_cpu_devices()
    attributes = choice.rank_attributes(ctx, exchange.comm, _what(exchange))
    first, types = lower_rank_and_group(ctx, exchange.comm)
    call = jax.ffi.ffi_lowering(
        target_of(exchange), operand_output_aliases=aliases_of(exchange, operands)
    )
    types = (*types, *ctx.avals_in)
    attributes |= attributes_of(exchange)
    return call(ctx.replace(avals_in=types), *first, *operands, **attributes)


def _what(exchange: Exchange) -> str:
    """Describes the operation, and the properties of its groups that shapes do not show."""
    rows = "; ".join(f"{x.num_tokens} tokens, capacity {x.capacity}" for x in exchange.groups)
    return f"{target_of(exchange).rpartition('.')[2]} of {rows}"
