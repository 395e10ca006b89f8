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
        return (k > q - left) & (k <= q + right)
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


def batch_ranges(mask, segment_ids, positions=None):
    """The columns [start, end) that each token of packed rows sees; (0, 0) for padding."""
    ids = np.asarray(segment_ids)
    start, end = np.zeros((2, *ids.shape), int)
    for b, row in enumerate(ids):
        new = row[1:] != row[:-1]
        if positions is not None:
            new = new | (np.asarray(positions)[b, 1:] <= np.asarray(positions)[b, :-1])
        cuts = [0, *(np.flatnonzero(new) + 1), len(row)]
        for first, last in itertools.pairwise(cuts):
            if last > first and row[first] > 0:
                within = slice(first, last)
                begin, stop = ranges(mask, last - first)
                start[b, within], end[b, within] = first + begin, first + stop
    return start, end
