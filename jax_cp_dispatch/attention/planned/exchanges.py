"""The exchanges of an attention plan; their errors refer to the config of the plan."""

from __future__ import annotations

from jaxtyping import Array, DTypeLike, Float, Int32

from jax_cp_dispatch._dispatch.exchange import move, outgoing, returning
from jax_cp_dispatch.attention.options import ExchangeOptions
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan, PlacementConfig, PlanConfig


def send_qkv(
    exchange: ExchangeOptions, plan: AttentionPlan, q, kv, stamp: Int32[Array, " 7"]
) -> tuple[Float[Array, "q_capacity N H"], tuple[Float[Array, "kv_capacity K _"], ...]]:
    """Sends queries, keys and values to the ranks that use them, if the stamps match."""
    queries = _outgoing(exchange, "q", q, plan)
    keys = _outgoing(exchange, "kv", kv, plan)
    q, kv = _move(exchange, queries._replace(stamp=stamp), keys)
    return q, kv


def send_kv(
    exchange: ExchangeOptions, plan: PlacedPlan, kv, stamp: Int32[Array, " 7"]
) -> tuple[Float[Array, "kv_capacity K _"], ...]:
    """Sends keys and values, if the stamps match; queries do not move."""
    keys = _outgoing(exchange, "kv", kv, plan)
    return _move(exchange, keys._replace(stamp=stamp))[0]


def return_kv(exchange: ExchangeOptions, plan: PlacedPlan, dkv, dtype: DTypeLike):
    """Returns the gradients of keys and values."""
    return _move(exchange, _returning(exchange, "kv", dkv, plan, dtype))[0]


def return_q(
    exchange: ExchangeOptions, plan: AttentionPlan, out, stamp: Int32[Array, " 7"]
) -> Float[Array, "T N H"]:
    """Returns the output. If no error can be raised, a wrong stamp makes all of it NaN."""
    out = _returning(exchange, "q", out, plan)
    return _move(exchange, out._replace(stamp=stamp))[0]


def send_q(exchange: ExchangeOptions, plan: AttentionPlan, dout) -> Float[Array, "q_capacity N Hv"]:
    """Sends the output's gradients to the ranks of the queries."""
    return _move(exchange, _outgoing(exchange, "q", dout, plan))[0]


def return_qkv(exchange: ExchangeOptions, plan: AttentionPlan, dq, dkv, dtype: DTypeLike):
    """Returns the gradients, which are summed and then rounded to `dtype`."""
    queries = _returning(exchange, "q", dq, plan, dtype)
    keys = _returning(exchange, "kv", dkv, plan, dtype)
    return _move(exchange, queries, keys)


def _outgoing(exchange, name, arrays, plan):
    metadata, capacity = getattr(plan, f"{name}_metadata"), getattr(plan, f"{name}_capacity")
    part = outgoing(exchange.op, name, f"{name}_", arrays, metadata, capacity, None, None)
    return part._replace(capacity_name=_capacity_name(plan, name))


def _returning(exchange, name, arrays, plan, dtype=None):
    metadata = getattr(plan, f"{name}_metadata")
    part = returning(exchange.op, name, f"{name}_", arrays, metadata, plan.num_tokens, None, dtype)
    return part._replace(capacity_name=_capacity_name(plan, name))


def _capacity_name(plan: AttentionPlan | PlacedPlan, name: str) -> str:
    config = PlanConfig if isinstance(plan, AttentionPlan) else PlacementConfig
    return f"{config.__name__}.{name}_capacity"


def _move(exchange, *parts):
    return move(
        exchange.op,
        parts,
        exchange.axis_name,
        None,
        exchange.implementation,
        exchange.deadline,
    )
