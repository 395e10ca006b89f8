"""Masks by the numbers of columns: `Ranges`, the general form, and `Blocks`."""

from typing import Any

import numpy as np
from jaxtyping import Array, Int32, Integer

from jax_cp_dispatch._arrays import run_ends
from jax_cp_dispatch.masks.mask import (
    OF_OTHER_COLUMNS,
    ArrayMask,
    MaskRanges,
    array_mask,
    ends_fit,
    gathered,
    maximum,
    minimum,
)


@array_mask
class Ranges(ArrayMask):
    """The query q sees the key k if both see each other's column, within their document.

        k_start[q] <= k < k_end[q] and q_start[k] <= q < q_end[k]

    Attributes:
      k_start, k_end: the keys of each query; integers `[B, T]`, in columns of the batch row. They
        may be traced.
      q_start, q_end: the queries of each key; None: no limit.
    """

    k_start: Int32[Array | np.ndarray, "B T"]
    k_end: Int32[Array | np.ndarray, "B T"]
    q_start: Int32[Array | np.ndarray, "B T"] | None
    q_end: Int32[Array | np.ndarray, "B T"] | None

    def __init__(
        self,
        k_start: Integer[Array | np.ndarray, "B T"],
        k_end: Integer[Array | np.ndarray, "B T"],
        q_start: Integer[Array | np.ndarray, "B T"] | None = None,
        q_end: Integer[Array | np.ndarray, "B T"] | None = None,
    ) -> None:
        arrays = {"k_start": k_start, "k_end": k_end, "q_start": q_start, "q_end": q_end}
        self._store(**arrays)

    @property
    def is_causal(self) -> bool:
        return False

    @property
    def has_query_ranges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not (self.q_start is None and self.q_end is None)

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        keys = maximum(start, self.k_start), minimum(end, self.k_end)
        if not self.has_query_ranges:
            return MaskRanges(*keys)
        q_start = start if self.q_start is None else maximum(start, self.q_start)
        return MaskRanges(*keys, q_start, end if self.q_end is None else minimum(end, self.q_end))


# ---- `Blocks`: causal, and both ways inside the blocks of a document.


@array_mask
class Blocks(ArrayMask):
    """Tokens see earlier tokens of their document, and all tokens of their own block.

    As the image tokens of Gemma 3. `Blocks(block_ids)` takes integers `[B, T]`, which may be
    traced. A block is a run of the same positive id in a document; other ids are of no block.

    Attributes:
      block_end: one past the last column of the block, for its tokens; 0 for others.
    """

    block_end: Int32[Array | np.ndarray, "B T"]

    def __init__(self, block_ids: Integer[Array | np.ndarray, "B T"]) -> None:
        block_ids = gathered(block_ids)
        self._store(block_end=run_ends(block_ids) * (block_ids > 0))

    @property
    def is_causal(self) -> bool:
        return False

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        fits = (self.block_end == 0) | ends_fit(column, self.block_end)
        return [(fits, OF_OTHER_COLUMNS)]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, minimum(end, maximum(column + 1, self.block_end)))
