"""Attention for the multi-head layers of Flax (NNX and Linen) and Equinox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.masks.read import read_mask


def document_keywords(op: str, mask: Any) -> dict[str, Any]:
    """Returns keywords of `context_parallel_attention`, from a layer's `mask`."""
    if mask is None:
        return {}
    if not isinstance(mask, Documents):
        raise TypeError(
            f"{op}: mask is of type {type(mask).__name__}, but no [T, T] mask is ever read. Pass "
            "mask=Documents(segment_ids), or omit it; its own mask= takes an object of "
            "jax_cp_dispatch.masks."
        )
    return {"documents": mask}


def refuse_dropout(op: str, rate: float, is_off: bool | None, switch: str) -> None:
    if rate > 0 and not is_off:
        raise NotImplementedError(
            f"{op}: got a dropout rate of {rate}, but attention weights are never stored, so none "
            f"can be dropped. Set the rate to 0, or pass {switch}=True."
        )


_FLAX = "flax_attention_fn"


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
        refuse_dropout(_FLAX, dropout_rate, deterministic, "deterministic")
        of_weights = {
            "bias": bias,
            "sow_weights": module,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        for name, given in of_weights.items():
            if given is not None:
                raise NotImplementedError(
                    f"{_FLAX}: got {name}, but attention weights are never stored. Omit it."
                )
        keywords = document_keywords(_FLAX, mask) | options
        attended = read_mask(_FLAX, options.get("mask", getattr(mask, "mask", None)))
        if is_causal and not attended.is_causal:
            raise ValueError(
                f"{_FLAX}: got is_causal=True from the layer, but mask={attended}. Omit one of "
                "them."
            )
        dtype = dtype or jnp.result_type(query, key, value)
        qkv = (x.astype(dtype) for x in (query, key, value))
        return context_parallel_attention(*qkv, **keywords)

    return attention_fn


# ---- Attention for `equinox.nn.MultiheadAttention`, which takes no attention function of its own.

_EQUINOX = "equinox_attention"


def equinox_attention(
    layer: Any,
    query: Float[HostOrDevice, "B T q_size"],
    key_: Float[HostOrDevice, "B T k_size"],
    value: Float[HostOrDevice, "B T v_size"],
    mask: Documents | None = None,
    *,
    key: Any = None,
    inference: bool | None = None,
    process_heads: Callable[..., Any] | None = None,
    **options: Any,
) -> Float[Array, "B T o_size"]:
    """Computes an `equinox.nn.MultiheadAttention` layer over a sequence that is sharded.

    Takes the arguments of the layer, but whole batches: do not call it under `jax.vmap`. Call it
    outside `jax.shard_map`. Differentiable as `context_parallel_attention`, and in the layer.

    Args:
      layer: the layer, whose projections are used.
      query, key_, value: inputs of the layer, global arrays.
      mask: the documents of the batch; None: each batch row is one document.
      key: not read, since dropout is rejected.
      inference: as in the layer.
      process_heads: as in the layer, for one batch row.
      options: keywords of `context_parallel_attention`, except those that `Documents` has.
        Attention is causal unless `Documents` has a mask.
    Returns:
      The output of the layer, sharded as `query`.
    Raises:
      TypeError, ValueError: the mask is an array; and see `context_parallel_attention`.
      NotImplementedError: dropout of attention weights.
    """
    inference = layer.dropout.inference if inference is None else inference
    refuse_dropout(_EQUINOX, layer.dropout.p, inference, "inference")
    of_tokens = lambda linear, x: jax.vmap(jax.vmap(linear))(x)
    projections = layer.query_proj, layer.key_proj, layer.value_proj
    heads = tuple(
        of_tokens(linear, x).reshape(*x.shape[:2], layer.num_heads, -1)
        for linear, x in zip(projections, (query, key_, value), strict=True)
    )
    if process_heads is not None:
        heads = jax.vmap(process_heads)(*heads)
    out = context_parallel_attention(*heads, **document_keywords(_EQUINOX, mask), **options)
    return of_tokens(layer.output_proj, out.reshape(*out.shape[:2], -1))
