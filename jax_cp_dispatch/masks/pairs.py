"""Counts the keys that each query sees, from the ranges of any mask; exact."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Int64

from jax_cp_dispatch.masks.mask import MaskRanges


def pairs_per_query(ranges: MaskRanges) -> Int64[np.ndarray, "B T"]:
    """Counts the keys of each query, in O(n log n); linear if no query misses keys of a subtree.

    The ranges are NumPy arrays, in columns `[0, T]`; empty for padding.
    """
    ranges = MaskRanges(*(x if x is None else x.astype(np.int64) for x in ranges))
    if ranges.q_start is None:
        return np.maximum(ranges.k_end - ranges.k_start, 0)
    return _nested(ranges, np) if _is_nested(ranges) else _visible(ranges, np)


def pairs_with_keys(ranges: MaskRanges, first: int, last: int) -> Int64[np.ndarray, "B T"]:
    """`pairs_per_query` of the keys in the columns [first, last) alone."""
    if ranges.q_start is not None and _is_nested(ranges):
        inside = np.zeros(ranges.q_start.shape[1], bool)
        inside[first:last] = True
        return _nested(ranges._replace(q_end=np.where(inside, ranges.q_end, 0)), np)
    k_start, k_end = np.maximum(ranges.k_start, first), np.minimum(ranges.k_end, last)
    return pairs_per_query(ranges._replace(k_start=k_start, k_end=k_end))


def traced_pairs_per_query(ranges: MaskRanges, *, is_causal: bool) -> Int32[Array, "B T"]:
    """`pairs_per_query` inside a program, of a mask that is causal or not.

    If a causal one has ranges of queries too, its queries miss no keys of a subtree
    (`SharedPrefix`, `Tree`), and counting is linear.
    """
    if ranges.q_start is None:
        return jnp.maximum(ranges.k_end - ranges.k_start, 0)
    return (_nested if is_causal else _visible)(ranges, jnp)


def _is_nested(ranges: MaskRanges) -> bool:
    """Whether queries see the keys up to their own, and all whose range has the query."""
    k_start, k_end, q_start, q_end = ranges
    column = np.arange(k_start.shape[1])
    if not ((k_start >= k_end) | (k_end == column + 1)).all():
        return False
    latest = np.maximum.accumulate(k_start, axis=1)
    seen_by = np.take_along_axis(latest, np.maximum(q_end - 1, 0), axis=1)
    return bool(((np.maximum(q_start, column) >= q_end) | (seen_by <= column)).all())


def _nested(ranges: MaskRanges, xp: Any) -> Any:
    """The keys of each query that begin their queries up to it, minus those that end them."""
    k_start, k_end, q_start, q_end = ranges
    B, T = k_start.shape
    begin = xp.maximum(q_start, np.arange(T, dtype=q_start.dtype)[None])
    stop = xp.maximum(begin, q_end)
    row = np.arange(B)[:, None]
    edges = xp.zeros((B, T + 1), k_start.dtype)
    if xp is np:
        np.add.at(edges, (row, np.minimum(begin, T)), 1)
        np.add.at(edges, (row, np.minimum(stop, T)), -1)
    else:
        edges = edges.at[row, begin].add(1, mode="drop").at[row, stop].add(-1, mode="drop")
    open_ = xp.cumsum(edges, axis=1, dtype=edges.dtype)[:, :T]
    return xp.where(k_start < k_end, open_, 0)


def _visible(ranges: MaskRanges, xp: Any) -> Any:
    """The keys between k_start and k_end with q_start <= q, minus those with q_end <= q.

    A wavelet matrix counts the values below a bound at the places [first, last). From the highest
    bit on, values with bit 0 move before those with bit 1, both in order, and places follow. Where
    the bound has bit 1, the values with bit 0 are below it.
    """
    k_start, k_end, q_start, q_end = ranges
    B, T = k_start.shape
    dtype, bits = k_start.dtype, (T + 1).bit_length()
    row = T * np.arange(B, dtype=dtype)[:, None]
    bound = xp.broadcast_to(np.arange(1, T + 1, dtype=dtype), (B, T)).reshape(-1)
    first = xp.clip(k_start, 0, T) + row
    last = xp.maximum(first, xp.clip(k_end, 0, T) + row).reshape(-1)
    begin = xp.clip(q_start, 0, T)
    stop = xp.maximum(begin, xp.clip(q_end, 0, T))
    place = xp.arange(B * T, dtype=dtype)

    def one_bit(i, state):
        values, first, last, count = state
        bit = bits - 1 - i
        is_zero = (values >> bit & 1) == 0
        zeros = xp.concatenate([xp.zeros(1, dtype), xp.cumsum(is_zero, dtype=dtype)])
        first_zero, last_zero = zeros[first], zeros[last]
        is_one = (bound >> bit & 1) == 1
        count = count + xp.where(is_one, last_zero - first_zero, 0)
        first = xp.where(is_one, zeros[-1] + first - first_zero, first_zero)
        last = xp.where(is_one, zeros[-1] + last - last_zero, last_zero)
        moved = xp.where(is_zero, zeros[:-1], zeros[-1] + place - zeros[:-1])
        if xp is jnp:
            return jnp.zeros_like(values).at[moved].set(values), first, last, count
        in_order = np.empty_like(values)
        in_order[moved] = values
        return in_order, first, last, count

    def count_below(values):
        values = values.reshape(-1)
        zero = 0 * (values + first.reshape(-1) + last)  # a loop's carry varies over the same axes
        state = values + zero, first.reshape(-1) + zero, last + zero, zero
        if xp is jnp:
            return jax.lax.fori_loop(0, bits, one_bit, state)[-1]
        return functools.reduce(lambda state, i: one_bit(i, state), range(bits), state)[-1]

    return (count_below(begin) - count_below(stop)).reshape(B, T)
