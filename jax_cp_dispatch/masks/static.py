"""Masks of numbers: `Full`, `Causal`, `SlidingWindow`, `Chunked` and `BlockCausal`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.masks.mask import (
    Mask,
    MaskRanges,
    StaticMask,
    check_token_count,
    has_tracers,
    minimum,
    no_limit_if_large,
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Full(StaticMask):
    """A query sees all keys of its document; `mask="full"`."""

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, -1, 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal(StaticMask):
    """A query sees the keys of its document up to its own; `mask="causal"`, and the default."""

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, 0, 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class FirstAndWindow(Mask):
    """`SlidingWindow(left, first=...)` as calls see it: k <= q with q - left < k or k < first.

    These are two ranges of keys, but one of queries for each key: the first keys of a document are
    seen to its end, the others by the `left` queries from their own on.
    """

    has_query_ranges: ClassVar[bool] = True
    left: int
    first: int

    def __repr__(self) -> str:
        return f"SlidingWindow(left={self.left}, first={self.first})"

    @property
    def is_causal(self) -> bool:
        return True

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        xp = jnp if has_tracers(column, start, end) else np
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
        check_token_count(self, "first", self.first, minimum=0)
        for name, value, lowest in (("left", self.left, 1), ("right", self.right, 0)):
            if value is not None:
                check_token_count(self, name, value, minimum=lowest)
        if self.first and self.right != 0:
            raise ValueError(
                f"SlidingWindow: first is {self.first} and right is {self.right}; first needs "
                "right=0. Omit right, or pass masks.Ranges with the queries of each key."
            )

    @property
    def pair_count(self) -> tuple[int, int, int]:
        left = -1 if self.left is None else self.left - 1
        return left, -1 if self.right is None else self.right, 0

    def clipped(self, num_tokens: int) -> StaticMask:
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


# ---- Chunks: documents are cut into equal parts, counted from their start.


@dataclasses.dataclass(frozen=True)
class _OfChunks(StaticMask):
    size: int

    def __post_init__(self) -> None:
        check_token_count(self, "size", self.size, minimum=1)

    def clipped(self, num_tokens: int) -> StaticMask:
        return dataclasses.replace(self, size=max(1, min(self.size, num_tokens)))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Chunked(_OfChunks):
    """A query sees the keys up to its own in its chunk of the document (local layers of Llama 4).

    Chunks count from the start of the document, whatever the layout.

    Attributes:
      size: tokens of a chunk.
    """

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, 0, self.size

    def simplified(self) -> StaticMask:
        return Causal() if no_limit_if_large(self.size) is None else self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockCausal(_OfChunks):
    """A query sees the keys of its document up to the end of its chunk (block diffusion).

    Chunks count from the start of the document, whatever the layout.

    Attributes:
      size: tokens of a chunk.
    """

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, -1, self.size

    def simplified(self) -> StaticMask:
        if self.size == 1:
            return Causal()
        return Full() if no_limit_if_large(self.size) is None else self
