"""Lowers an exchange in two calls, or as one call at its start."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.interpreters.mlir import ir

from jax_cp_dispatch._dispatch import custom_call
from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._dispatch.primitives import combine_p, dispatch_p
from jax_cp_dispatch._ranks.implementations import (
    ON_GPU,
    Operation,
    choose_on_one_device,
    register_lowering,
)
from jax_cp_dispatch._ranks.lowering import Chosen, choose, lower_opened

register_lowering(Operation.EXCHANGE_START, custom_call.start_on_gpu, on=ON_GPU)
register_lowering(Operation.EXCHANGE_DONE, custom_call.done_on_gpu, on=ON_GPU)


def lower_start(
    ctx: Any, *operands: Any, exchange: Exchange, num_beside: int, num_held: int
) -> Any:
    """Lowers the first call; it is the whole exchange where an implementation has one call."""
    choice = _choice(ctx, exchange)
    if choice is None:
        params = {"exchange": exchange, "num_beside": num_beside, "num_held": num_held}
        return lower_opened(functools.partial(_whole, **params), ctx, *operands)
    params = {"exchange": exchange, "num_beside": num_beside}
    return choice.lower(Operation.EXCHANGE_START, ctx, *operands, **params)


def lower_done(ctx: Any, *operands: Any, exchange: Exchange) -> Any:
    """Lowers the second call; nothing is left to do after a whole exchange.

    A first call in another loop, branch or function is the whole exchange, because the runtime
    finds no second call for it.
    """
    choice = _choice(ctx, exchange)
    first, n = exchange.num_before_arrays, exchange.num_arrays
    if choice is None or not all(map(_is_result_here, operands[first : first + 2 * n])):
        return [*operands[first : first + n], *operands[first + 2 * n + 1 :]]
    return choice.lower(Operation.EXCHANGE_DONE, ctx, *operands, exchange=exchange)


def _is_result_here(value: Any) -> bool:
    """Whether a value is the result of a custom call in the block that is being lowered."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):  # an argument
        return False
    current: Any = ir.InsertionPoint.current
    return owner.name == "stablehlo.custom_call" and owner.operation.block == current.block


def _choice(ctx: Any, exchange: Exchange) -> Chosen | None:
    """Returns the implementation, if it has two calls for this program."""
    op, comm, module = exchange.op, exchange.comm, ctx.module_context
    if comm.open_axes or (exchange.is_global and module.axis_context.num_devices != 1):
        return None  # the arrays of other devices are here too, until the program is partitioned
    if custom_call.what_gpus_lack(exchange):
        return None  # the whole exchange says so
    if exchange.is_global:
        row = choose_on_one_device(op, comm.implementation, module.platforms, comm.num_ranks)
        choice = Chosen(row, None)
    else:
        choice = choose(ctx, op, comm)
    return choice if Operation.EXCHANGE_START in choice.implementation.lowerings else None


def _whole(*operands: Any, exchange: Exchange, num_beside: int, num_held: int) -> list[Any]:
    num_moving = len(operands) - num_beside
    moving, beside = operands[:num_moving], operands[num_moving:]
    primitive = dispatch_p if exchange.sums is None else combine_p
    moved = primitive.bind(*moving, exchange=exchange)
    held = jnp.zeros(num_held, jnp.float32)
    return [*moved, *moving[exchange.num_before_arrays :], held, *beside]
