"""`Ranges`: the general form of a mask, by the numbers of columns."""

from typing import Any

import numpy as np
from jaxtyping import Array, Int32, Integer

from jax_cp_dispatch.masks.array_mask import ArrayMask, array_mask, check_arrays
from jax_cp_dispatch.masks.mask import MaskRanges, maximum, minimum


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
        check_arrays("Ranges", **arrays)
        self._store(**arrays)

    @property
    def is_causal(self) -> bool:
        return False

    @property
    def has_query_ranges(self) -> bool:
        return not (self.q_start is None and self.q_end is None)

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        keys = maximum(start, self.k_start), minimum(end, self.k_end)
        if not self.has_query_ranges:
            return MaskRanges(*keys)
        q_start = start if self.q_start is None else maximum(start, self.q_start)
        return MaskRanges(*keys, q_start, end if self.q_end is None else minimum(end, self.q_end))
