"""Balanced attention: queries and keys move as planned, and results return."""

from functools import partial

import jax
from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import AxisName, num_ranks_here
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch._residuals import named_context, named_context_received
from jax_cp_dispatch.attention.arguments import check_plan, read_mask_of_plan
from jax_cp_dispatch.attention.local.derivative_order import forbid_second_derivative
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.packed_mask import PackedMask
from jax_cp_dispatch.attention.planned import exchanges
from jax_cp_dispatch.attention.planned.call import (
    attend_locally_backward,
    attend_received,
    attend_rows,
    check_call,
    fingerprint_of_call,
    local_operands,
)
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner import AttentionPlan


def balanced_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    plan: AttentionPlan,
    *,
    axis_name: AxisName,
    mask: Mask | str | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Computes causal attention over packed documents, with equal work on every rank.

    Sends each block of queries to the rank in `plan` and each key block to the ranks that need it,
    computes attention there, and returns the output. Call inside `jax.shard_map` over `axis_name`,
    on every rank of the axis.

    Differentiable once, in reverse mode: gradients move by the transposes of the same exchanges; dK
    and dV are summed over the ranks in float32 and rounded once. Residuals per rank: the received
    q, k and v, the output computed here, and its lse.

    Args:
      q: this rank's queries; its rows of the global `[B, W * T, N, H]`.
      k: this rank's keys, in the dtype of q; K divides N.
      v: this rank's values.
      plan: of `plan_attention`, made from the segment ids of all ranks; the global plan, or this
        rank's slice (`in_specs=P(axis_name)`).
      axis_name: the mesh axis of the ranks, or several, major axis first.
      mask: None is that of the plan; another one is refused.
      segment_ids, positions: this rank's columns of the arrays from which the plan was made. Only
        the plan determines attention; these are compared with it by a checksum. If the
        plan was made without positions, they count from 0 in each document. Positions of padding
        are not compared. Positions need the ids. Without ids, a plan of another batch is not
        detected.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation: of the exchanges; see `dispatch`.
      deadline: seconds until an exchange gives up on a missing rank; None is 60. No effect with
        "xla".
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes or dtypes do not match each other, the plan or the axis.
      jax.errors.JaxRuntimeError: at run time, on all ranks: the plan was made for another batch, or
        its capacities are too small; a rank has the part of another rank, or of another plan; or as
        `dispatch`. With `implementation="xla"` the output is NaN instead.
    """
    exchange = read_options(
        "balanced_attention", axis_name, implementation=implementation, deadline=deadline
    )
    options = AttentionOptions(exchange, scale=scale, logit_soft_cap=logit_soft_cap)
    instead = "context_parallel_attention(..., algorithm='balanced')"
    num_ranks_here(options.op, axis_name, instead)
    check_plan(options.op, plan, AttentionPlan)
    packed = PackedMask(read_mask_of_plan(options.op, mask, plan), segment_ids, positions)
    return attend_balanced(options, q, k, v, plan, packed)


def attend_balanced(options: AttentionOptions, q, k, v, plan, packed: PackedMask):
    """`balanced_attention` with options, which name the public function."""
    options.check()
    check_call(options, q, k, v, plan, packed)
    fingerprint = fingerprint_of_call(options, plan, packed)
    return attend_rows(_attend, options, q, k, v, plan, fingerprint)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, plan, fingerprint):
    return _forward(options, q, k, v, plan, fingerprint)[0]


def send(options, q, k, v, plan, fingerprint):
    """Sends the rows as planned; returns the operands of local attention, `[1, rows, ...]`."""
    received = exchanges.send_qkv(options.exchange, plan, q, (k, v), fingerprint)
    received_q, received_kv = named_context_received(received)
    return local_operands(options, plan, received_q, received_kv)


def return_output(options, out, plan, fingerprint):
    """Returns the output of local attention to the ranks of its queries."""
    return named_context(exchanges.return_q(options.exchange, plan, out[0], fingerprint))


def _forward(options, q, k, v, plan, fingerprint):
    q, k, v = forbid_second_derivative(options.op, [q, k, v])
    operands = send(options, q, k, v, plan, fingerprint)
    out, lse = attend_received(options, *operands)
    return return_output(options, out, plan, fingerprint), (operands, out, lse, plan)


def _backward(options, residuals, dhome):
    operands, out, lse, plan = residuals
    (dhome,) = forbid_second_derivative(options.op, [dhome])
    dout = exchanges.send_q(options.exchange, plan, dhome)
    dq, *dkv = attend_locally_backward(options, *operands, out, lse, dout[None])
    # A query is computed on one rank, so dq is rounded before it moves; dk and dv are sums.
    dtype = dhome.dtype
    dq, (dk, dv) = exchanges.return_qkv(
        options.exchange, plan, dq[0].astype(dtype), tuple(x[0] for x in dkv), dtype
    )
    return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)
