"""Reads the ranges of `local_attention`, given as rows or by a mask."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._arguments import clip_to_int32, is_on_host
from jax_cp_dispatch.attention.local.blocks import RowRanges
from jax_cp_dispatch.attention.local.check_operands import check_arrays
from jax_cp_dispatch.attention.local.local_options import CAUSAL, FULL
from jax_cp_dispatch.attention.local.query_ranges import KeyQueries
from jax_cp_dispatch.documents.given import check_document_mask
from jax_cp_dispatch.documents.ranges import PackedMask, attended_tokens
from jax_cp_dispatch.documents.segment_ids import check_documents, read_documents
from jax_cp_dispatch.documents.table import from_segment_ids
from jax_cp_dispatch.masks import Causal, Full, MaskRanges
from jax_cp_dispatch.masks.read import check_mask_arrays, read_mask


def read_ranges(
    op: str, shapes: tuple[Any, Any], given: MaskRanges, packed: PackedMask | None
) -> RowRanges:
    """Returns the ranges of rows; of a mask, if none are given and `packed` is.

    Args:
      shapes: of q and of k.
    """
    (B, T), S = shapes[0][:2], shapes[1][1]
    if packed is not None and given.k_start is None and given.k_end is None:
        if given.q_start is not None or given.q_end is not None:
            raise TypeError(
                f"{op}: got q_start or q_end without kv_start and kv_end. Pass all four, or "
                "mask=masks.Ranges(...)."
            )
        return _of_mask(op, (B, T, S), packed)
    if packed is not None and any(x is not None for x in packed):
        raise TypeError(
            f"{op}: got ranges of keys, and a mask or documents. Pass either kv_start and kv_end, "
            "or mask, segment_ids and positions."
        )
    check_arrays(op, kv_start=given.k_start, kv_end=given.k_end)
    _check(op, "kv", (given.k_start, given.k_end), (B, T), "one range per query row")
    if given.q_start is not None or given.q_end is not None:
        check_arrays(op, q_start=given.q_start, q_end=given.q_end)
        _check(op, "q", (given.q_start, given.q_end), (B, S), "one range per key row")
    return ranges_of_rows(given, (B, T))


def ranges_of_rows(given: MaskRanges, shape: tuple[int, ...]) -> RowRanges:
    """Returns the ranges of checked rows; `shape` is B and T."""
    k_start, k_end = clip_to_int32(given.k_start), clip_to_int32(given.k_end)
    if given.q_start is None:
        return RowRanges(k_start, k_end)
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    start, end = (jnp.clip(clip_to_int32(x), 0, shape[1]) for x in (given.q_start, given.q_end))
    return RowRanges(k_start, k_end, KeyQueries(index, start, end))


def dense_ranges(shapes: tuple[Any, Any], given: MaskRanges, packed: PackedMask) -> str | None:
    """Returns how ranges that `read_ranges` has checked are dense, if that is known."""
    is_of_mask = all(x is None for x in (*given, packed.segment_ids, packed.positions))
    if not is_of_mask:
        return None
    mask = read_mask("local_attention", packed.mask).simplified()
    if isinstance(mask, Full):
        return FULL
    return CAUSAL if isinstance(mask, Causal) and shapes[0][1] == shapes[1][1] else None


def _of_mask(op: str, sizes: tuple[int, int, int], packed: PackedMask) -> RowRanges:
    B, T, S = sizes
    if T > S:
        raise ValueError(
            f"{op}: got {T} queries and {S} keys; with a mask, queries are the last of the keys' "
            "tokens. Pass kv_start and kv_end."
        )
    mask = read_mask(op, packed.mask)
    check_documents(op, packed.segment_ids, packed.positions, (B, S), "k has B, S =")
    check_mask_arrays(op, mask, (B, S))
    segment_ids, positions = read_documents(op, packed.segment_ids, packed.positions)
    if segment_ids is None and positions is not None:
        segment_ids = np.ones((B, S), np.int32)
    if mask.has_arrays and all(map(is_on_host, jax.tree.leaves((mask, segment_ids, positions)))):
        known = jax.tree.map(np.asarray, mask)
        ids = np.ones((B, S), np.int32) if segment_ids is None else segment_ids
        check_document_mask(op, known, from_segment_ids(op, ids, positions))
    packed = jax.tree.map(jnp.asarray, PackedMask(mask, segment_ids, positions))
    ranges = attended_tokens(packed, (B, S))
    start, end = (x[:, S - T :] for x in ranges[:2])
    if ranges.q_start is None:
        return RowRanges(start, end)
    index = jnp.broadcast_to(jnp.arange(S - T, S, dtype=jnp.int32), (B, T))
    return RowRanges(start, end, KeyQueries(index, ranges.q_start, ranges.q_end))


def _check(op: str, of: str, ranges: tuple[Any, Any], shape: tuple[int, int], needs: str) -> None:
    """Requires integers, one range of rows for each row."""
    for what, x in zip((f"{of}_start", f"{of}_end"), ranges, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{op}: {what} has dtype {x.dtype}, but counts rows. Pass integers.")
    start, end = ranges
    if start.shape != shape or end.shape != shape:
        raise ValueError(
            f"{op}: {of}_start and {of}_end have shapes {start.shape} and {end.shape}, but there "
            f"needs to be {needs}, {list(shape)}."
        )
