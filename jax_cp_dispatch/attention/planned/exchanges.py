"""The exchanges of an attention plan; their errors refer to the plan and to `PlanConfig`."""

from __future__ import annotations

from jaxtyping import Array, DTypeLike, Float, Int32

from jax_cp_dispatch._dispatch.exchange import move, outgoing, returning
from jax_cp_dispatch.attention.options import ExchangeOptions
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan


def send_qkv(
    exchange: ExchangeOptions, plan: AttentionPlan, q, kv, stamp: Int32[Array, " 5"]
) -> tuple[Float[Array, "q_capacity N H"], tuple[Float[Array, "kv_capacity K _"], ...]]:
    """Sends queries, keys and values to the ranks that use them, if the stamps match."""
    queries = _outgoing(exchange, "q", q, plan.q_metadata, plan.q_capacity)
    keys = _outgoing(exchange, "kv", kv, plan.kv_metadata, plan.kv_capacity)
    q, kv = _move(exchange, queries._replace(stamp=stamp), keys)
    return q, kv


def send_kv(
    exchange: ExchangeOptions, plan: PlacedPlan, kv, stamp: Int32[Array, " 5"]
) -> tuple[Float[Array, "kv_capacity K _"], ...]:
    """Sends keys and values, if the stamps match; queries do not move."""
    keys = _outgoing(exchange, "kv", kv, plan.kv_metadata, plan.kv_capacity)
    return _move(exchange, keys._replace(stamp=stamp))[0]


def return_kv(exchange: ExchangeOptions, plan: PlacedPlan, dkv, dtype: DTypeLike):
    """Returns the gradients of keys and values."""
    return _move(exchange, _returning(exchange, "kv", dkv, plan.kv_metadata, plan, dtype))[0]


def return_q(
    exchange: ExchangeOptions, plan: AttentionPlan, out, stamp: Int32[Array, " 5"]
) -> Float[Array, "T N H"]:
    """Returns the output. If no error can be raised, a wrong stamp makes all of it NaN."""
    out = _returning(exchange, "q", out, plan.q_metadata, plan)
    return _move(exchange, out._replace(stamp=stamp))[0]


def send_q(exchange: ExchangeOptions, plan: AttentionPlan, dout) -> Float[Array, "q_capacity N Hv"]:
    """Sends the output's gradients to the ranks of the queries."""
    return _move(exchange, _outgoing(exchange, "q", dout, plan.q_metadata, plan.q_capacity))[0]


def return_qkv(exchange: ExchangeOptions, plan: AttentionPlan, dq, dkv, dtype: DTypeLike):
    """Returns the gradients, which are summed and then rounded to `dtype`."""
    queries = _returning(exchange, "q", dq, plan.q_metadata, plan, dtype)
    keys = _returning(exchange, "kv", dkv, plan.kv_metadata, plan, dtype)
    return _move(exchange, queries, keys)


def _outgoing(exchange, name, arrays, metadata, capacity):
    part = outgoing(exchange.op, name, f"{name}_", arrays, metadata, capacity, None, None)
    return part._replace(capacity_name=f"PlanConfig.{name}_capacity")


def _returning(exchange, name, arrays, metadata, plan, dtype=None):
    part = returning(exchange.op, name, f"{name}_", arrays, metadata, plan.num_tokens, None, dtype)
    return part._replace(capacity_name=f"PlanConfig.{name}_capacity")


def _move(exchange, *parts):
    return move(
        exchange.op,
        parts,
        exchange.axis_name,
        None,
        exchange.implementation,
        exchange.deadline,
    )
