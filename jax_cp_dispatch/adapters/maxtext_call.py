"""Reads the arguments of MaxText's `AttentionOp.apply_attention`."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jax_cp_dispatch.adapters.maxtext_mask import mask_of_call
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.masks.token_order import PACKED, Order, zigzag_order

_LACKING = ("previous_chunk", "indexer_mask", "compressed_mask", "decoder_segment_ids_kv")


def attention_keywords(
    self, query, key, value, decoder_segment_ids, sinks=None, **given
) -> dict[str, Any]:
    """Returns keywords of `context_parallel_attention`; none if the sequence is not sharded."""
    dims = ("activation_batch_attn", "activation_q_length", "activation_heads")
    names = lambda axes: (axes,) if isinstance(axes, str) else tuple(axes or ())
    batch, sequence, heads = map(names, self._logical_to_mesh_axes(dims))
    if not sequence:
        return {}
    size = lambda axes: math.prod(self.mesh.shape[name] for name in axes)
    batch = batch if query.shape[0] % size(batch) == 0 else ()
    is_reordered = self._load_balanced_context_parallel()
    order = zigzag_order(size(sequence)) if is_reordered else PACKED
    tokens = decoder_segment_ids, given.get("bidirectional_mask")
    documents = documents_of_tokens(query, decoder_segment_ids, order)
    return {
        **{"q": query, "k": key, "v": value, "documents": documents},
        **{"mesh": self.mesh, "axis_name": sequence, "head_axis": heads, "batch_axis": batch},
        "mask": mask_of_call(self, *tokens, batch, order),
        "sink": None if sinks is None else jnp.asarray(sinks),  # of a Param
        "return_max_logits": bool(given.get("record_max_logits")),
        "scale": 1.0,  # queries are scaled already
        "logit_soft_cap": self.attn_logits_soft_cap or None,
    }


def documents_of_tokens(query, segment_ids, order: Order) -> Documents | None:
    """Returns the documents of tokens that are in this order already."""
    if segment_ids is None and order == PACKED:
        return None
    if segment_ids is None:
        segment_ids = jnp.ones(query.shape[:2], jnp.int32)
    return Documents.in_order(segment_ids, None, (), order=order, columns=query.shape[1])


def what_is_missing(self, query, key, **given) -> str:
    """Names what `context_parallel_attention` lacks for a call; empty if nothing."""
    config, kind = self.config, self.attention_type.value
    found = [name for name in _LACKING if given.get(name) is not None]
    found += ["moba"] * config.moba + ["compressed attention"] * (kind == "compressed")
    found += ["keys of another length"] * (query.shape[1] != key.shape[1])
    order = config.context_parallel_reorder_strategy.value
    is_ring = config.context_parallel_strategy == "ring" and "gpu" in config.hardware
    is_striped = order == "striped" or (order == "auto" and config.packing and is_ring)
    found += ["tokens in stripes"] * (self._load_balanced_context_parallel() and is_striped)
    return " and ".join(found)
