"""What queries see inside `jit`: the keys and pairs of each column of packed rows, for any mask."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch._scans import running_max
from jax_cp_dispatch.documents.starts import document_ends
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.pairs import traced_pairs_per_query


class SeenColumns(NamedTuple):
    """Keys of each column, which never decrease in global order, and contain its own.

    Attributes:
      first: the first key of the column and of later ones; -1 at padding.
      last: one past the last key of the column and of earlier ones; None: its own key.
      pairs: keys that the query sees; None: all of these.
      lengths: tokens of its document; None: its keys do not depend on them.
      ranges: of a mask with arrays, what the column sees; empty at padding.
    """

    first: Int32[Array, "B T"]
    last: Int32[Array, "B T"] | None = None
    pairs: Int32[Array, "B T"] | None = None
    lengths: Int32[Array, "B T"] | None = None
    ranges: MaskRanges | None = None


def seen_columns(mask: Mask, starts: Int32[Array, "B T"]) -> SeenColumns:
    """Returns what the columns see.

    Args:
      mask: its arrays, if any, are `[B, T]`.
      starts: the first column of each column's document; -1 at padding.
    """
    if not isinstance(mask, StaticMask):
        return _of_arrays(mask, starts)
    first = _first_keys(mask, starts)
    if mask.is_causal:
        return SeenColumns(first)
    ends = document_ends(starts)
    last = _last_keys(mask, starts, ends)
    pairs = jnp.where(starts >= 0, last - first, 0)
    return SeenColumns(first, last, pairs, ends - starts)


def ranges_of_columns(mask: StaticMask, starts: Int32[Array, "B T"]) -> MaskRanges:
    """Returns what each column sees; empty at padding."""
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    ends = None if mask.is_causal else document_ends(starts)
    ranges = mask.clipped(num_tokens).ranges(column, starts, ends)
    return jax.tree.map(lambda x: jnp.where(starts >= 0, x, 0), ranges)


def _first_keys(mask: StaticMask, starts: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns the first column that each column sees; -1 at padding."""
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    first = mask.clipped(num_tokens).k_start(column, starts)
    return starts if first is starts else jnp.where(starts >= 0, first, -1)


def _last_keys(
    mask: StaticMask, starts: Int32[Array, "B T"], ends: Int32[Array, "B T"]
) -> Int32[Array, "B T"]:
    """Returns one past the last column that each column sees; 0 at padding."""
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    return jnp.where(starts >= 0, mask.clipped(num_tokens).k_end(column, starts, ends), 0)


def _of_arrays(mask: Mask, starts: Int32[Array, "B T"]) -> SeenColumns:
    num_tokens = starts.shape[1]
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    live = starts >= 0
    ranges = mask.ranges(column, starts, document_ends(starts))
    inside = lambda x: jnp.where(live, jnp.clip(x, 0, num_tokens), 0).astype(jnp.int32)
    ranges = jax.tree.map(inside, ranges)
    sees = ranges.k_start < ranges.k_end
    first = jnp.where(sees, jnp.minimum(ranges.k_start, column), column)
    first = -running_max(-jnp.where(live, first, num_tokens)[:, ::-1])[:, ::-1]
    last = None
    if not mask.is_causal:
        last = jnp.where(sees, jnp.maximum(ranges.k_end, column + 1), column + 1)
        last = running_max(jnp.where(live, last, 0))
    pairs = traced_pairs_per_query(ranges, is_causal=mask.is_causal)
    return SeenColumns(jnp.where(live, first, -1), last, pairs, ranges=ranges)
