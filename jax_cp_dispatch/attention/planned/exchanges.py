"""The exchanges of an attention plan; their errors speak of the plan and of `PlanConfig`."""

from __future__ import annotations

from jaxtyping import Array, DTypeLike, Float, Int32

from jax_cp_dispatch._dispatch.exchange import move, outgoing, returning
from jax_cp_dispatch.attention.options import ExchangeOptions
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan


def send_qkv(
    exchange: ExchangeOptions, plan: AttentionPlan, q, kv, stamp: Int32[Array, " 5"]
) -> tuple[Float[Array, "q_capacity N H"], tuple[Float[Array, "kv_capacity K _"], ...]]:
    """Queries, and keys with values, go where they are computed; if the stamps are right."""
    queries = _outgoing(exchange, "q", q, plan.q_metadata, plan.q_capacity)
    keys = _outgoing(exchange, "kv", kv, plan.kv_metadata, plan.kv_capacity)
    q, kv = _move(exchange, queries._replace(stamp=stamp), keys)
    return q, kv


def send_kv(
    exchange: ExchangeOptions, plan: PlacedPlan, kv
) -> tuple[Float[Array, "kv_capacity K _"], ...]:
    """Keys with values, where queries stay at home."""
    return _move(exchange, _outgoing(exchange, "kv", kv, plan.kv_metadata, plan.kv_capacity))[0]


def return_kv(exchange: ExchangeOptions, plan: PlacedPlan, dkv, dtype: DTypeLike):
    """Their gradients."""
    return _move(exchange, _returning(exchange, "kv", dkv, plan.kv_metadata, plan, dtype))[0]


def return_q(
    exchange: ExchangeOptions, plan: AttentionPlan, out, stamp: Int32[Array, " 5"]
) -> Float[Array, "T N H"]:
    """The output comes home; the stamp makes all of it NaN where nothing can be refused."""
    out = _returning(exchange, "q", out, plan.q_metadata, plan)
    return _move(exchange, out._replace(stamp=stamp))[0]


def send_q(exchange: ExchangeOptions, plan: AttentionPlan, dout) -> Float[Array, "q_capacity N Hv"]:
    """The output's gradients follow the queries."""
    return _move(exchange, _outgoing(exchange, "q", dout, plan.q_metadata, plan.q_capacity))[0]


def return_qkv(exchange: ExchangeOptions, plan: AttentionPlan, dq, dkv, dtype: DTypeLike):
    """The gradients come home, rounded to `dtype` when they have been summed."""
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
