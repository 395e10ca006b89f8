"""The tokens that each token of packed rows sees, as ranges."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_cp_dispatch.attention.packed_mask import PackedMask
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.planner.block_grid import document_ends, document_starts


def attended_tokens(packed: PackedMask, shape: tuple[int, int]) -> MaskRanges:
    """Returns what each token sees, in columns of its batch row; empty ranges for padding.

    Args:
      packed: of the whole sequence, in order; without segment ids, each row is one document.
      shape: B and T.
    """
    mask, segment_ids, positions = packed
    num_tokens = shape[1]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if segment_ids is None:
        start, end = jnp.zeros(shape, jnp.int32), jnp.full(shape, num_tokens, jnp.int32)
        live = jnp.ones(shape, bool)
    else:
        start = document_starts(segment_ids, positions)
        live = start >= 0
        end = document_ends(start)
    ranges = mask.clipped(num_tokens).ranges(token[None], start, end)
    return jax.tree.map(lambda x: jnp.where(live, x, 0), ranges)
