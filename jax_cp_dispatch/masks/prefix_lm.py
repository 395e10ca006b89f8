"""`PrefixLM`: the prefix of a document sees all of itself, the rest is causal."""

from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._arguments import check_array
from jax_cp_dispatch.masks.array_mask import (
    OF_OTHER_COLUMNS,
    ArrayMask,
    array_mask,
    before,
    ends_fit,
    gathered,
    run_ends,
)
from jax_cp_dispatch.masks.mask import MaskRanges, maximum, minimum


@array_mask
class PrefixLM(ArrayMask):
    """Tokens of the prefix see the whole prefix of their document; other tokens are causal.

    As in PaliGemma and T5. `PrefixLM(in_prefix)` takes booleans `[B, T]`: whether a token belongs
    to the prefix of its document, which is its first tokens. They may be traced.

    Attributes:
      prefix_end: one past the last column of the prefix, for its tokens; 0 for others.
    """

    prefix_end: Int32[Array | np.ndarray, "B T"]

    def __init__(self, in_prefix: Bool[Array | np.ndarray, "B T"]) -> None:
        check_array("PrefixLM", "in_prefix", in_prefix)
        if in_prefix.dtype != bool:
            raise TypeError(
                f"PrefixLM: in_prefix has dtype {in_prefix.dtype}; it needs to be booleans. Pass "
                "in_prefix != 0."
            )
        if in_prefix.ndim != 2:
            raise ValueError(
                f"PrefixLM: in_prefix has shape {list(in_prefix.shape)}; it needs to be [B, T]."
            )
        in_prefix = gathered(in_prefix)
        self._store(prefix_end=run_ends(in_prefix) * in_prefix)

    @property
    def is_causal(self) -> bool:
        return False

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        is_outside = self.prefix_end == 0
        follows = (column == start) | (before(self.prefix_end) > 0)
        return [
            (is_outside | ends_fit(column, self.prefix_end), OF_OTHER_COLUMNS),
            (
                is_outside | follows,
                "has a prefix that does not begin its document. Pass in_prefix "
                "for the first tokens of a document; for others, Blocks.",
            ),
        ]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, minimum(end, maximum(column + 1, self.prefix_end)))
