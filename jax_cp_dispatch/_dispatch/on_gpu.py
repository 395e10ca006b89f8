"""Lowers an exchange between GPUs, or on one that holds all ranks: one custom call, or two.

One call runs on the program's stream. The first of two puts the exchange on a stream of the
package and returns; the second makes the program's stream wait. XLA keeps the memory that the
exchange uses, because the second call takes all results of the first; and it puts the work between
them, because optimization barriers make the work depend on `held`, and the second call on both.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._dispatch.custom_call import (
    call_handler,
    handler_attributes,
    like,
    places,
    start_handler_name,
)
from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu import all_ranks_here
from jax_cp_dispatch._ranks.lowering import Chosen

_MAX_ARRAYS = 64  # of one call, as in csrc/kernels/call.h
_ALL = 0  # multiprocessors, for the handler
_MOST_SMS = 2**31 - 1  # of any GPU


def what_gpus_lack(exchange: Exchange) -> str | None:
    """Returns why an exchange needs XLA, whatever the transport; None if it does not."""
    if exchange.num_arrays <= _MAX_ARRAYS:
        return None
    return f"{exchange.num_arrays} arrays, but a call on GPUs takes at most {_MAX_ARRAYS}"


def lower(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank."""
    ranks = choice.rank_attributes(ctx, exchange.comm, "")
    move = functools.partial(call_handler, ctx.avals_out, exchange, _attributes(exchange, ranks))
    return mlir.lower_fun(move, multiple_results=True)(ctx, *operands)


def on_one_device(ctx: Any, exchange: Exchange) -> Callable[..., Any]:
    """Returns the exchange of a device that holds the rows of all ranks, to be traced."""
    attributes = _attributes(exchange, all_ranks_here())
    return functools.partial(call_handler, ctx.avals_out, exchange, attributes)


def lower_start(
    ctx: Any, *operands: Any, exchange: Exchange, num_beside: int, choice: Chosen
) -> Any:
    """Lowers the first call of two."""
    ranks = all_ranks_here()
    if not exchange.is_global:
        ranks = choice.rank_attributes(ctx, exchange.comm, "")
    start = functools.partial(_start, ctx.avals_out, ranks, exchange, num_beside)
    return mlir.lower_fun(start, multiple_results=True)(ctx, *operands)


def _start(
    avals_out: Any, ranks: dict[str, Any], exchange: Exchange, num_beside: int, *operands: Any
) -> list[Any]:
    num_moving = len(operands) - num_beside
    moving, beside = operands[:num_moving], operands[num_moving:]
    first_two, n = places(exchange), exchange.num_arrays
    first = len(first_two) + exchange.num_before_arrays
    call = jax.ffi.ffi_call(
        start_handler_name(exchange),
        like(avals_out[: 2 * n + 1]),
        input_output_aliases={first + i: n + i for i in range(n)},
        has_side_effect=True,  # two calls of the same exchange must not become one
    )
    *started, held = call(*first_two, *moving, **_attributes(exchange, ranks))
    return [*started, *_one_after_another(held, beside)]


def lower_done(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the second call."""
    done = functools.partial(_done, exchange)
    return mlir.lower_fun(done, multiple_results=True)(ctx, *operands)


def _done(exchange: Exchange, *operands: Any) -> list[Any]:
    n = exchange.num_arrays
    rest = operands[exchange.num_before_arrays :]
    held, *beside = _one_after_another(rest[2 * n], rest[2 * n + 1 :])
    call = jax.ffi.ffi_call(
        runtime.EXCHANGE_DONE_TARGET,
        like(rest[:n]),
        input_output_aliases={i: i for i in range(n)},
        has_side_effect=True,  # it stays where it is
    )
    return [*call(*rest[: 2 * n], held), *beside]


def _one_after_another(held: Any, beside: Any) -> list[Any]:
    """Returns all values; whatever reads one of them depends on all."""
    return list(jax.lax.optimization_barrier((held, *beside))) if beside else [held]


def _attributes(exchange: Exchange, ranks: dict[str, Any]) -> dict[str, Any]:
    return {
        **handler_attributes(exchange),
        **ranks,
        "copy_path": _copy_path(exchange.op),
        "num_comm_sm": np.int64(min(exchange.num_comm_sm or _ALL, _MOST_SMS)),
    }


def _copy_path(op: str) -> str:
    """Returns `JAX_CP_DISPATCH_COPY_PATH`, which is read when a program is lowered.

    "registers" is the default. "bulk" uses the copy engines of the multiprocessors, on GPUs of
    compute capability 9.0 and newer; others use registers. Ranks may use different ones.
    """
    path = os.environ.get("JAX_CP_DISPATCH_COPY_PATH", "registers")
    if path not in ("registers", "bulk"):
        raise ValueError(
            f"{op}: JAX_CP_DISPATCH_COPY_PATH is {path!r}; it must be 'registers' or 'bulk'. Unset "
            "it for the default."
        )
    return path
