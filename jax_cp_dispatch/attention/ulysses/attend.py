"""Computes attention of this rank's tokens: of its share of the heads, over whole documents."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_cp_dispatch._dtypes import sum_dtype
from jax_cp_dispatch._ranks.axis import num_ranks_here
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._residuals import named_context, named_context_received
from jax_cp_dispatch.attention.arguments import check_rows
from jax_cp_dispatch.attention.attended import attended_tokens
from jax_cp_dispatch.attention.gather import gather_sequence
from jax_cp_dispatch.attention.kv_heads import kv_copies
from jax_cp_dispatch.attention.local.api import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local.derivative_order import (
    forbid_second_derivative,
    in_reverse_only,
)
from jax_cp_dispatch.attention.local.options import blocks_of_ranks
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.packed_mask import PackedMask
from jax_cp_dispatch.attention.rotating.layout import zigzag_permutation
from jax_cp_dispatch.attention.ulysses.exchange import HeadExchange
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.masks.read import check_mask_arrays
from jax_cp_dispatch.planner.segment_ids import read_documents


class _Call(NamedTuple):
    """The static part of a call."""

    options: AttentionOptions
    heads: HeadExchange
    copies: int  # of each KV head


def attend_ulysses(
    options: AttentionOptions,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    packed: PackedMask,
) -> Float[Array, "B T N Hv"]:
    """`ulysses_attention` with options, which name the public function."""
    op, exchange = options.op, options.exchange
    instead = "context_parallel_attention(..., algorithm='ulysses')"
    num_ranks = num_ranks_here(op, exchange.axis_name, instead)
    options.check()
    mask, segment_ids, positions = packed
    check_rows(op, q, k, v, segment_ids, positions)
    check_mask_arrays(op, mask, q.shape[:2])
    packed = PackedMask(mask, *read_documents(op, segment_ids, positions))
    check_heads(op, q.shape[2], num_ranks)
    B, T, N, _ = q.shape
    if B * T == 0:
        return jnp.zeros((B, T, N, v.shape[3]), q.dtype)
    q, k, v = in_reverse_only(op, [q, k, v])
    q, k, v = vary_alike([q, k, v], also=exchange.axis_names)
    heads = HeadExchange(exchange, num_ranks, options.layout)
    call = _Call(options, heads, kv_copies(N, k.shape[2], num_ranks))
    leaves, tree = jax.tree.flatten((q, k, v, token_ranges(heads, packed, (B, T))))
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


def token_ranges(heads: HeadExchange, packed: PackedMask, shape: tuple[int, int]) -> MaskRanges:
    """Returns what each token of the sequence sees."""
    num_tokens = shape[1] * heads.num_ranks
    if packed.segment_ids is None and packed.positions is not None:
        packed = packed._replace(segment_ids=jnp.ones(shape, jnp.int32))
    packed = gather_sequence(heads.exchange, packed, heads.num_ranks)
    if heads.layout == "zigzag":
        order = zigzag_permutation(num_tokens, heads.num_ranks, inverse=True)
        packed = jax.tree.map(lambda x: x[:, order], packed)
    leaves, tree = jax.tree.flatten(attended_tokens(packed, (shape[0], num_tokens)))
    return tree.unflatten(named_context(vary_alike(leaves, also=heads.exchange.axis_names)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q, k, v, ranges: MaskRanges):
    return _forward(call, q, k, v, ranges)[0]


def _forward(call: _Call, q, k, v, ranges: MaskRanges):
    q, *kv = forbid_second_derivative(call.options.op, [q, k, v])
    if call.copies > 1:
        kv = [jnp.repeat(x, call.copies, axis=2) for x in kv]
    q_there, k_there, v_there = named_context_received(call.heads.to_heads([q, *kv]))
    operands = q_there, k_there, v_there, ranges
    out, lse = named_context(attend_heads(call.options, *operands))
    (home,) = call.heads.to_tokens([out.astype(q.dtype)])
    return named_context(home), (operands, out, lse)


def _backward(call: _Call, residuals, dhome):
    operands, out, lse = residuals
    (dhome,) = forbid_second_derivative(call.options.op, [dhome])
    (dout,) = call.heads.to_heads([dhome])
    dq, *dkv = attend_heads_backward(call.options, operands, (out, lse, dout))
    if call.copies == 1:  # each gradient is final; gradients of copies are summed first
        dkv = [x.astype(dhome.dtype) for x in dkv]
    dq, *dkv = call.heads.to_tokens([dq.astype(dhome.dtype), *dkv])
    if call.copies > 1:
        dkv = [_sum_of_copies(x, call.copies).astype(dhome.dtype) for x in dkv]
    return dq, *dkv, None


_attend.defvjp(_forward, _backward)


def attend_heads(options: AttentionOptions, q, k, v, ranges: MaskRanges):
    """Computes local attention of whole sequences; returns output and lse, unrounded."""
    return local_attention(q, k, v, *ranges[:2], **_local_keywords(options, q, k, ranges))


def attend_heads_backward(options: AttentionOptions, operands, outputs):
    """Computes its derivative, unrounded; `outputs` are out, lse and dout."""
    q, k, v, ranges = operands
    keywords = _local_keywords(options, q, k, ranges)
    return local_attention_backward(q, k, v, *ranges[:2], *outputs, **keywords)


def _local_keywords(options: AttentionOptions, q, k, ranges: MaskRanges) -> dict[str, Any]:
    (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
    blocks = blocks_of_ranks(T, S, N, K, rows=256)
    of_keys = {"q_start": ranges.q_start, "q_end": ranges.q_end}
    return {
        "scale": options.scale,
        "logit_soft_cap": options.logit_soft_cap,
        **of_keys,
        **blocks,
    }


def _sum_of_copies(x: Float[Array, "B T copied H"], copies: int) -> Float[Array, "B T K H"]:
    x = x.reshape(*x.shape[:2], -1, copies, x.shape[3])
    return jnp.sum(x, axis=3, dtype=sum_dtype(x.dtype))
