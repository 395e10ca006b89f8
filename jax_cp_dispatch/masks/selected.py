"""`Selected`: of the keys that a mask shows, those alone that each query has picked."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32, Integer

from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch.masks.mask import (
    PACKED,
    ArrayMask,
    Mask,
    MaskRanges,
    Order,
    StaticMask,
    check_token_count,
)
from jax_cp_dispatch.masks.read import read_mask_of_numbers

_OP = "Selected"
_STEP = "Pass picks [B, T, k], or [B, T, G, k] of G groups of heads."


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Selected(ArrayMask):
    """A query sees the keys that it has picked, of those that another mask shows it.

        visible(q, k) = visible_within(q, k) and k // block in picks[q]

    k counts in the document. `select_keys` makes the picks, or a rollout has recorded them. Plans
    and placements read only the mask within which they were made; attention checks the picks in the
    step: those that cannot be of these tokens are an error on all ranks.

    Attributes:
      picks: int32 `[B, T, k]`, or `[B, T, G, k]` for G groups of heads: 1, all KV heads or all
        query heads. Positions in the document of the query, divided by `block`; ascending, and -1
        after the last. They may be traced. They have no derivative.
      within: the mask of numbers within which they were made (static).
      block: tokens of a pick (static).
      order: of the picks' tokens (static). Of picks that `select_keys` has made, that of its
        documents: `documents.order`. Recorded ones in packed order, the default, go through
        `Documents.apply` or `Placement.apply`.
    Raises:
      TypeError, ValueError: picks are not integers of these dimensions, k is 0, the block is below
        1, the order is none, or the mask has arrays, first tokens or picks.
    """

    picks: Int32[Array | np.ndarray, "B T *G k"]
    within: StaticMask
    block: int
    order: Order  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        picks: Integer[Array | np.ndarray, "B T *G k"],
        within: Mask | str = "causal",
        *,
        block: int = 1,
        order: Order = PACKED,
    ) -> None:
        check_annotated(_OP, type(self).__init__, {"picks": picks}, {"picks": _STEP})
        check_token_count(self, "block", block, minimum=1)
        if picks.shape[-1] == 0:
            raise ValueError(f"{_OP}: picks have shape {list(picks.shape)}, without picks. {_STEP}")
        refuse_picks(_OP, within)
        if not isinstance(order, Order):
            raise TypeError(f"{_OP}: order is {order!r}. Pass the order of documents, or omit it.")
        object.__setattr__(self, "within", read_mask_of_numbers(_OP, within))
        object.__setattr__(self, "order", order)
        self._store(picks=picks)

    def tree_flatten_with_keys(self):
        static = self.within, self.block, self.order
        return [(jax.tree_util.GetAttrKey("picks"), self.picks)], static

    @classmethod
    def tree_unflatten(cls, static, children) -> Selected:
        mask = object.__new__(cls)
        names = "picks", "within", "block", "order"
        vars(mask).update(zip(names, (*children, *static), strict=True))
        return mask

    @property
    def is_causal(self) -> bool:
        return self.within.is_causal

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return self.within.ranges(column, start, end)

    def simplified(self) -> Mask:
        """Returns the mask within which the picks were made, which alone says what moves."""
        return self.within


def refuse_picks(op: str, mask: Any) -> None:
    """Refuses picks where only the mask within which they were made would count."""
    if isinstance(mask, Selected):
        raise TypeError(
            f"{op}: mask is {mask}, but only attention and index_loss read picks. Pass it as mask= "
            "of their calls, and here the mask within which the picks were made."
        )
