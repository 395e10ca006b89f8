"""Attention for `equinox.nn.MultiheadAttention`, which takes no attention function of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch.adapters.documents import document_keywords, refuse_dropout
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.documents import Documents

_OP = "equinox_attention"


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
    refuse_dropout(_OP, layer.dropout.p, inference, "inference")
    of_tokens = lambda linear, x: jax.vmap(jax.vmap(linear))(x)
    projections = layer.query_proj, layer.key_proj, layer.value_proj
    heads = tuple(
        of_tokens(linear, x).reshape(*x.shape[:2], layer.num_heads, -1)
        for linear, x in zip(projections, (query, key_, value), strict=True)
    )
    if process_heads is not None:
        heads = jax.vmap(process_heads)(*heads)
    out = context_parallel_attention(*heads, **document_keywords(_OP, mask), **options)
    return of_tokens(layer.output_proj, out.reshape(*out.shape[:2], -1))
