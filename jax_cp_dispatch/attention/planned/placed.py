"""Placed attention: queries stay, keys and values move as a placement requires."""

from functools import partial

import jax
from jaxtyping import Array, Float

from jax_cp_dispatch._ranks.axis import AxisName, num_ranks_here
from jax_cp_dispatch._residuals import named_context, named_context_received
from jax_cp_dispatch.attention.local.derivative_order import not_again
from jax_cp_dispatch.attention.options import AttentionOptions, ExchangeOptions
from jax_cp_dispatch.attention.planned import exchanges
from jax_cp_dispatch.attention.planned.call import (
    attend_locally,
    attend_locally_backward,
    attend_rows,
    check_call,
)
from jax_cp_dispatch.planner import PlacedPlan


def placed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    plan: PlacedPlan,
    *,
    axis_name: AxisName,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Computes causal attention over packed documents whose tokens `place_tokens` has placed.

    Every rank receives the keys and values to which its queries attend; nothing else moves. Call
    inside `jax.shard_map` over `axis_name`, on every rank of the axis.

    Differentiable once, in reverse mode: the gradients of keys and values return by the transpose
    of the same exchange, are summed over the ranks in float32, and rounded once. Residuals per
    rank: q, the received k and v, the output, and its lse.

    Args:
      q: this rank's queries, in placed order.
      k: this rank's keys, in the dtype of q; K divides N.
      v: this rank's values.
      plan: `Placement.plan`, or this rank's slice of it (`in_specs=P(axis_name)`).
      axis_name, scale, logit_soft_cap, implementation, deadline: see `balanced_attention`.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes or dtypes do not match each other, the plan or the axis.
      jax.errors.JaxRuntimeError: see `dispatch`.
    """
    exchange = ExchangeOptions("placed_attention", axis_name, implementation, deadline)
    options = AttentionOptions(exchange, scale=scale, logit_soft_cap=logit_soft_cap)
    instead = "context_parallel_attention(..., algorithm='placed')"
    num_ranks_here(options.op, axis_name, instead)
    return attend_placed(options, q, k, v, plan)


def attend_placed(options: AttentionOptions, q, k, v, plan):
    """`placed_attention` with options, which name the public function."""
    options.check()
    check_call(options, q, k, v, plan, advice="Place the tokens of this batch.")
    return attend_rows(_attend, options, q, k, v, plan)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, plan):
    return _forward(options, q, k, v, plan)[0]


def _forward(options, q, k, v, plan):
    q, k, v = not_again(options.op, [q, k, v])
    received = named_context_received(exchanges.send_kv(options.exchange, plan, (k, v)))
    ranges = named_context(plan.local_ranges(jax.lax.axis_index(options.exchange.axis_name)))
    operands = tuple(x[None] for x in (q, *received, *ranges))
    out, lse = attend_locally(options, *operands)
    # The output is final: all keys of a query are on its rank.
    out, lse = named_context((out.astype(q.dtype), lse))
    return out[0], (operands, out, lse, plan)


def _backward(options, residuals, dout):
    operands, out, lse, plan = residuals
    (dout,), dtype = not_again(options.op, [dout]), dout.dtype
    dq, *dkv = attend_locally_backward(options, *operands, out, lse, dout[None])
    dk, dv = exchanges.return_kv(options.exchange, plan, tuple(x[0] for x in dkv), dtype)
    return dq[0].astype(dtype), dk, dv, None


_attend.defvjp(_forward, _backward)
