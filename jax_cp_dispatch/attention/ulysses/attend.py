"""Computes attention of this rank's tokens: of its share of the heads, over whole documents."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_cp_dispatch._dtypes import sum_dtype
from jax_cp_dispatch._ranks.axis import num_ranks_here
from jax_cp_dispatch._ranks.varying import vary_alike, vary_like
from jax_cp_dispatch._residuals import named_context, named_context_received
from jax_cp_dispatch.attention.local.api import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local.backward import SoftmaxGradients
from jax_cp_dispatch.attention.local.options import blocks_of_ranks
from jax_cp_dispatch.attention.local.sink import sink_gradient
from jax_cp_dispatch.attention.operands import Operands, Outputs, softmax_gradients
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.rotating.sequence import empty_outputs
from jax_cp_dispatch.attention.ulysses.exchange import HeadExchange
from jax_cp_dispatch.documents.fingerprint import fingerprint_of_order
from jax_cp_dispatch.documents.gather import gather_sequence
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.documents.ranges import attended_in_order
from jax_cp_dispatch.global_call.kv_heads import kv_copies
from jax_cp_dispatch.masks import MaskRanges


class _Call(NamedTuple):
    """The static part of a call."""

    options: AttentionOptions
    heads: HeadExchange
    copies: int  # of each KV head

    def share_of(self, x: Float[Array, " N"]) -> Float[Array, " share"]:
        """Returns the numbers of this rank's heads."""
        size = x.shape[0] // self.heads.num_ranks
        return lax.dynamic_slice_in_dim(x, self._first(size), size)

    def of_all_heads(
        self, share: Float[Array, " share"], others: Float[Array, " N"]
    ) -> Float[Array, " N"]:
        """Returns the numbers of all heads: those of this rank's, and of the others."""
        first = self._first(share.shape[0])
        return lax.dynamic_update_slice_in_dim(others, share.astype(others.dtype), first, 0)

    def max_of_all(self, share: Float[Array, " share"], num_heads: int) -> Float[Array, " N"]:
        """Returns the numbers of all heads, on all ranks."""
        axis_name = self.options.exchange.axis_name
        (none,) = vary_like([jnp.full(num_heads, -jnp.inf, share.dtype)], share)
        return lax.pmax(self.of_all_heads(share, none), axis_name)

    def _first(self, size: int) -> Int[Array, ""]:
        return lax.axis_index(self.options.exchange.axis_name) * size


def attend_ulysses(options: AttentionOptions, operands: Operands, packed: PackedMask) -> Outputs:
    """`ulysses_attention` with options, which name the public function."""
    op, exchange = options.op, options.exchange
    instead = "context_parallel_attention(..., algorithm='ulysses')"
    num_ranks = num_ranks_here(op, exchange.axis_name, instead)
    N = operands.q.shape[2]
    check_heads(op, N, num_ranks)
    heads = HeadExchange(exchange, num_ranks, options.layout)
    call = _Call(options, heads, kv_copies(N, operands.k.shape[2], num_ranks))
    return _attend_whole(call, operands, packed)


@partial(jax.jit, static_argnums=0)  # equal calls of a program are traced and lowered once
def _attend_whole(call: _Call, operands: Operands, packed: PackedMask) -> Outputs:
    """Computes attention of this rank's rows; the arguments are checked."""
    options, heads = call.options, call.heads
    B, T = operands.q.shape[:2]
    if B * T == 0:
        return empty_outputs(options, operands)
    operands = operands.varying(options.exchange)
    ranges, fault = token_ranges(options, heads, packed, (B, T))
    leaves, tree = jax.tree.flatten((operands, ranges, fault))
    return _attend(call, *tree.unflatten(vary_alike(leaves)))


def check_heads(op: str, num_heads: int, num_ranks: int) -> None:
    """Requires an equal share of the query heads for each rank."""
    if num_heads % num_ranks:
        raise ValueError(
            f"{op}: q has {num_heads} heads but there are {num_ranks} ranks, which must divide "
            "them: each rank computes a share of the heads. Pass algorithm='zigzag' or 'balanced' "
            "(inside jax.shard_map, call zigzag_ring_attention or balanced_attention), or use "
            "fewer ranks."
        )


