"""Lowers an exchange between CPU devices: a custom call of this package."""

from typing import Any

import jax

from jax_cp_dispatch._dispatch.custom_call import aliases_of, attributes_of, target_of
from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._ranks.lowering import Choice, lower_rank_and_group, prepare_cpu_devices


def lower(ctx: Any, *operands: Any, exchange: Exchange, choice: Choice) -> Any:
    """Lowers the part of one rank."""
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
