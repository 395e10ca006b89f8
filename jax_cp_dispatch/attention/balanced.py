"""Balanced attention: queries and keys go where the plan computes them, results come home."""

import dataclasses
from functools import partial
from typing import cast

import jax
from jaxtyping import Array, Float

from jax_cp_dispatch._varying import vary_alike
from jax_cp_dispatch.attention.local import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local_options import blocks_of_ranks
from jax_cp_dispatch.attention.one_rank import num_ranks_here
from jax_cp_dispatch.attention.sequence import check_rows
from jax_cp_dispatch.dispatch import (
    DEFAULT_DEADLINE,
    AxisName,
    combine,
    combine_qkv,
    dispatch,
    dispatch_qkv,
)
from jax_cp_dispatch.planner import AttentionPlan


@dataclasses.dataclass(frozen=True)
class _Options:
    axis_name: AxisName
    scale: float | None
    logit_soft_cap: float | None
    implementation: str | None
    deadline: float

    def attend(self, q, k, *operands):
        return local_attention(q, k, *operands, **self._local(q, k))

    def attend_backward(self, q, k, *operands):
        return local_attention_backward(q, k, *operands, **self._local(q, k))

    def _local(self, q, k):
        (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
        blocks = blocks_of_ranks(T, S, N, K, rows=128)
        return {"scale": self.scale, "logit_soft_cap": self.logit_soft_cap, **blocks}

    @property
    def exchange(self):
        return {
            "axis_name": self.axis_name,
            "implementation": self.implementation,
            "deadline": self.deadline,
        }


def balanced_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    plan: AttentionPlan,
    *,
    axis_name: AxisName,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float = DEFAULT_DEADLINE,
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
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation: of the exchanges; see `dispatch`.
      deadline: seconds until an exchange gives up on a rank that has not come.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes or dtypes do not fit each other, the plan or the axis.
      jax.errors.JaxRuntimeError: see `dispatch`.
    """
    instead = "context_parallel_attention(..., algorithm='balanced')"
    num_ranks_here("balanced_attention", axis_name, instead)
    check_rows("balanced_attention", q, k, v)
    num_tokens = q.shape[0] * q.shape[1]
    if num_tokens != plan.num_tokens:
        raise ValueError(
            f"balanced_attention: a rank holds {q.shape[0]} x {q.shape[1]} = {num_tokens} rows but "
            f"the plan is for {plan.num_tokens}. Plan with the segment ids of this batch."
        )
    options = _Options(axis_name, scale, logit_soft_cap, implementation, deadline)
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    rows = [x.reshape(num_tokens, *x.shape[2:]) for x in vary_alike([q, k, v], also=names)]
    out = cast(Array, _attend(options, *rows, plan))  # custom_vjp hides its type
    return out.reshape(*q.shape[:3], v.shape[3])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, plan):
    return _forward(options, q, k, v, plan)[0]


def _forward(options, q, k, v, plan):
    received_q, received_kv = dispatch_qkv(
        q,
        (k, v),
        plan.q_metadata,
        plan.kv_metadata,
        q_capacity=plan.q_capacity,
        kv_capacity=plan.kv_capacity,
        **options.exchange,
    )
    ranges = plan.local_ranges(jax.lax.axis_index(options.axis_name))
    operands = tuple(x[None] for x in (received_q, *received_kv, *ranges))
    out, lse = options.attend(*operands)
    out = out.astype(q.dtype)  # final: all keys of a query are on its rank
    home = combine(out[0], plan.q_metadata, num_tokens=q.shape[0], **options.exchange)
    return home, (operands, out, lse, plan)


def _backward(options, residuals, dhome):
    operands, out, lse, plan = residuals
    num_tokens, dtype = dhome.shape[0], dhome.dtype
    dout = dispatch(dhome, plan.q_metadata, capacity=plan.q_capacity, **options.exchange)
    dq, *dkv = options.attend_backward(*operands, out, lse, dout[None])
    # A query is computed on one rank, so dq is rounded before it travels; dk and dv are sums.
    dq, (dk, dv) = combine_qkv(
        dq[0].astype(dtype),
        tuple(x[0] for x in dkv),
        plan.q_metadata,
        plan.kv_metadata,
        q_num_tokens=num_tokens,
        kv_num_tokens=num_tokens,
        preferred_element_type=dtype,
        **options.exchange,
    )
    return dq, dk, dv, None


_attend.defvjp(_forward, _backward)
