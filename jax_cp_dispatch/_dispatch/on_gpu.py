"""Lowers an exchange between GPUs, or on one that holds all ranks: a custom call on its stream."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._dispatch.custom_call import aliases_of, attributes_of, target_of
from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._ranks.axis import rank_index
from jax_cp_dispatch._ranks.gpu import all_ranks_here, chosen_copy_path, on_collective_stream
from jax_cp_dispatch._ranks.lowering import Choice

_ALL = 0  # multiprocessors, for the handler
_MOST_SMS = 2**31 - 1  # of any GPU


def lower(ctx: Any, *operands: Any, exchange: Exchange, choice: Choice) -> Any:
    """Lowers the part of one rank."""
    ranks = choice.rank_attributes(ctx, exchange.comm, "")
    move = functools.partial(_move, ctx.avals_out, ranks, exchange)
    return mlir.lower_fun(move, multiple_results=True)(ctx, *operands)


def on_one_device(ctx: Any, exchange: Exchange) -> Callable[..., Any]:
    """Returns the exchange of a device that holds the rows of all ranks, to be traced."""
    return functools.partial(_move, ctx.avals_out, all_ranks_here(), exchange)


def _move(avals_out: Any, ranks: dict[str, Any], exchange: Exchange, *operands: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in avals_out]
    aliases = aliases_of(exchange, operands)
    move = jax.ffi.ffi_call(target_of(exchange), shapes, input_output_aliases=aliases)
    attributes = {
        **attributes_of(exchange),
        **ranks,
        "copy_path": chosen_copy_path(exchange.op),
        "num_comm_sm": np.int64(min(exchange.num_comm_sm or _ALL, _MOST_SMS)),
    }
    comm = exchange.comm
    axes = ((), ()) if exchange.is_global else (comm.axis_names, comm.group_axes)
    return on_collective_stream(functools.partial(move, **attributes))(
        *map(rank_index, axes), *operands
    )
