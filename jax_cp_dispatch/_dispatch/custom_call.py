"""The custom call of an exchange: its target, and the attributes that CPUs and GPUs read alike."""

from typing import Any

import numpy as np

from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._ranks import runtime


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
