"""Reads the arguments of MaxText's `AttentionOp.apply_attention`."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jax_cp_dispatch.attention import zigzag_permutation
from jax_cp_dispatch.masks import Causal, Full, Mask, SlidingWindow

_MASKS = ("bidirectional_mask", "indexer_mask", "compressed_mask", "decoder_segment_ids_kv")
_LACKING = ("previous_chunk", "sinks", *_MASKS)


def attention_keywords(self, query, key, value, decoder_segment_ids, **_) -> dict[str, Any]:
    """Returns keywords of `context_parallel_attention`; none if the sequence is not sharded."""
    dims = ("activation_batch_attn", "activation_q_length", "activation_heads")
    names = lambda axes: (axes,) if isinstance(axes, str) else tuple(axes or ())
    batch, sequence, heads = map(names, self._logical_to_mesh_axes(dims))
    if not sequence:
        return {}
    size = lambda axes: math.prod(self.mesh.shape[name] for name in axes)
    is_reordered, kind = self._load_balanced_context_parallel(), self.attention_type.value
    if kind == "chunk":  # each chunk is a document
        rows, chunk = jnp.arange(query.shape[1]), self.chunk_attn_window_size
        if is_reordered:
            rows = jnp.asarray(zigzag_permutation(rows.size, size(sequence)))
        ids = jnp.ones(query.shape[:2], jnp.int32)
        ids = ids if decoder_segment_ids is None else decoder_segment_ids
        chunks = ids * (rows.size // chunk + 1) + rows // chunk
        decoder_segment_ids = jnp.where(ids > 0, chunks, 0)
    return {
        **{"q": query, "k": key, "v": value, "segment_ids": decoder_segment_ids},
        **{"mesh": self.mesh, "axis_name": sequence, "head_axis": heads},
        "batch_axis": batch if query.shape[0] % size(batch) == 0 else (),
        "layout": "zigzag" if is_reordered else "contiguous",
        "mask": _mask(self, kind),
        "scale": 1.0,  # queries are scaled already
        "logit_soft_cap": self.attn_logits_soft_cap or None,
    }


def _mask(self, kind: str) -> Mask:
    if kind == "local_sliding" and self.sliding_window_size:
        return SlidingWindow(self.sliding_window_size)
    return Full() if kind == "full" else Causal()


def what_is_missing(self, query, key, record_max_logits=False, **given) -> str:
    """Names what `context_parallel_attention` lacks for a call; empty if nothing."""
    config, kind = self.config, self.attention_type.value
    found = [name for name in _LACKING if given.get(name) is not None]
    found += ["record_max_logits"] * record_max_logits + ["moba"] * config.moba
    found += [f"{kind} attention"] * (kind in ("compressed", "block_diffusion"))
    found += ["keys of another length"] * (query.shape[1] != key.shape[1])
    order = config.context_parallel_reorder_strategy.value
    is_ring = config.context_parallel_strategy == "ring" and "gpu" in config.hardware
    is_striped = order == "striped" or (order == "auto" and config.packing and is_ring)
    found += ["tokens in stripes"] * (self._load_balanced_context_parallel() and is_striped)
    return " and ".join(found)
