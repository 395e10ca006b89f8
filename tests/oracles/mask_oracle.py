"""What masks mean, from their definitions: in NumPy, one query and key at a time."""

import itertools
from typing import Any

import numpy as np


def sees(mask: Any, q, k):
    """Whether the query at position q of a document sees the key at k; arrays of integers."""
    kind = getattr(type(mask), "__name__", "")
    kind = str(mask) if kind in ("str", "NoneType") else kind
    if kind in ("None", "causal", "Causal"):
        return k <= q
    if kind in ("full", "Full"):
        return (k == k) & (q == q)
    if kind == "SlidingWindow":
        left, right = (np.inf if x is None else x for x in (mask.left, mask.right))
        return ((k > q - left) | (k < mask.first)) & (k <= q + right)
    if kind == "BlockCausal":
        return k // mask.size <= q // mask.size
    assert kind == "Chunked"
    return (q // mask.size == k // mask.size) & (k <= q)


def visible(mask, length):
    """`[q, k]`: the pairs of a document of `length` tokens."""
    q, k = np.arange(length)[:, None], np.arange(length)[None]
    return np.broadcast_to(sees(mask, q, k), (length, length))


def ranges(mask, length):
    """The keys [start, end) of each query of a document."""
    seen = visible(mask, length)
    assert seen.any(1).all()
    start = seen.argmax(1)
    end = length - seen[:, ::-1].argmax(1)
    assert (seen.sum(1) == end - start).all()  # one range
    return start, end


def _documents(segment_ids, positions):
    """Yields (batch row, first column, one past the last) of each document of packed rows."""
    ids = np.asarray(segment_ids)
    for b, row in enumerate(ids):
        new = row[1:] != row[:-1]
        if positions is not None:
            new = new | (np.asarray(positions)[b, 1:] <= np.asarray(positions)[b, :-1])
        cuts = [0, *(np.flatnonzero(new) + 1), len(row)]
        for first, last in itertools.pairwise(cuts):
            if last > first and row[first] > 0:
                yield b, first, last


def batch_ranges(mask, segment_ids, positions=None):
    """The columns [start, end) that each token of packed rows sees; (0, 0) for padding."""
    start, end = np.zeros((2, *np.shape(segment_ids)), int)
    for b, first, last in _documents(segment_ids, positions):
        begin, stop = ranges(mask, last - first)
        start[b, first:last], end[b, first:last] = first + begin, first + stop
    return start, end


def batch_pairs(mask, segment_ids, positions=None):
    """`[B, q, k]`: the pairs of packed rows that a mask of numbers admits."""
    B, T = np.shape(segment_ids)
    pairs = np.zeros((B, T, T), bool)
    for b, first, last in _documents(segment_ids, positions):
        pairs[b, first:last, first:last] = visible(mask, last - first)
    return pairs


def batch_visible(segment_ids, sees_in_row):
    """`[B, q, k]`: the pairs that a mask admits, within documents; False for padding."""
    ids = np.asarray(segment_ids)
    runs = np.cumsum(np.diff(ids, axis=1, prepend=0) != 0, axis=1)
    same = (runs[:, :, None] == runs[:, None]) & (ids > 0)[:, :, None]
    return same & sees_in_row


def _causal(ids):
    return np.tril(np.ones((ids.shape[1],) * 2, bool))[None]


def _same_run(ids):
    runs = np.cumsum(np.diff(ids, axis=1, prepend=0) != 0, axis=1)
    return runs[:, :, None] == runs[:, None]


def prefix_pairs(in_prefix):
    return _causal(in_prefix) | (in_prefix[:, :, None] & in_prefix[:, None])


def block_pairs(block_ids):
    return _causal(block_ids) | (_same_run(block_ids) & (block_ids > 0)[:, :, None])


def shared_prefix_pairs(ids):
    return _causal(ids) & ((ids == 0)[:, None] | _same_run(ids))


def tree_pairs(span_ids, parents):
    """The plain ancestor relation: a span, its parent, its parent's parent, ..."""
    B, S = parents.shape
    is_ancestor = np.zeros((B, S + 1, S + 1), bool)
    parents = np.concatenate([np.where(parents < 0, S, parents), np.full((B, 1), S)], axis=1)
    row, span = np.arange(B)[:, None], np.arange(S + 1)[None]
    at = np.broadcast_to(span, (B, S + 1))
    for _ in range(S):
        is_ancestor[row, span, at] = True
        at = np.take_along_axis(parents, at, axis=1)
    is_ancestor[:, S] = is_ancestor[:, :, S] = False
    spans = np.where(span_ids < 0, S, span_ids)
    return _causal(span_ids) & is_ancestor[row[:, :, None], spans[:, :, None], spans[:, None]]


def copied_tokens(segment_ids):
    """Of each token of the layout: its column in the batch, its position, whether it is noisy."""
    of_rows = []
    for row in np.asarray(segment_ids):
        tokens = []
        for key, run in itertools.groupby(range(len(row)), key=lambda c, row=row: row[c]):
            columns, is_token = list(run), key > 0
            for is_noisy in (True, False):
                tokens += [(c, (c - columns[0]) * is_token, is_noisy & is_token) for c in columns]
        of_rows.append(tokens)
    return np.array(of_rows).reshape(len(of_rows), -1, 3).transpose(2, 0, 1)


def block_diffusion_pairs(segment_ids, size):
    """Of rows of noisy copies x_t, each followed by its clean copy x_0.

    By the words of Block Diffusion (arXiv 2503.09573): "self-attention within noised blocks",
    "cross-attention to conditional context", "attention to update x_0".
    """
    pairs = np.zeros((*segment_ids.shape, segment_ids.shape[1]), bool)
    for b, first, last in _documents(segment_ids, None):
        n = (last - first) // 2
        block, is_noisy = np.tile(np.arange(n) // size, 2), np.repeat([True, False], n)
        for i, j in itertools.product(range(2 * n), repeat=2):
            if is_noisy[i] and is_noisy[j]:
                sees = block[i] == block[j]
            elif is_noisy[i]:
                sees = block[j] < block[i]
            else:
                sees = not is_noisy[j] and block[j] <= block[i]
            pairs[b, first + i, first + j] = sees
    return pairs


def range_pairs(k_start, k_end, q_start=None, q_end=None):
    column = np.arange(k_start.shape[1])
    seen = (k_start[:, :, None] <= column) & (column < k_end[:, :, None])
    query = column[:, None]
    if q_start is not None:
        seen &= q_start[:, None] <= query
    if q_end is not None:
        seen &= query < q_end[:, None]
    return seen
