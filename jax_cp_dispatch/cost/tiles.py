"""Counts the pairs that attention computes between the ranks of a layout: those of whole tiles.

A tile that an edge of the mask crosses is computed as a whole, and half of it is wasted on average.
So an edge along `l` queries wastes `l * (keys - 1) / 2` pairs, and one along `l` keys wastes
`l * (queries - 1) / 2`. The ends of shards waste nothing: tiles begin there.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from jax_cp_dispatch._window import Reach
from jax_cp_dispatch.cost.pairs import pairs_before

_ROWS_AT_ONCE = 512  # of blocks; bounds the memory for documents over thousands of ranks


def pairs_of_blocks(
    lengths: Sequence[int],
    cuts: Int64[np.ndarray, " num_cuts"],
    owner: Int64[np.ndarray, " num_blocks"],
    within: Reach,
    tile: tuple[int, int],
) -> Float64[np.ndarray, "num_ranks num_ranks"]:
    """Counts the pairs of each owner's queries (rows) with each owner's keys (columns).

    Args:
      lengths: tokens of consecutive documents, from the start of the sequence.
      cuts: the first token of each block, and the end.
      owner: the rank that holds each block.
      within: the reach of a query.
      tile: queries and keys that are computed as a whole; (1, 1) counts the pairs of the mask.
    """
    num_ranks = int(owner.max()) + 1
    pairs = np.zeros((num_ranks, num_ranks))
    sizes = np.array(lengths, np.int64)
    ends = sizes.cumsum()
    starts = ends - sizes
    first, last = np.searchsorted(cuts, starts, "right") - 1, np.searchsorted(cuts, ends)
    inside = last == first + 1  # documents in one block, usually most of them
    where = owner[first[inside]]
    size, zero = sizes[inside], np.zeros(int(inside.sum()), np.int64)
    whole = pairs_before(size, size, within)
    at_cut = cuts[first[inside]] == starts[inside], cuts[last[inside]] == ends[inside]
    edges = _Edges(size, within, *at_cut)
    whole = whole + edges.waste(zero, size, zero, size, tile)
    np.add.at(pairs, (where, where), whole)
    for i in np.flatnonzero((sizes > 0) & ~inside):
        blocks = slice(first[i], last[i])
        ranks = owner[blocks]
        cut = np.clip(cuts[first[i] : last[i] + 1], starts[i], ends[i]) - starts[i]
        edges = _Edges(sizes[i], within, cuts[first[i]] == starts[i], cuts[last[i]] == ends[i])
        for part in range(0, len(ranks), _ROWS_AT_ONCE):
            rows = slice(part, min(part + _ROWS_AT_ONCE, len(ranks)))
            q = cut[rows.start : rows.stop + 1, None]
            counted = np.diff(np.diff(pairs_before(q, cut[None], within), axis=0), axis=1)
            counted = counted + edges.waste(q[:-1], q[1:], cut[None, :-1], cut[None, 1:], tile)
            np.add.at(pairs, (ranks[rows, None], ranks[None]), counted)
    return pairs


class _Edges:
    """The edges of the mask of documents: its diagonals, and their unaligned ends."""

    def __init__(self, length, within: Reach, starts_at_cut, ends_at_cut):
        self.length, self.within = length, within
        self.starts_at_cut, self.ends_at_cut = starts_at_cut, ends_at_cut

    def waste(self, q0, q1, k0, k1, tile: tuple[int, int]):
        """Returns the wasted pairs of the queries [q0, q1) with the keys [k0, k1)."""
        if tile == (1, 1):
            return 0.0
        (left, right), length = self.within, self.length
        queries, keys = ((x - 1) / 2 for x in tile)
        most = length - 1
        own = max(queries, keys)  # a block's own keys: their tiles begin where the queries' do

        def common(a0, a1, b0, b1):
            return np.maximum(0, np.minimum(a1, b1) - np.maximum(a0, b0))

        waste = 0.0
        if right is not None:  # queries whose last key, inside the document, is in the block
            crossed = common(q0, np.minimum(q1, length - right), k0 - right, k1 - right)
            waste = crossed * (own if right == 0 else queries + keys)
        if left is not None:  # and first key
            crossed = common(np.maximum(q0, left), q1, k0 + left, k1 + left)
            waste = waste + crossed * (queries + keys)
        left, right = (most if x is None else np.minimum(x, most) for x in (left, right))
        for is_at_cut, query, key, seen_by, seen in (
            (self.starts_at_cut, 0, 0, (0, left + 1), (0, right + 1)),
            (self.ends_at_cut, most, most, (length - right, length), (length - 1 - left, length)),
        ):
            crosses = np.where(is_at_cut, 0, 1)
            has_key, has_query = (k0 <= key) & (key < k1), (q0 <= query) & (query < q1)
            waste = waste + crosses * (
                has_key * common(q0, q1, *seen_by) * keys
                + has_query * common(k0, k1, *seen) * queries
            )
        return waste
