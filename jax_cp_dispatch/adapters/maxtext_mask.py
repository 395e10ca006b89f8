"""The mask of a call of MaxText's attention, as an object of `masks`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_cp_dispatch.documents.documents import permuted
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.documents.ranges import attended_tokens
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
from jax_cp_dispatch.masks.token_order import PACKED, Order


def mask_of_call(self, segment_ids, is_image, batch: tuple[str, ...], order: Order) -> Mask:
    """Returns the mask of a call of `AttentionOp`.

    Chunks count as in MaxText: from the start of a document with load balance, of the row without.

    Args:
      self: the `AttentionOp`.
      segment_ids: `[B, T]`, or None.
      is_image: `bidirectional_mask`: tokens that see all tokens of their run; `[B, T]`, or None.
      batch: the mesh axes of the batch.
      order: of the stored tokens.
    """
    mask = _mask_of_kind(self)
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


def _mask_of_kind(self) -> Mask:
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
