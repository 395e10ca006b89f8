"""What the exchanges of an attention plan move; their errors refer to the config of the plan."""

from __future__ import annotations

from jaxtyping import Array, DTypeLike, Int32

from jax_cp_dispatch._dispatch import Argument, outgoing, returning
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.planner import Plan


def sent_qkv(
    exchange: CollectiveOptions, plan: Plan, q, kv, fingerprint: Int32[Array, " 9"]
) -> list[Argument]:
    """Queries, keys and values go to the ranks that use them, if the fingerprints match."""
    queries = _outgoing(exchange, "q", q, plan)
    return [queries._replace(fingerprint=fingerprint), _outgoing(exchange, "kv", kv, plan)]


def sent_kv(
    exchange: CollectiveOptions, plan: Plan, kv, fingerprint: Int32[Array, " 9"]
) -> list[Argument]:
    """Keys and values go there, if the fingerprints match; queries do not move."""
    return [_outgoing(exchange, "kv", kv, plan)._replace(fingerprint=fingerprint)]


def returned_kv(
    exchange: CollectiveOptions, plan: Plan, dkv, dtype: DTypeLike | None
) -> list[Argument]:
    """The gradients of keys and values return."""
    return [_returning(exchange, "kv", dkv, plan, dtype)]


def returned_q(
    exchange: CollectiveOptions, plan: Plan, out, fingerprint: Int32[Array, " 9"]
) -> list[Argument]:
    """The output returns, with lse if asked for; NaN for a wrong fingerprint without errors."""
    return [_returning(exchange, "q", out, plan)._replace(fingerprint=fingerprint)]


def sent_q(exchange: CollectiveOptions, plan: Plan, dout) -> list[Argument]:
    """The output's gradients go to the ranks of the queries."""
    return [_outgoing(exchange, "q", dout, plan)]


def returned_qkv(
    exchange: CollectiveOptions, plan: Plan, dq, dkv, dtype: DTypeLike | None
) -> list[Argument]:
    """The gradients return and are summed; those of keys are then rounded to `dtype`."""
    queries = _returning(exchange, "q", dq, plan)
    return [queries, _returning(exchange, "kv", dkv, plan, dtype)]


def _outgoing(exchange, name, arrays, plan):
    metadata, capacity = getattr(plan, f"{name}_metadata"), getattr(plan, f"{name}_capacity")
    argument = outgoing(exchange.op, name, arrays, metadata, capacity=capacity)
    return argument._replace(capacity_name=f"PlanConfig.{name}_capacity")


def _returning(exchange, name, arrays, plan, dtype=None):
    metadata, num_tokens = getattr(plan, f"{name}_metadata"), plan.num_tokens
    argument = returning(exchange.op, name, arrays, metadata, num_tokens=num_tokens, dtype=dtype)
    return argument._replace(capacity_name=f"PlanConfig.{name}_capacity")
