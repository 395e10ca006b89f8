"""Placed attention: queries stay, keys and values move as a placement requires."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._dispatch import move
from jax_cp_dispatch._ranks.axis import AxisName, num_ranks_here
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch._residuals import named_context_received
from jax_cp_dispatch.attention.check_arguments import read_rows_of_plan
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
from jax_cp_dispatch.attention.planned.overlap import cut_softmax, in_parts, join, parts_of_heads
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planner import Plan
from jax_cp_dispatch.planner.stack import check_plan


@explains_peer_arguments
def placed_attention(
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
    """Computes attention over packed documents whose tokens `place_tokens` has placed.

    Every rank receives the keys and values to which its queries attend; nothing else moves. Call
    inside `jax.shard_map` over `axis_name`, on every rank of the axis.

    Differentiable once, in reverse mode: the gradients of keys and values return by the transpose
    of the same exchange, are summed over the ranks in float32, and rounded once. Residuals per
    rank: q, the received k and v, the output, and its lse.

    Args:
      q: this rank's queries, in placed order.
      k: this rank's keys, in the dtype of q; K divides N.
      v: this rank's values.
      plan: with the mask; `Placement.plan`, or this rank's slice of it (`in_specs=P(axis_name)`).
      axis_name: the mesh axis of the ranks, or several, major axis first.
      mask: None is that of the plan; another one is refused.
      segment_ids, positions: this rank's columns in placed order (`Placement.apply`). Only the plan
        determines attention; these are compared with it by a checksum, see `Plan.validate`.
        Positions need the ids. Without ids, a plan of another batch is not detected.
      sink, return_lse, return_max_logits: see `context_parallel_attention`.
      scale, logit_soft_cap, implementation, deadline, num_comm_sm: see `balanced_attention`.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes or dtypes do not match each other, the plan or the axis.
      jax.errors.JaxRuntimeError: at run time, on all ranks: the plan was made for another batch, or
        is a fallback; a rank has the part of another rank, or of another plan; or as `dispatch`.
        With `implementation="xla"` the output is NaN instead.
    """
    exchange = read_options(
        "placed_attention",
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
    instead = "context_parallel_attention(..., algorithm='placed')"
    num_ranks_here(options.op, axis_name, instead)
    check_plan(options.op, plan, is_placed=True)
    operands = Operands(q, k, v, sink)
    packed = read_rows_of_plan(options.op, operands, plan, mask, segment_ids, positions)
    outputs = attend_placed(options, operands, plan, packed)
    return options.returned(outputs)


def attend_placed(
    options: AttentionOptions, operands: Operands, plan, packed: PackedMask
) -> Outputs:
    """`placed_attention` with options, which name the public function."""
    check_call(options, operands, plan, packed)
    fingerprint = fingerprint_of_call(options, plan, packed)
    return attend_rows(_attend, options, operands, plan, fingerprint)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, operands: Operands, plan, fingerprint) -> Outputs:
    return _forward(options, operands, plan, fingerprint)[0]


def send(options, q, kv, plan, fingerprint) -> Received:
    """Sends keys and values."""
    arguments = exchanges.sent_kv(options.exchange, plan, kv, fingerprint)
    (received,) = move(options.exchange, arguments)
    return received_rows(ranges_here(options, plan), q, received)


def _forward(options, operands: Operands, plan, fingerprint):
    operands = operands.derived_once(options.op)
    heads, ranges = parts_of_heads(options, operands), ranges_here(options, plan)

    def attend(part: Operands, received):
        received = received_rows(ranges, part.q, named_context_received(received[0]))
        return received, attend_received(options, received, part.sink, part.weights)

    done = in_parts(
        options.exchange,
        [part.operands(operands) for part in heads],
        attend,
        send=lambda part: exchanges.sent_kv(options.exchange, plan, part.moved, fingerprint),
    )
    received, computed = zip(*(part.outputs for part in done), strict=True)
    out, lse, max_logits = map(join, zip(*computed, strict=True), (2, 1, 0))
    returned_lse = lse[0].T if options.return_lse else None
    outputs = Outputs(out[0], returned_lse, of_all_ranks(options, max_logits))
    return outputs, (received, out, lse, operands.sink, operands.weights, plan)


def _backward(options, residuals, cotangents: Outputs):
    received, out, lse, sink, weights, plan = residuals
    cotangents = jax.tree.map(lambda x: x[None], cotangents)
    whole = softmax_gradients(options.op, out, lse, cotangents)
    sum_dtype = None if options.expansion else whole.dout.dtype

    softmax = cut_softmax(whole, [part.q.shape[2] for part in received])
    done = in_parts(
        options.exchange,
        list(zip(received, softmax, strict=True))[::-1],  # the part with most heads returns first
        lambda part, _: gradients_of_received(options, part[0], weights, part[1]),
        give_back=lambda outputs: exchanges.returned_kv(
            options.exchange, plan, outputs[1], sum_dtype
        ),
    )[::-1]
    dq = join([part.outputs[0] for part in done], 1)
    dkv = join([part.returned[0] for part in done], 1)
    dweights = done[0].outputs[2]
    dsink = None if sink is None else sink_gradient(sink, whole)
    gradients = operand_gradients(received[0], dq, dkv, dsink, dweights)
    return gradients, None, None


_attend.defvjp(_forward, _backward)
