"""The exchanges of an attention plan; their errors refer to the config of the plan."""

from __future__ import annotations

from jaxtyping import Array, DTypeLike, Float, Int32, PyTree, Shaped

from jax_cp_dispatch._dispatch.arguments import outgoing, returning
from jax_cp_dispatch._dispatch.exchange import move
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan, PlacementConfig, PlanConfig


def send_qkv(
    exchange: CollectiveOptions, plan: AttentionPlan, q, kv, fingerprint: Int32[Array, " 9"]
) -> tuple[Float[Array, "q_capacity N H"], tuple[Shaped[Array, "kv_capacity _ _"], ...]]:
    """Sends queries, keys and values to the ranks that use them, if the fingerprints match."""
    queries = _outgoing(exchange, "q", q, plan)
    keys = _outgoing(exchange, "kv", kv, plan)
    q, kv = move(exchange, [queries._replace(fingerprint=fingerprint), keys])
    return q, kv


def send_kv(
    exchange: CollectiveOptions, plan: PlacedPlan, kv, fingerprint: Int32[Array, " 9"]
) -> tuple[Shaped[Array, "kv_capacity _ _"], ...]:
    """Sends keys and values, if the fingerprints match; queries do not move."""
    keys = _outgoing(exchange, "kv", kv, plan)
    return move(exchange, [keys._replace(fingerprint=fingerprint)])[0]


def return_kv(exchange: CollectiveOptions, plan: PlacedPlan, dkv, dtype: DTypeLike | None):
    """Returns the gradients of keys and values."""
    return move(exchange, [_returning(exchange, "kv", dkv, plan, dtype)])[0]


def return_q(
    exchange: CollectiveOptions, plan: AttentionPlan, out, fingerprint: Int32[Array, " 9"]
) -> PyTree[Float[Array, "T N ..."]]:
    """Returns the output, with lse if asked for; NaN for a wrong fingerprint without errors."""
    out = _returning(exchange, "q", out, plan)
    return move(exchange, [out._replace(fingerprint=fingerprint)])[0]


def send_q(
    exchange: CollectiveOptions, plan: AttentionPlan, dout
) -> PyTree[Float[Array, "q_capacity N ..."]]:
    """Sends the output's gradients to the ranks of the queries."""
    return move(exchange, [_outgoing(exchange, "q", dout, plan)])[0]


def return_qkv(exchange: CollectiveOptions, plan: AttentionPlan, dq, dkv, dtype: DTypeLike | None):
    """Returns the gradients, which are summed; those of keys are then rounded to `dtype`."""
    queries = _returning(exchange, "q", dq, plan)
    keys = _returning(exchange, "kv", dkv, plan, dtype)
    return move(exchange, [queries, keys])


def _outgoing(exchange, name, arrays, plan):
    metadata, capacity = getattr(plan, f"{name}_metadata"), getattr(plan, f"{name}_capacity")
    argument = outgoing(exchange.op, name, arrays, metadata, capacity=capacity)
    return argument._replace(capacity_name=_capacity_name(plan, name))


def _returning(exchange, name, arrays, plan, dtype=None):
    metadata, num_tokens = getattr(plan, f"{name}_metadata"), plan.num_tokens
    argument = returning(exchange.op, name, arrays, metadata, num_tokens=num_tokens, dtype=dtype)
    return argument._replace(capacity_name=_capacity_name(plan, name))


def _capacity_name(plan: AttentionPlan | PlacedPlan, name: str) -> str:
    config = PlanConfig if isinstance(plan, AttentionPlan) else PlacementConfig
    return f"{config.__name__}.{name}_capacity"
