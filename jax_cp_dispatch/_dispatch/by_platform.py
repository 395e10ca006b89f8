"""Selects what moves the data of an exchange whose plan XLA's collectives can express."""

from collections.abc import Callable
from typing import Any

from jax import lax

from jax_cp_dispatch._ranks.implementations import IMPLEMENTATIONS, refuse_here
from jax_cp_dispatch._ranks.options import CollectiveOptions


def dispatch_or_collectives(
    exchange: CollectiveOptions,
    arrays: Any,
    by_dispatch: Callable[[Any], Any],
    by_xla: Callable[[Any], Any],
) -> Any:
    """Moves arrays by `dispatch` between CPU devices, or if a transport is named; else by XLA."""
    refuse_here(exchange.op)
    if exchange.implementation is not None:
        row = IMPLEMENTATIONS[exchange.implementation]
        return by_xla(arrays) if row.is_collectives else by_dispatch(arrays)
    return lax.platform_dependent(arrays, cpu=by_dispatch, default=by_xla)
