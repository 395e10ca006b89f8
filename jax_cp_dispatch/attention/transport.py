"""Selects what moves the data of an exchange whose plan XLA's collectives can express."""

from collections.abc import Callable
from typing import Any

from jax import lax

from jax_cp_dispatch._ranks.deadline import check_deadline
from jax_cp_dispatch._ranks.implementations import check_implementation
from jax_cp_dispatch.attention.options import ExchangeOptions


def dispatch_or_collectives(
    exchange: ExchangeOptions,
    arrays: Any,
    by_dispatch: Callable[[Any], Any],
    by_xla: Callable[[Any], Any],
) -> Any:
    """Moves arrays by `dispatch` between CPU devices, or if a transport is named; else by XLA."""
    check_implementation(exchange.op, exchange.implementation)
    check_deadline(exchange.op, exchange.deadline)
    if exchange.implementation == "xla":
        return by_xla(arrays)
    if exchange.implementation is not None:
        return by_dispatch(arrays)
    return lax.platform_dependent(arrays, cpu=by_dispatch, default=by_xla)
