"""The custom call of an exchange: what CPUs and GPUs read alike, and its lowering for each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.gpu import all_ranks_here
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
        "has_weights": _span(group.has_weights for group in groups),
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


_MAX_ARRAYS = 64  # of one call, as in csrc/kernels/call.h
_ALL = 0  # multiprocessors, for the handler
_MOST_SMS = 2**31 - 1  # of any GPU


def what_gpus_lack(exchange: Exchange) -> str | None:
    """Returns why an exchange needs XLA, whatever the transport; None if it does not."""
    if any(group.has_weights for group in exchange.groups):
        return "rows have weights"
    if exchange.num_arrays <= _MAX_ARRAYS:
        return None
    return f"{exchange.num_arrays} arrays, but a call on GPUs takes at most {_MAX_ARRAYS}"


def lower_on_gpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank."""
    ranks = choice.rank_attributes(ctx, exchange.comm, "")
    move = functools.partial(call_handler, ctx.avals_out, exchange, _attributes(exchange, ranks))
    return mlir.lower_fun(move, multiple_results=True)(ctx, *operands)


def on_one_gpu(ctx: Any, exchange: Exchange) -> Callable[..., Any]:
    """Returns the exchange of a device that holds the rows of all ranks, to be traced."""
    attributes = _attributes(exchange, all_ranks_here())
    return functools.partial(call_handler, ctx.avals_out, exchange, attributes)


def start_on_gpu(
    ctx: Any, *operands: Any, exchange: Exchange, num_beside: int, choice: Chosen
) -> Any:
    """Lowers the first call of two.

    It puts the exchange on a stream of the package and returns; the second call makes the program's
    stream wait. XLA keeps the memory that the exchange uses, because the second call takes all
    results of the first; and it puts the work between them, because optimization barriers make the
    work depend on `held`, and the second call on both.
    """
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


def done_on_gpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
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
        "num_comm_sm": np.int64(min(exchange.num_comm_sm or _ALL, _MOST_SMS)),
    }
