"""`PackedMask`: a mask within documents; the tokens that each token sees by it, as ranges."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.documents.fingerprint import order_fault
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.order import (
    document_ends,
    document_starts,
    follows_rules,
    gather_sequence,
    starts_in_order,
)
from jax_cp_dispatch.masks import MaskRanges


class PackedMask(NamedTuple):
    """A mask, and the documents within which it holds; a pytree of arrays `[B, T]`.

    Attributes:
      mask: a `Mask`: which keys of its document a query sees; or with a plan that knows the rest,
        its `MaskKind`.
      segment_ids, positions: the documents; see `context_parallel_attention`. Of whole batch rows,
        or of the columns of a rank.
    """

    mask: Any
    segment_ids: Any = None
    positions: Any = None

    def with_segment_ids(self, shape: tuple[int, int]) -> PackedMask:
        """Returns the same with segment ids; without them, each batch row is one document."""
        if self.segment_ids is not None:
            return self
        return self._replace(segment_ids=np.ones(shape, np.int32))


def attended_tokens(packed: PackedMask, shape: tuple[int, int]) -> MaskRanges:
    """Returns what each token sees, in columns of its batch row; empty ranges for padding.

    Args:
      packed: of the whole sequence, in order; without segment ids, each row is one document.
      shape: B and T.
    """
    return attended_in_order(packed, shape, False)[0]


def attended_in_order(
    packed: PackedMask, shape: tuple[int, int], checks_order: bool
) -> tuple[MaskRanges, Int32[Array, ""] | None]:
    """Returns `attended_tokens`, and the `order_fault` of the tokens if it is asked for."""
    mask, segment_ids, positions = packed
    in_order: Any = True
    if segment_ids is None:
        start, end = jnp.zeros(shape, jnp.int32), jnp.full(shape, shape[1], jnp.int32)
    else:
        if checks_order:
            start, in_order = starts_in_order(segment_ids, positions)
        else:
            start = document_starts(segment_ids, positions)
        end = document_ends(start)
    token = jnp.arange(shape[1], dtype=jnp.int32)
    is_token = start >= 0
    ranges = mask.clipped(shape[1]).ranges(token[None], start, end)
    ranges = jax.tree.map(lambda x: jnp.where(is_token, x, 0), ranges)
    if not checks_order:
        return ranges, None
    return ranges, order_fault(in_order, follows_rules(mask, start, end))


def gathered_ranges(
    exchange: CollectiveOptions,
    packed: PackedMask,
    shape: tuple[int, int],
    *,
    layout: str,
    checks_order: bool,
) -> tuple[MaskRanges, Int32[Array, ""] | None]:
    """Returns what each token of the sequence sees, from the columns of all ranks.

    Args:
      exchange: options of the call.
      packed: of this rank's columns.
      shape: B and T of this rank.
      layout: of the tokens on the ranks.
      checks_order: whether to return the `order_fault` of arrays that are given; else None.
    """
    num_ranks = jax.lax.axis_size(exchange.axis_name)
    num_tokens = shape[1] * num_ranks
    if packed.positions is not None:
        packed = jax.tree.map(jnp.asarray, packed.with_segment_ids(shape))
    packed = gather_sequence(exchange, packed, num_ranks)
    if layout == "zigzag":
        order = zigzag_permutation(num_tokens, num_ranks, inverse=True)
        packed = jax.tree.map(lambda x: x[:, order], packed)
    checks_order = checks_order and bool(jax.tree.leaves(packed))
    return attended_in_order(packed, (shape[0], num_tokens), checks_order)
