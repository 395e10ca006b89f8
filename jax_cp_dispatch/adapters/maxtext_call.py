"""Reads the arguments of MaxText's `AttentionOp.apply_attention`, and its mask."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import permuted
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.ranges import PackedMask, attended_tokens
from jax_cp_dispatch.masks import (
    BlockCausal,
    Blocks,
    Causal,
    Chunked,
    Full,
    Mask,
    Ranges,
    SlidingWindow,
)
from jax_cp_dispatch.masks.mask import PACKED, Order, zigzag_order


def call_mask(self, segment_ids, is_image, batch: tuple[str, ...], order: Order) -> Mask:
    """Returns the mask of a call of `AttentionOp`.

    Chunks count as in MaxText: from the start of a document with load balance, of the row without.

    Args:
      self: the `AttentionOp`.
      segment_ids: `[B, T]`, or None.
      is_image: `bidirectional_mask`: tokens that see all tokens of their run; `[B, T]`, or None.
      batch: the mesh axes of the batch.
      order: of the stored tokens.
    """
    mask = _kind_mask(self)
    counts_from_row = order == PACKED and isinstance(mask, Chunked | BlockCausal)
    if is_image is None and not (counts_from_row and segment_ids is not None):
        return mask
    shape = (segment_ids if is_image is None else is_image).shape
    # Ranges are computed from whole rows in order.
    whole = [self._maybe_shard_with_pspec(x, PartitionSpec(batch)) for x in (segment_ids, is_image)]
    columns = None
    if order != PACKED:
        columns = zigzag_permutation(shape[1], order.num_ranks)
        whole = [x if x is None else x[:, np.argsort(columns)] for x in whole]
    segment_ids, is_image = whole
    packed = PackedMask(mask, None if counts_from_row else segment_ids)
    start, end, *_ = attended_tokens(packed, shape)
    if is_image is not None:
        start, end = jnp.minimum(start, _starts(is_image)), jnp.maximum(end, _ends(is_image))
    seen = Ranges(start, end)
    return permuted(seen, columns, order)


def _kind_mask(self) -> Mask:
    kind = self.attention_type.value
    if kind == "local_sliding" and self.sliding_window_size:
        return SlidingWindow(self.sliding_window_size)
    if kind == "chunk":
        return Chunked(self.chunk_attn_window_size)
    if kind == "block_diffusion":
        return BlockCausal(self.causal_block_size)
    return Full() if kind == "full" else Causal()


def _ends(is_image) -> jax.Array:
    """Returns one past the last column of the run of each image token; 0 for others."""
    return jnp.asarray(Blocks(is_image.astype(jnp.int32)).block_end)


def _starts(is_image) -> jax.Array:
    """Returns the first column of the run of each image token; T for others."""
    return is_image.shape[1] - _ends(is_image[:, ::-1])[:, ::-1]


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
    documents = token_documents(query, decoder_segment_ids, order)
    return {
        **{"q": query, "k": key, "v": value, "documents": documents},
        **{"mesh": self.mesh, "axis_name": sequence, "head_axis": heads, "batch_axis": batch},
        "mask": call_mask(self, *tokens, batch, order),
        "sink": None if sinks is None else jnp.asarray(sinks),  # of a Param
        "return_max_logits": bool(given.get("record_max_logits")),
        "scale": 1.0,  # queries are scaled already
        "logit_soft_cap": self.attn_logits_soft_cap or None,
    }


def token_documents(query, segment_ids, order: Order) -> Documents | None:
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