def token_ranges(
    options: AttentionOptions, heads: HeadExchange, packed: PackedMask, shape: tuple[int, int]
) -> tuple[MaskRanges, Any]:
    """Returns what each token sees, and the `order_fault` of the tokens; None if there is none."""
    num_tokens = shape[1] * heads.num_ranks
    if packed.segment_ids is None and packed.positions is not None:
        packed = packed._replace(segment_ids=jnp.ones(shape, jnp.int32))
    packed = gather_sequence(heads.exchange, packed, heads.num_ranks)
    if heads.layout == "zigzag":
        order = zigzag_permutation(num_tokens, heads.num_ranks, inverse=True)
        packed = jax.tree.map(lambda x: x[:, order], packed)
    checks_order = options.checks_order and bool(jax.tree.leaves(packed))
    found = attended_in_order(packed, (shape[0], num_tokens), checks_order)
    leaves, tree = jax.tree.flatten(found)
    return tree.unflatten(named_context(vary_alike(leaves, also=heads.exchange.axis_names)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, operands: Operands, ranges: MaskRanges, fault) -> Outputs:
    return _forward(call, operands, ranges, fault)[0]


def _forward(call: _Call, operands: Operands, ranges: MaskRanges, fault):
    q, *kv, sink, _ = operands.derived_once(call.options.op)
    if call.copies > 1:
        kv = [jnp.repeat(x, call.copies, axis=2) for x in kv]
    fingerprint = None
    if fault is not None:
        here = lax.axis_index(call.options.exchange.axis_name)
        fingerprint = fingerprint_of_order(fault, here)
    q_there, k_there, v_there = named_context_received(call.heads.to_heads([q, *kv], fingerprint))
    received = q_there, k_there, v_there, ranges
    its_sink = None if sink is None else call.share_of(sink)
    out, lse, *max_logits = attend_heads(call.options, received, its_sink)
    if fault is not None:  # one rank, and XLA's collectives, raise no error
        out = jnp.where(fault == 0, out, jnp.nan)
    out, lse = named_context((out, lse))
    of_lse = [jnp.swapaxes(lse, 1, 2)[..., None]] if call.options.return_lse else []
    home, *of_lse = named_context(call.heads.to_tokens([out, *of_lse]))
    outputs = Outputs(
        home,
        of_lse[0][..., 0] if of_lse else None,
        call.max_of_all(max_logits[0], q.shape[2]) if max_logits else None,
    )
    return outputs, (received, out, lse, sink)


def _backward(call: _Call, residuals, cotangents: Outputs):
    received, out, lse, sink = residuals
    dhome, dlse, _ = cotangents
    of_lse = [] if dlse is None else [dlse[..., None]]
    dout, *of_lse = call.heads.to_heads([dhome, *of_lse])
    cotangents = Outputs(dout, of_lse[0][..., 0] if of_lse else None)
    whole = softmax_gradients(call.options.op, out, lse, cotangents)
    # Each gradient is final; those of copies are summed first.
    dkv_dtype = dhome.dtype if call.copies == 1 else None
    dtypes = {"dq_dtype": dhome.dtype, "dkv_dtype": dkv_dtype}
    dq, dk, dv = attend_heads_backward(call.options, received, whole, dtypes)
    dq, dk, dv = call.heads.to_tokens([dq, dk, dv])
    if call.copies > 1:
        dk, dv = (_sum_of_copies(x, call.copies).astype(dhome.dtype) for x in (dk, dv))
    dsink = None
    if sink is not None:
        dsink = call.of_all_heads(sink_gradient(call.share_of(sink), whole), jnp.zeros_like(sink))
    return Operands(dq, dk, dv, dsink), None, None


_attend.defvjp(_forward, _backward)


def attend_heads(options: AttentionOptions, operands, sink=None):
    """Computes local attention of whole sequences; returns the output in their dtype, and lse."""
    q, k, v, ranges = operands
    keywords = _local_keywords(options, q, k, ranges)
    asked = {"sink": sink, "return_max_logits": options.return_max_logits, "out_dtype": q.dtype}
    return local_attention(q, k, v, *ranges[:2], **keywords, **asked)


def attend_heads_backward(
    options: AttentionOptions, operands, whole: SoftmaxGradients, dtypes: dict[str, Any]
):
    """Computes its derivative, of these dtypes."""
    q, k, v, ranges = operands
    keywords = _local_keywords(options, q, k, ranges)
    k_start, k_end = ranges[:2]
    return local_attention_backward(q, k, v, k_start, k_end, *whole, **dtypes, **keywords)


def _local_keywords(options: AttentionOptions, q, k, ranges: MaskRanges) -> dict[str, Any]:
    (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
    blocks = blocks_of_ranks(T, S, N, K, rows=256)
    of_keys = {"q_start": ranges.q_start, "q_end": ranges.q_end}
    softmax = {"scale": options.scale, "logit_soft_cap": options.logit_soft_cap}
    return {**softmax, **of_keys, **blocks}


def _sum_of_copies(x: Float[Array, "B T copied H"], copies: int) -> Float[Array, "B T K H"]:
    x = x.reshape(*x.shape[:2], -1, copies, x.shape[3])
    return jnp.sum(x, axis=3, dtype=sum_dtype(x.dtype))
