"""`Blocks`: causal, and both ways inside the blocks of a document."""

from typing import Any

import numpy as np
from jaxtyping import Array, Int32, Integer

from jax_cp_dispatch.masks.array_mask import (
    OF_OTHER_COLUMNS,
    ArrayMask,
    array_mask,
    check_arrays,
    ends_fit,
    gathered,
    run_ends,
)
from jax_cp_dispatch.masks.mask import MaskRanges, maximum, minimum


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
        check_arrays("Blocks", block_ids=block_ids)
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
