"""Balanced attention: queries and keys go where the plan computes them, results come home."""

from functools import partial

import jax
from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import AxisName, num_ranks_here
from jax_cp_dispatch.attention.checks import check_plan
from jax_cp_dispatch.attention.local.derivative_order import not_again
from jax_cp_dispatch.attention.options import AttentionOptions, ExchangeOptions
from jax_cp_dispatch.attention.planned import exchanges
from jax_cp_dispatch.attention.planned.call import (
    attend_locally,
    attend_locally_backward,
    attend_rows,
    check_call,
)
from jax_cp_dispatch.planner import AttentionPlan
from jax_cp_dispatch.planner.segment_ids import words
from jax_cp_dispatch.planner.stamp import rank_stamp


def balanced_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    plan: AttentionPlan,
    *,
    axis_name: AxisName,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Causal attention over packed documents with equal work on every rank.

    Sends each block of queries to the rank that `plan` names and every key block to the ranks that
    need it, attends there, and brings the output home. Call inside `jax.shard_map` over
    `axis_name`, on every rank of the axis.

    Differentiable once, in reverse mode: the gradient travels by the transposes of the same
    exchanges, dK and dV are summed over the ranks in float32 and rounded once. Kept for it, per
    rank: the received q, k and v, the output computed here, and its lse.

    Args:
      q: this rank's queries; its rows of the global `[B, W * T, N, H]`.
      k: this rank's keys, of the dtype of q; K divides N.
      v: this rank's values.
      plan: from `plan_attention` with the segment ids of all ranks; the global plan, or this
        rank's slice (`in_specs=P(axis_name)`).
      axis_name: the mesh axis of the ranks, or several, the major one first.
      segment_ids, positions: this rank's columns of what the plan was made from. Attention follows
        the plan alone; what is given here is compared with it, by a checksum. A plan of another
        batch is noticed only if one of them is given.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation: of the exchanges; see `dispatch`.
      deadline: seconds until an exchange gives up on a rank that has not come; None is 60. Not with
        "xla".
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes or dtypes do not fit each other, the plan or the axis.
      jax.errors.JaxRuntimeError: when the program runs, on all ranks: the plan was made for another
        batch, its capacities are too small, and what `dispatch` raises. With
        `implementation="xla"` the output is NaN.
    """
    exchange = ExchangeOptions("balanced_attention", axis_name, implementation, deadline)
    options = AttentionOptions(exchange, scale=scale, logit_soft_cap=logit_soft_cap)
    instead = "context_parallel_attention(..., algorithm='balanced')"
    num_ranks_here(options.op, axis_name, instead)
    return attend_balanced(options, q, k, v, plan, segment_ids, positions)


def attend_balanced(options: AttentionOptions, q, k, v, plan, segment_ids, positions):
    """`balanced_attention` for a caller whose name is in the options."""
    options.check()
    check_plan(options.op, plan)
    advice = "Plan with the segment ids of this batch."
    check_call(options, q, k, v, plan, segment_ids, positions, advice=advice)
    seen = (None if x is None else words(x) for x in (segment_ids, positions))
    rank = jax.lax.axis_index(options.exchange.axis_name)
    stamp = rank_stamp(plan.local_stamp(rank), *seen)
    return attend_rows(_attend, options, q, k, v, plan, stamp)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, plan, stamp):
    return _forward(options, q, k, v, plan, stamp)[0]


def _forward(options, q, k, v, plan, stamp):
    q, k, v = not_again(options.op, [q, k, v])
    received_q, received_kv = exchanges.send_qkv(options.exchange, plan, q, (k, v), stamp)
    ranges = plan.local_ranges(jax.lax.axis_index(options.exchange.axis_name))
    operands = tuple(x[None] for x in (received_q, *received_kv, *ranges))
    out, lse = attend_locally(options, *operands)
    out = out.astype(q.dtype)  # final: all keys of a query are on its rank
    return exchanges.return_q(options.exchange, plan, out[0], stamp), (operands, out, lse, plan)


def _backward(options, residuals, dhome):
    operands, out, lse, plan = residuals
    (dhome,) = not_again(options.op, [dhome])
    dout = exchanges.send_q(options.exchange, plan, dhome)
    dq, *dkv = attend_locally_backward(options, *operands, out, lse, dout[None])
    # A query is computed on one rank, so dq is rounded before it travels; dk and dv are sums.
    dtype = dhome.dtype
    dq, (dk, dv) = exchanges.return_qkv(
        options.exchange, plan, dq[0].astype(dtype), tuple(x[0] for x in dkv), dtype
    )
    return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)
