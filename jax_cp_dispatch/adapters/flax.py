"""Attention for the multi-head layers of Flax, NNX and Linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch.adapters.documents import document_keywords, refuse, refuse_dropout
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.masks.read import read_mask

_OP = "flax_attention_fn"


def flax_attention_fn(**options: Any) -> Callable[..., Array]:
    """Returns an `attention_fn` for `flax.nnx.MultiHeadAttention` and Linen's layers.

    Linen's layers are `MultiHeadDotProductAttention` and its alias `MultiHeadAttention`. Call the
    layer on global arrays [B, T, features], outside `jax.shard_map`. Pass the documents of a batch
    as `layer(x, mask=Documents(segment_ids=...))`; without a mask, each batch row is one document.
    Differentiable as `context_parallel_attention`. Sums are float32 for every `precision`.

    Args:
      options: keywords of `context_parallel_attention`, except those that `Documents` has.
        Attention is causal unless a mask is passed here or in `Documents`.
    Raises:
      TypeError, ValueError: in the layer: the mask is an array; see also
        `context_parallel_attention`.
      NotImplementedError: in the layer: dropout of attention weights, a bias, `sow_weights`, own
        einsums.
    """

    def attention_fn(
        query, key, value, bias=None, mask=None, broadcast_dropout=True, dropout_rng=None,
        dropout_rate=0.0, deterministic=False, dtype=None, precision=None, module=None,
        is_causal=False, force_fp32_for_softmax=False, qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):  # fmt: skip  # Linen passes on only those arguments that the signature names
        refuse_dropout(_OP, dropout_rate, deterministic, "deterministic")
        reason = "attention weights are never stored"
        refuse(_OP, reason, bias=bias, sow_weights=module)
        refuse(_OP, reason, qk_attn_weights_einsum=qk_attn_weights_einsum)
        refuse(_OP, reason, attn_weights_value_einsum=attn_weights_value_einsum)
        keywords = document_keywords(_OP, mask) | options
        attended = read_mask(_OP, options.get("mask", getattr(mask, "mask", None)))
        if is_causal and not attended.is_causal:
            raise ValueError(
                f"{_OP}: got is_causal=True from the layer, but mask={attended}. Omit one of them."
            )
        dtype = dtype or jnp.result_type(query, key, value)
        qkv = (x.astype(dtype) for x in (query, key, value))
        return context_parallel_attention(*qkv, **keywords)

    return attention_fn
