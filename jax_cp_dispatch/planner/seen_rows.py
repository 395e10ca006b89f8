"""`SeenRows`: pairs and keys of pieces, read back from a plan for a mask that data decides."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.masks.pairs import pairs_per_query


class SeenRows(NamedTuple):
    """What the rows of all ranks see.

    Attributes:
      ranges: of each rank, as in a plan; NumPy.
      pairs_before: of the queries of a rank before each row, and of all.
    """

    ranges: MaskRanges
    pairs_before: Int64[np.ndarray, "W Q+1"]

    @classmethod
    def of(cls, ranges: MaskRanges) -> SeenRows:
        """Counts the pairs of each row; on the host."""
        ranges = MaskRanges(*(x if x is None else np.asarray(x) for x in ranges))
        num_queries = ranges.k_start.shape[1]
        missing = max(x.shape[1] for x in ranges if x is not None)
        pad = lambda x: x if x is None else np.pad(x, ((0, 0), (0, missing - x.shape[1])))
        pairs = pairs_per_query(MaskRanges(*map(pad, ranges)))[:, :num_queries]
        return cls(ranges, np.pad(np.cumsum(pairs, axis=1), ((0, 0), (1, 0))))

    def pairs(
        self, rank: Int[np.ndarray, " P"], row: Int[np.ndarray, " P"], end: Int[np.ndarray, " P"]
    ) -> Int64[np.ndarray, " P"]:
        """Returns the query-key pairs of the rows [row, end) of ranks."""
        return self.pairs_before[rank, end] - self.pairs_before[rank, row]

    def keys(
        self, rank: Int[np.ndarray, " P"], row: Int[np.ndarray, " P"], end: Int[np.ndarray, " P"]
    ) -> Int64[np.ndarray, " P"]:
        """Returns how many received keys these rows see, and those between them."""
        found = np.zeros(len(rank), np.int64)
        for i, (r, a, b) in enumerate(zip(rank.tolist(), row.tolist(), end.tolist(), strict=True)):
            start, stop = self.ranges.k_start[r, a:b], self.ranges.k_end[r, a:b]
            sees = start < stop
            if sees.any():
                found[i] = stop[sees].max() - start[sees].min()
        return found
