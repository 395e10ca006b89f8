"""Balanced attention: queries and keys move as planned, and results return."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._dispatch import move
from jax_cp_dispatch._ranks.axis import AxisName, num_ranks_here
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch._residuals import named_context, named_context_received
from jax_cp_dispatch.attention.check_arguments import read_rows_of_plan
from jax_cp_dispatch.attention.local.derivative_order import forbid_second_derivative
from jax_cp_dispatch.attention.local.sink import sink_gradient
from jax_cp_dispatch.attention.operands import Operands, Outputs, softmax_gradients
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.peer_arguments import explains_peer_arguments
from jax_cp_dispatch.attention.planned import exchanges
from jax_cp_dispatch.attention.planned.call import (
    Received,
    attend_received,
    attend_rows,
    check_call,
    fingerprint_of_call,
    gradients_of_received,
    of_all_ranks,
    operand_gradients,
    ranges_here,
    received_rows,
)
from jax_cp_dispatch.attention.planned.overlap import in_parts, join, parts_of_heads
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner import Plan
from jax_cp_dispatch.planner.stack import check_plan


@explains_peer_arguments
def balanced_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    plan: Plan,
    *,
    axis_name: AxisName,
    mask: Mask | str | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    sink: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> Float[Array, "B T N Hv"] | Any:
    """Computes attention over packed documents, with equal work on every rank.

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
      sink, return_lse, return_max_logits: see `context_parallel_attention`.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation: of the exchanges; see `dispatch`.
      deadline: seconds until an exchange gives up on a missing rank; None is 60, on GPUs 600, or
        `JAX_CP_DISPATCH_DEADLINE`. No effect with "xla".
      num_comm_sm: multiprocessors of a GPU that each exchange may use; see `dispatch`.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes or dtypes do not match each other, the plan or the axis.
      jax.errors.JaxRuntimeError: at run time, on all ranks: the plan was made for another batch, or
        its capacities are too small; a rank has the part of another rank, or of another plan; or as
        `dispatch`. With `implementation="xla"` the output is NaN instead.
    """
    exchange = read_options(
        "balanced_attention",
        axis_name,
        implementation=implementation,
        deadline=deadline,
        num_comm_sm=num_comm_sm,
    )
    options = AttentionOptions(
        exchange,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )
    instead = "context_parallel_attention(..., algorithm='balanced')"
    num_ranks_here(options.op, axis_name, instead)
    check_plan(options.op, plan, is_placed=False)
    operands = Operands(q, k, v, sink)
    packed = read_rows_of_plan(options.op, operands, plan, mask, segment_ids, positions)
    outputs = attend_balanced(options, operands, plan, packed)
    return options.returned(outputs)


def attend_balanced(
    options: AttentionOptions, operands: Operands, plan, packed: PackedMask
) -> Outputs:
    """`balanced_attention` with options, which name the public function."""
    check_call(options, operands, plan, packed)
    fingerprint = fingerprint_of_call(options, plan, packed)
    return attend_rows(_attend, options, operands, plan, fingerprint)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, operands: Operands, plan, fingerprint) -> Outputs:
    return _forward(options, operands, plan, fingerprint)[0]


def send(options, q, kv, plan, fingerprint) -> Received:
    """Sends the rows as planned."""
    arguments = exchanges.sent_qkv(options.exchange, plan, q, kv, fingerprint)
    return received_rows(ranges_here(options, plan), *move(options.exchange, arguments))


def return_output(options, out, plan, fingerprint):
    """Returns the output of local attention to the ranks of its queries."""
    (out,) = move(
        options.exchange, exchanges.returned_q(options.exchange, plan, out[0], fingerprint)
    )
    return out


# Rows that do not come back are 0 there. A row without keys travels as 0 likewise, and an lse of 0
# as the smallest normal number, which no sum of exponentials can tell from it.


def _lse_to_send(lse):
    tiny = jnp.finfo(lse.dtype).tiny
    return jnp.where(lse == -jnp.inf, 0, jnp.where(lse == 0, tiny, lse))


def _lse_that_came(lse):
    return jnp.where(lse == 0, -jnp.inf, lse)


def _forward(options, operands: Operands, plan, fingerprint):
    operands, exchange = operands.derived_once(options.op), options.exchange
    heads, ranges = parts_of_heads(options, operands), ranges_here(options, plan)

    def attend(part: Operands, received):
        received = received_rows(ranges, *named_context_received(received))
        return received, attend_received(options, received, part.sink, part.weights)

    def give_back(outputs):
        _, (out, lse, _) = outputs
        home = (out[0], _lse_to_send(lse)[0].T) if options.return_lse else out[0]
        return exchanges.returned_q(exchange, plan, home, fingerprint)

    done = in_parts(
        exchange,
        [part.operands(operands) for part in heads],
        attend,
        send=lambda part: exchanges.sent_qkv(exchange, plan, part.q, part.moved, fingerprint),
        give_back=give_back,
    )
    received, computed = zip(*(part.outputs for part in done), strict=True)
    out, lse, max_logits = zip(*computed, strict=True)
    home = named_context(join([part.returned[0] for part in done], 1))
    outputs = Outputs(home, None, of_all_ranks(options, join(max_logits, 0)))
    if options.return_lse:
        outputs = outputs._replace(out=home[0], lse=_lse_that_came(home[1]))
    return outputs, (received, out, lse, operands.sink, operands.weights, plan)


def _backward(options, residuals, dhome: Outputs):
    received, out, lse, sink, weights, plan = residuals
    exchange, op = options.exchange, options.op
    dhome = Outputs(*forbid_second_derivative(op, [x for x in dhome[:2] if x is not None]))
    # A query is computed on one rank, so dq is rounded before it moves; dk and dv are sums.
    sum_dtype = None if options.expansion else dhome.out.dtype
    ends = list(itertools.accumulate(part.q.shape[2] for part in received))[:-1]
    cotangents = [jnp.split(x, ends, 1) for x in dhome[:2] if x is not None]
    sinks = [None] * len(received) if sink is None else jnp.split(sink, ends)
    parts = list(zip(received, out, lse, sinks, zip(*cotangents, strict=True), strict=True))

    def gradients(part, came):
        rows, out, lse, sink, _ = part
        whole = softmax_gradients(op, out, lse, Outputs(*(x[None] for x in came[0])))
        dq, dkv, dweights = gradients_of_received(options, rows, weights, whole)
        dsink = None if sink is None else sink_gradient(sink, whole)
        return dq, dkv, dsink, dweights

    def give_back(outputs):
        dq, dkv, *_ = outputs
        return exchanges.returned_qkv(exchange, plan, dq, dkv, sum_dtype)

    done = in_parts(
        exchange,
        parts[::-1],  # the part with most heads returns first
        gradients,
        send=lambda part: exchanges.sent_q(exchange, plan, part[-1]),
        give_back=give_back,
    )[::-1]
    dq, dkv = join([part.returned for part in done], 1)
    dsink = join([part.outputs[2] for part in done], 0)
    dweights = done[0].outputs[3]
    return operand_gradients(received[0], dq, dkv, dsink, dweights), None, None


_attend.defvjp(_forward, _backward)
