"""`SlidingWindow(left, first=...)` as the calls see it: the keys near a query, and the first ones.

Two ranges of keys, but one of queries for each key: the first keys of a document are seen to its
end, the others by the `left` queries from their own on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.masks.mask import Mask, MaskRanges, is_traced, minimum


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class FirstAndWindow(Mask):
    """A query at q sees the keys k <= q of its document with q - left < k or k < first."""

    left: int
    first: int

    def __repr__(self) -> str:
        return f"SlidingWindow(left={self.left}, first={self.first})"

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def has_query_ranges(self) -> bool:
        return True

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        xp = jnp if is_traced(column, start, end) else np
        near = column + minimum(end - column, self.left)
        q_end = xp.where(column - start < self.first, end, near)
        return MaskRanges(start, column + 1, start, q_end)

    def num_keys(self, length: Any) -> Any:
        return minimum(length, self.left + self.first)
