"""Balanced attention: queries and keys go where the plan computes them, results come home."""

import dataclasses
from functools import partial
from typing import cast

import jax
from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import AxisName, check_axis_name, num_ranks_here
from jax_cp_dispatch._ranks.deadline import check_deadline
from jax_cp_dispatch._ranks.implementations import check_implementation
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.attention.checks import check_plan
from jax_cp_dispatch.attention.local.api import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local.derivative_order import in_reverse_only, not_again
from jax_cp_dispatch.attention.local.options import blocks_of_ranks, check_softmax
from jax_cp_dispatch.attention.planned.exchanges import PlannedExchanges
from jax_cp_dispatch.attention.rotating.sequence import check_rows
from jax_cp_dispatch.planner import AttentionPlan
from jax_cp_dispatch.planner.segment_ids import words
from jax_cp_dispatch.planner.stamp import rank_stamp


@dataclasses.dataclass(frozen=True)
class Options:
    """How the ranks of a plan exchange rows and attend; static."""

    exchanges: PlannedExchanges
    scale: float | None
    logit_soft_cap: float | None

    def attend(self, q, k, *operands):
        return local_attention(q, k, *operands, **self._local(q, k))

    def attend_backward(self, q, k, *operands):
        return local_attention_backward(q, k, *operands, **self._local(q, k))

    def _local(self, q, k):
        (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
        blocks = blocks_of_ranks(T, S, N, K, rows=128)
        return {"scale": self.scale, "logit_soft_cap": self.logit_soft_cap, **blocks}


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
    instead = "context_parallel_attention(..., algorithm='balanced')"
    num_ranks_here("balanced_attention", axis_name, instead)
    return attend_balanced(
        *("balanced_attention", q, k, v, plan, segment_ids, positions),
        axis_name=axis_name,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        implementation=implementation,
        deadline=deadline,
    )


def attend_balanced(
    op, q, k, v, plan, segment_ids, positions, *, axis_name, scale, logit_soft_cap, **exchange
):
    """`balanced_attention` for a caller of its own name, `op`."""
    names = check_axis_name(op, axis_name)
    check_implementation(op, exchange["implementation"])
    check_deadline(op, exchange["deadline"])
    check_plan(op, plan)
    check_rows(op, q, k, v, segment_ids, positions)
    check_softmax(op, scale, logit_soft_cap)
    num_tokens = q.shape[0] * q.shape[1]
    if num_tokens != plan.num_tokens:
        raise ValueError(
            f"{op}: a rank holds {q.shape[0]} x {q.shape[1]} = {num_tokens} rows but "
            f"the plan is for {plan.num_tokens}. Plan with the segment ids of this batch."
        )
    exchanges = PlannedExchanges(op, axis_name, **exchange)
    options = Options(exchanges, scale, logit_soft_cap)
    seen = (None if x is None else words(x) for x in (segment_ids, positions))
    stamp = rank_stamp(plan.local_stamp(jax.lax.axis_index(axis_name)), *seen)
    q, k, v = in_reverse_only(op, [q, k, v])
    rows = [x.reshape(num_tokens, *x.shape[2:]) for x in vary_alike([q, k, v], also=names)]
    out = cast(Array, _attend(options, *rows, plan, stamp))  # custom_vjp hides its type
    return out.reshape(*q.shape[:3], v.shape[3])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, plan, stamp):
    return _forward(options, q, k, v, plan, stamp)[0]


def _forward(options, q, k, v, plan, stamp):
    q, k, v = not_again(options.exchanges.op, [q, k, v])
    received_q, received_kv = options.exchanges.send_qkv(plan, q, (k, v), stamp)
    ranges = plan.local_ranges(jax.lax.axis_index(options.exchanges.axis_name))
    operands = tuple(x[None] for x in (received_q, *received_kv, *ranges))
    out, lse = options.attend(*operands)
    out = out.astype(q.dtype)  # final: all keys of a query are on its rank
    return options.exchanges.return_q(plan, out[0], stamp), (operands, out, lse, plan)


def _backward(options, residuals, dhome):
    operands, out, lse, plan = residuals
    (dhome,) = not_again(options.exchanges.op, [dhome])
    dout = options.exchanges.send_q(plan, dhome)
    dq, *dkv = options.attend_backward(*operands, out, lse, dout[None])
    # A query is computed on one rank, so dq is rounded before it travels; dk and dv are sums.
    dtype = dhome.dtype
    dq, (dk, dv) = options.exchanges.return_qkv(
        plan, dq[0].astype(dtype), tuple(x[0] for x in dkv), dtype
    )
    return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)
