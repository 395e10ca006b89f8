"""Placed attention: queries stay at home, keys and values go where a placement wants them."""

from functools import partial
from typing import cast

import jax
from jaxtyping import Array, Float

from jax_cp_dispatch._ranks.axis import AxisName, check_axis_name, num_ranks_here
from jax_cp_dispatch._ranks.deadline import check_deadline
from jax_cp_dispatch._ranks.implementations import check_implementation
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.attention.local.derivative_order import in_reverse_only, not_again
from jax_cp_dispatch.attention.local.options import check_softmax
from jax_cp_dispatch.attention.planned.balanced import Options
from jax_cp_dispatch.attention.planned.exchanges import PlannedExchanges
from jax_cp_dispatch.attention.rotating.sequence import check_rows
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
    """Causal attention over packed documents whose tokens `place_tokens` has placed.

    Every rank receives the keys and values that its queries attend, and attends; nothing else
    moves. Call inside `jax.shard_map` over `axis_name`, on every rank of the axis.

    Differentiable once, in reverse mode: the gradients of keys and values travel home by the
    transpose of the same exchange, are summed over the ranks in float32 and rounded once. Kept for
    it, per rank: q, the received k and v, the output, and its lse.

    Args:
      q: this rank's queries, in placed order.
      k: this rank's keys, of the dtype of q; K divides N.
      v: this rank's values.
      plan: `Placement.plan`, or this rank's slice of it (`in_specs=P(axis_name)`).
      axis_name, scale, logit_soft_cap, implementation, deadline: see `balanced_attention`.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes or dtypes do not fit each other, the plan or the axis.
      jax.errors.JaxRuntimeError: see `dispatch`.
    """
    op = "placed_attention"
    instead = "context_parallel_attention(..., algorithm='placed')"
    num_ranks_here(op, axis_name, instead)
    return attend_placed(
        *(op, q, k, v, plan),
        axis_name=axis_name,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        implementation=implementation,
        deadline=deadline,
    )


def attend_placed(op, q, k, v, plan, *, axis_name, scale, logit_soft_cap, **exchange):
    """`placed_attention` for a caller of its own name, `op`."""
    names = check_axis_name(op, axis_name)
    check_implementation(op, exchange["implementation"])
    check_deadline(op, exchange["deadline"])
    check_rows(op, q, k, v)
    check_softmax(op, scale, logit_soft_cap)
    num_tokens = q.shape[0] * q.shape[1]
    if num_tokens != plan.num_tokens:
        raise ValueError(
            f"{op}: a rank holds {q.shape[0]} x {q.shape[1]} = {num_tokens} rows but "
            f"the plan is for {plan.num_tokens}. Place the tokens of this batch."
        )
    options = Options(PlannedExchanges(op, axis_name, **exchange), scale, logit_soft_cap)
    q, k, v = in_reverse_only(op, [q, k, v])
    rows = [x.reshape(num_tokens, *x.shape[2:]) for x in vary_alike([q, k, v], also=names)]
    out = cast(Array, _attend(options, *rows, plan))  # custom_vjp hides its type
    return out.reshape(*q.shape[:3], v.shape[3])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, plan):
    return _forward(options, q, k, v, plan)[0]


def _forward(options, q, k, v, plan):
    q, k, v = not_again(options.exchanges.op, [q, k, v])
    received = options.exchanges.send_kv(plan, (k, v))
    ranges = plan.local_ranges(jax.lax.axis_index(options.exchanges.axis_name))
    operands = tuple(x[None] for x in (q, *received, *ranges))
    out, lse = options.attend(*operands)
    out = out.astype(q.dtype)  # final: all keys of a query are on its rank
    return out[0], (operands, out, lse, plan)


def _backward(options, residuals, dout):
    operands, out, lse, plan = residuals
    (dout,), dtype = not_again(options.exchanges.op, [dout]), dout.dtype
    dq, *dkv = options.attend_backward(*operands, out, lse, dout[None])
    dk, dv = options.exchanges.return_kv(plan, tuple(x[0] for x in dkv), dtype)
    return dq[0].astype(dtype), dk, dv, None


_attend.defvjp(_forward, _backward)
