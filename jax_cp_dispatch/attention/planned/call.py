"""Common parts of the algorithms that follow a plan: checks, rows and blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.latents import UNUSED_ROW
from jax_cp_dispatch.attention.local.api import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local.backward import SoftmaxGradients
from jax_cp_dispatch.attention.local.blocks import attended_keys
from jax_cp_dispatch.attention.local.options import blocks_of_ranks
from jax_cp_dispatch.attention.operands import Operands, Outputs, rounded
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.documents.fingerprint import rank_fingerprint
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.planner import Plan
from jax_cp_dispatch.planner.stack import is_stack


class Received(NamedTuple):
    """What a rank attends, `[1, rows, ...]`.

    Attributes:
      q: queries.
      kv: keys and values, or arrays of latent rows.
      ranges: of rows of keys that each query sees, and of queries that see each key.
    """

    q: Any
    kv: Any
    ranges: MaskRanges

    def rows_to_expand(self) -> list[Any]:
        """Returns latent rows, without those that no query reads."""
        is_key = attended_keys(*self.ranges[:2], self.kv[0].shape[1])[0, :, None]
        return [jnp.where(is_key, x[0, :, 0], UNUSED_ROW) for x in self.kv]


def check_call(
    options: AttentionOptions,
    operands: Operands,
    plan: Plan,
    packed: PackedMask,
) -> None:
    """Requires that the rows match each other and the plan."""
    q = operands.q
    is_placed = plan.is_placed
    advice = "Place the tokens" if is_placed else "Plan with the segment ids"
    if packed.positions is not None and packed.segment_ids is None:
        raise ValueError(
            f"{options.op}: got a plan and positions without segment_ids, which mark the padding, "
            "whose positions are ignored. Pass both, or segment_ids alone."
        )
    if is_stack(plan):
        raise ValueError(
            f"{options.op}: got stacked plans, of {list(plan.fingerprint.shape[:-2])}. Pass one of "
            "them: each step of jax.lax.scan has its own, and jax.tree.map(lambda x: x[i], plans) "
            "is the i-th."
        )
    num_tokens = q.shape[0] * q.shape[1]
    if num_tokens != plan.num_tokens:
        raise ValueError(
            f"{options.op}: a rank holds {q.shape[0]} x {q.shape[1]} = {num_tokens} rows but "
            f"the plan is for {plan.num_tokens}. {advice} of this batch."
        )
    if q.shape[0] != plan.batch:  # as many rows, of other columns
        raise ValueError(
            f"{options.op}: a rank holds {q.shape[0]} x {q.shape[1]} rows but the plan is for "
            f"{plan.batch} x {plan.num_tokens // plan.batch}. {advice} of this batch."
        )


def fingerprint_of_call(
    options: AttentionOptions, plan: Plan, packed: PackedMask
) -> Int32[Array, " 9"]:
    """Returns what a rank compares: checksums of the plan, and of the ids and positions here."""
    rank = jax.lax.axis_index(options.exchange.axis_name)
    mask, segment_ids, positions = packed
    return rank_fingerprint(plan.fingerprint, rank, segment_ids, positions, mask)


@partial(jax.jit, static_argnums=(0, 1))  # equal calls of a program are traced and lowered once
def attend_rows(
    attend: Callable[..., Any],
    options: AttentionOptions,
    operands: Operands,
    *plan: Any,
) -> Outputs:
    """Calls `attend(options, operands, *plan)` on the concatenated rows of all batch rows."""
    q, k, v, *others = operands.varying(options.exchange)
    q, k, v = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v))
    out, lse, max_logits = attend(options, Operands(q, k, v, *others), *plan)
    by_batch = lambda x: x.reshape(*operands.q.shape[:2], *x.shape[1:])
    return Outputs(by_batch(out), None if lse is None else by_batch(lse), max_logits)


def ranges_here(options: AttentionOptions, plan: Plan) -> MaskRanges:
    """Returns what the rows of this rank see."""
    ranges = named_context(plan.local_ranges(jax.lax.axis_index(options.exchange.axis_name)))
    return MaskRanges(*(x[None] for x in ranges))


def received_rows(ranges: MaskRanges, q: Any, kv: Any) -> Received:
    """Returns received rows, and what they see."""
    q, kv = jax.tree.map(lambda x: x[None], (q, tuple(kv)))
    return Received(q, kv, ranges)


def attend_received(options: AttentionOptions, received: Received, sink=None, weights: Any = None):
    """Returns the output in the dtype of q, and its lse.

    Both are final: all keys of a query are on its rank. Also returns the largest logits here, if
    they are asked for, otherwise None.
    """
    q, kv, ranges = received
    if options.expansion is not None:
        kv = [x[None] for x in options.expansion(weights, received.rows_to_expand())]
    k, v = kv
    out, lse, *max_logits = attend_locally(options, q, k, v, ranges, sink=sink)
    return *named_context((out, lse)), *(max_logits or [None])


def of_all_ranks(options: AttentionOptions, max_logits: Any) -> Any:
    """Returns the largest logits of all ranks."""
    return None if max_logits is None else jax.lax.pmax(max_logits, options.exchange.axis_name)


def gradients_of_received(
    options: AttentionOptions, received: Received, weights: Any, whole: SoftmaxGradients
) -> tuple[Any, Any, Any]:
    """Returns the gradients of received queries in their dtype, those of rows, and of the weights.

    Rows are not yet rounded, because several ranks sum them.
    """
    q, kv, ranges = received
    if options.expansion is None:
        k, v = kv
        dq, *dkv = attend_locally_backward(options, q, k, v, ranges, *whole)
        return dq[0], [x[0] for x in dkv], None
    (k, v), transpose = options.expansion.with_transpose(weights, received.rows_to_expand())
    dq, dk, dv = attend_locally_backward(options, q, k[None], v[None], ranges, *whole)
    dweights, drows = transpose(dk[0], dv[0])
    return dq[0], [None if x is None else x[:, None] for x in drows], rounded(dweights, weights)


def operand_gradients(received: Received, dq, dkv, dsink, dweights) -> Operands:
    """Returns the gradients of all operands, from those of what moved, summed over the ranks."""
    if dweights is None:
        dk, dv = dkv
        return Operands(dq, dk, dv, dsink)
    return Operands(dq, rounded(dkv, received.kv), None, dsink, dweights)


def attend_locally(options: AttentionOptions, q, k, v, ranges: MaskRanges, sink=None):
    """Computes `local_attention` of the rows that a rank holds; the output in their dtype."""
    asked = {"sink": sink, "return_max_logits": options.return_max_logits, "out_dtype": q.dtype}
    keywords = _local_keywords(options, q, k, ranges)
    return local_attention(q, k, v, *ranges[:2], **asked, **keywords)


def attend_locally_backward(options: AttentionOptions, q, k, v, ranges: MaskRanges, *whole):
    """Computes its derivative: dq in the dtype of q, dk and dv unrounded."""
    keywords = _local_keywords(options, q, k, ranges)
    return local_attention_backward(q, k, v, *ranges[:2], *whole, dq_dtype=q.dtype, **keywords)


def _local_keywords(options: AttentionOptions, q, k, ranges: MaskRanges) -> dict[str, Any]:
    (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
    # Blocks of 256 rows, as in a ring, compute up to 40 % more pairs, each in less time: 0.99 to
    # 1.02 of the time, in the mean of 11 batches on 2 cores, with and without the backward pass.
    blocks = blocks_of_ranks(T, S, N, K, rows=128)
    of_keys = {"q_start": ranges.q_start, "q_end": ranges.q_end}
    return {"scale": options.scale, "logit_soft_cap": options.logit_soft_cap, **of_keys, **blocks}
