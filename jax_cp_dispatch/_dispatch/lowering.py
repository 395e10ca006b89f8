"""Lowers an exchange: opens its axes, splits arrays of all ranks, and chooses an implementation.

No side effect is declared: all devices of a program run one executable, so a call is removed,
merged or hoisted on all of them alike.
"""

import functools
from typing import Any

from jax.extend.core import Primitive

from jax_cp_dispatch._dispatch import by_xla, custom_call
from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._dispatch.partitioning import (
    lower_partitioned,
    on_every_device,
)
from jax_cp_dispatch._ranks.implementations import (
    ON_CPU,
    ON_GPU,
    XLA,
    Operation,
    choose_on_one_device,
    fall_back_to_xla,
    register_lowering,
)
from jax_cp_dispatch._ranks.lowering import choose, fall_back, lower_opened

register_lowering(Operation.EXCHANGE, custom_call.lower_on_cpu, on=ON_CPU)
register_lowering(Operation.EXCHANGE, custom_call.lower_on_gpu, on=ON_GPU)
register_lowering(Operation.EXCHANGE, by_xla.lower, on=[XLA])
register_lowering(Operation.EXCHANGE_ON_ONE_DEVICE, custom_call.on_one_gpu, on=ON_GPU)
register_lowering(Operation.EXCHANGE_ON_ONE_DEVICE, by_xla.on_one_device, on=[XLA])


def lower(primitive: Primitive, ctx: Any, *operands: Any, exchange: Exchange) -> Any:
    """Lowers both primitives."""
    op, comm = exchange.op, exchange.comm
    if comm.open_axes:
        opened = functools.partial(_opened, primitive, exchange=exchange)
        return lower_opened(opened, ctx, *operands)
    if exchange.is_global:
        implementation = choose_on_one_device(
            op, comm.implementation, ctx.module_context.platforms, comm.num_ranks
        )
        if implementation in ON_GPU and (missing := custom_call.what_gpus_lack(exchange)):
            implementation = fall_back_to_xla(op, comm.implementation, missing)
        on_one_device = implementation.lowerings[Operation.EXCHANGE_ON_ONE_DEVICE]
        return lower_partitioned(
            primitive, ctx, *operands, exchange=exchange, on_one_device=on_one_device(ctx, exchange)
        )
    choice = choose(ctx, op, comm)
    if choice.implementation in ON_GPU and (missing := custom_call.what_gpus_lack(exchange)):
        choice = fall_back(choice, op, comm, missing)
    return choice.lower(Operation.EXCHANGE, ctx, *operands, exchange=exchange)


def _opened(primitive: Primitive, *operands: Any, exchange: Exchange) -> Any:
    """Runs each device's part inside a `shard_map` over the axes that are not manual yet."""

    def on_rank(mesh):
        local = exchange.inside(mesh)
        return lambda *moved: primitive.bind(*moved, exchange=local)

    return on_every_device(on_rank, operands, exchange)
