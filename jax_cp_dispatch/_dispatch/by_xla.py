"""Lowers an exchange to XLA's collectives, or to gathers on a device that holds all ranks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.dtypes import canonicalize_dtype
from jax.interpreters import mlir

from jax_cp_dispatch._dispatch.exchange_operands import Exchange, by_group, read_operands
from jax_cp_dispatch._dispatch.ragged_choice import may_be_ragged
from jax_cp_dispatch._dispatch.xla_collectives import (
    combine_weighted_with_xla,
    combine_with_xla,
    dispatch_with_xla,
)
from jax_cp_dispatch._dispatch.xla_transfers import XlaRanks
from jax_cp_dispatch._ranks.communicator import rank_index
from jax_cp_dispatch._ranks.implementations import IMPLEMENTATIONS, refuse_here
from jax_cp_dispatch._ranks.lowering import Chosen
from jax_cp_dispatch._ranks.options import CollectiveOptions


def lower(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank."""
    program = ctx.module_context
    ragged = may_be_ragged(program.platforms, program.backend)
    move = functools.partial(_move, exchange, ragged)
    return mlir.lower_fun(move, multiple_results=True)(ctx, *operands)


def on_one_device(ctx: Any, exchange: Exchange) -> Callable[..., Any]:
    """Returns the exchange of a device that holds the rows of all ranks, to be traced."""
    return functools.partial(_move, exchange, False)


def _move(exchange: Exchange, ragged: bool, *operands: Any) -> list[Any]:
    if any(canonicalize_dtype(x.dtype) != x.dtype for x in operands):
        with jax.enable_x64(True):  # which the partitioner has left
            return _move(exchange, ragged, *operands)
    split = read_operands(operands, exchange)
    if exchange.by_collectives is not None:
        moved = exchange.by_collectives(split.arrays)
        if exchange.sums is None:
            return moved
        return [y.astype(dtype) for y, dtype in zip(moved, exchange.sums, strict=True)]
    axis_names = () if exchange.is_global else exchange.comm.axis_names
    ranks = XlaRanks(rank_index(axis_names), axis_names, exchange.comm.num_ranks, ragged)
    sums = exchange.sums or [""] * exchange.num_arrays
    outs = []
    for group, metadata, fingerprint, arrays, dtypes in zip(
        exchange.groups,
        split.metadata,
        split.fingerprints,
        by_group(split.arrays, exchange),
        by_group(sums, exchange),
        strict=True,
    ):
        if exchange.sums is None:
            arrays = _without_padding(arrays, group.num_tokens)
            outs += dispatch_with_xla(
                ranks, metadata, arrays, capacity=group.capacity, fingerprint=fingerprint
            )
        else:
            arrays = _without_padding(arrays, group.capacity)
            combine = combine_weighted_with_xla if group.has_weights else combine_with_xla
            outs += combine(
                ranks,
                metadata,
                arrays,
                num_tokens=group.num_tokens,
                dtypes=dtypes,
                fingerprint=fingerprint,
            )
    return outs


def _without_padding(arrays: list[Any], num_rows: int) -> list[Any]:
    """Removes the padding of arrays without rows, which custom calls cannot take empty."""
    return [x[:0] for x in arrays] if num_rows == 0 else arrays


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
