"""`SlidingWindow`: a query sees the keys near it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.masks.mask import (
    Mask,
    MaskRanges,
    StaticMask,
    check_tokens,
    is_traced,
    maximum,
    minimum,
    no_limit_if_large,
    triangle,
)

# ---- `Full`: a query sees its whole document.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Full(StaticMask):
    """A query sees all keys of its document; `mask="full"`."""

    @property
    def is_causal(self) -> bool:
        return False

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, -1, 0

    def k_start(self, q: Any, start: Any) -> Any:
        return start

    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        return end

    def pairs_before(self, queries: Any, keys: Any) -> Any:
        return queries * keys


# ---- `Causal`: a query sees the keys up to its own.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal(StaticMask):
    """A query sees the keys of its document up to its own; `mask="causal"`, and the default."""

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, 0, 0

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, 0

    def k_start(self, q: Any, start: Any) -> Any:
        return start

    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        return q + 1

    def pairs_before(self, queries: Any, keys: Any) -> Any:
        return triangle(queries, keys)


# ---- `SlidingWindow(left, first=...)` as the calls see it: the keys near a query, and the first
# ones.
#
# Two ranges of keys, but one of queries for each key: the first keys of a document are seen to its
# end, the others by the `left` queries from their own on.


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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SlidingWindow(StaticMask):
    """A query at q sees the keys k of its document with q - left < k <= q + right.

    With `first`, also those with k < first and k <= q, as StreamingLLM does (Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks", section 3.2).

    Attributes:
      left: keys up to the query, its own included, so at least 1; None: no limit.
      right: keys after the query; None: no limit. With 0 the mask is causal.
      first: tokens at the start of each document that stay visible; needs `right` to be 0.
    """

    left: int | None
    right: int | None = 0
    first: int = 0

    def __repr__(self) -> str:
        first = f", first={self.first}" if self.first else ""
        return f"SlidingWindow(left={self.left}, right={self.right}{first})"

    def __post_init__(self) -> None:
        check_tokens(self, "first", self.first, minimum=0)
        for name, value, lowest in (("left", self.left, 1), ("right", self.right, 0)):
            if value is not None:
                check_tokens(self, name, value, minimum=lowest)
        if self.first and self.right != 0:
            raise ValueError(
                f"SlidingWindow: first is {self.first} and right is {self.right}; first needs "
                "right=0. Omit right, or pass masks.Ranges with the queries of each key."
            )

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    def pair_count(self) -> tuple[int, int, int]:
        left = -1 if self.left is None else self.left - 1
        return left, -1 if self.right is None else self.right, 0

    @property
    def reach(self) -> tuple[int | None, int | None]:
        before = None if self.left is None or self.first else self.left - 1
        return before, self.right

    def k_start(self, q: Any, start: Any) -> Any:
        return start if self.left is None else maximum(start, q - (self.left - 1))

    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        if self.right == 0:
            return q + 1
        return end if self.right is None else minimum(end, q + (self.right + 1))

    def pairs_before(self, queries: Any, keys: Any) -> Any:
        right = self.right
        seen = queries * keys if right is None else _up_to(right, queries, keys)
        return seen if self.left is None else seen - _up_to(-self.left, queries, keys)

    def num_keys(self, length: Any) -> Any:
        if self.left is None or self.right is None:
            return length
        return minimum(length, self.left + self.right)

    def clipped(self, num_tokens: int) -> "SlidingWindow":
        left, right = (None if x is None else min(x, num_tokens) for x in (self.left, self.right))
        return SlidingWindow(None if left is None else max(left, 1), right)

    def simplified(self) -> Mask:
        left, right = (no_limit_if_large(x) for x in (self.left, self.right))
        if self.first and left is not None:
            if no_limit_if_large(self.first) is None:
                return Causal()
            return FirstAndWindow(left, self.first)
        if left is None and right in (None, 0):
            return Full() if right is None else Causal()
        return SlidingWindow(left, right)


def _up_to(ahead: int, q: Any, k: Any) -> Any:
    """Pairs with query < q and key < k, and key <= query + ahead.

    A triangle that begins `ahead` queries earlier, minus its part before the first query.
    """
    return triangle(q + ahead, k) - triangle(ahead, k)
