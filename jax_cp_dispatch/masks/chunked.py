"""`Chunked`: a query sees the keys of its chunk up to its own."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_cp_dispatch.masks.mask import (
    StaticMask,
    check_tokens,
    minimum,
    no_limit_if_large,
    remainder,
    triangle,
)
from jax_cp_dispatch.masks.windows import Causal, Full


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Chunked(StaticMask):
    """A query sees the keys up to its own in its chunk of the document (local layers of Llama 4).

    Chunks count from the start of the document, whatever the layout.

    Attributes:
      size: tokens of a chunk.
    """

    size: int

    def __post_init__(self) -> None:
        check_tokens(self, "size", self.size, minimum=1)

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, 0, self.size

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return self.size - 1, 0

    @property
    def num_diagonals(self) -> int:
        """Two: the other edges of a chunk cross as many tiles as a diagonal."""
        return 2

    def k_start(self, q: Any, start: Any) -> Any:
        return q - remainder(q - start, self.size)

    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        return q + 1

    def pairs_before(self, queries: Any, keys: Any) -> Any:
        both = np.minimum(queries, keys)
        whole, rest = both // self.size, both % self.size
        # Queries after the last key see the keys of its chunk if they are in it.
        later = np.minimum(queries, (whole + 1) * self.size) - both
        triangles = whole * triangle(self.size, self.size) + triangle(rest, rest)
        return triangles + np.maximum(later, 0) * rest

    def num_keys(self, length: Any) -> Any:
        return minimum(length, self.size)

    def clipped(self, num_tokens: int) -> "Chunked":
        return Chunked(max(1, min(self.size, num_tokens)))

    def simplified(self) -> StaticMask:
        return Causal() if no_limit_if_large(self.size) is None else self


# ---- `BlockCausal`: a query sees its chunk and the chunks before it.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockCausal(StaticMask):
    """A query sees the keys of its document up to the end of its chunk (block diffusion).

    Chunks count from the start of the document, whatever the layout.

    Attributes:
      size: tokens of a chunk.
    """

    size: int

    def __post_init__(self) -> None:
        check_tokens(self, "size", self.size, minimum=1)

    @property
    def is_causal(self) -> bool:
        return self.size == 1

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, -1, self.size

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, self.size - 1

    @property
    def num_diagonals(self) -> int:
        return 1

    def k_start(self, q: Any, start: Any) -> Any:
        return start

    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        here = q - remainder(q - start, self.size)
        return here + self.size if end is None else minimum(end, here + self.size)

    def pairs_before(self, queries: Any, keys: Any) -> Any:
        whole, rest = queries // self.size, queries % self.size
        # Queries of the first chunks see fewer keys than `keys`.
        fewer = np.minimum(whole, keys // self.size)
        pairs = self.size * (self.size * (fewer * (fewer + 1) // 2) + (whole - fewer) * keys)
        return pairs + rest * np.minimum(keys, (whole + 1) * self.size)

    def clipped(self, num_tokens: int) -> "BlockCausal":
        return BlockCausal(max(1, min(self.size, num_tokens)))

    def simplified(self) -> StaticMask:
        if self.size == 1:
            return Causal()
        return Full() if no_limit_if_large(self.size) is None else self
