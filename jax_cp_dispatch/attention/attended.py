"""The tokens that each token of packed rows sees, as ranges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch.attention.packed_mask import PackedMask
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.planner.block_grid import document_ends, document_starts
from jax_cp_dispatch.planner.fingerprint import order_fault
from jax_cp_dispatch.planner.order import follows_rules, is_in_order


def attended_tokens(packed: PackedMask, shape: tuple[int, int]) -> MaskRanges:
    """Returns what each token sees, in columns of its batch row; empty ranges for padding.

    Args:
      packed: of the whole sequence, in order; without segment ids, each row is one document.
      shape: B and T.
    """
    mask, num_tokens = packed.mask, shape[1]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    start, end = _edges(packed, shape)
    ranges = mask.clipped(num_tokens).ranges(token[None], start, end)
    return jax.tree.map(lambda x: jnp.where(start >= 0, x, 0), ranges)


def order_of(packed: PackedMask, shape: tuple[int, int]) -> Int32[Array, ""]:
    """Returns the `order_fault` of the tokens; arguments as in `attended_tokens`."""
    mask, segment_ids, positions = packed
    in_order = True if segment_ids is None else is_in_order(segment_ids, positions)
    return order_fault(in_order, follows_rules(mask, *_edges(packed, shape)))


def _edges(packed: PackedMask, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Returns the first column of the document of each token, -1 for padding, and its end."""
    if packed.segment_ids is None:
        return jnp.zeros(shape, jnp.int32), jnp.full(shape, shape[1], jnp.int32)
    start = document_starts(packed.segment_ids, packed.positions)
    return start, document_ends(start)
