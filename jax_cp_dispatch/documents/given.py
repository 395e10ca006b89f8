"""The documents of a call: `documents=`, or its short form `segment_ids=` and `positions=`."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch.documents.documents import Documents
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.array_mask import MaskKind
from jax_cp_dispatch.masks.read import check_mask_order, read_mask
from jax_cp_dispatch.masks.token_order import PACKED, PLACED, Order


class GivenDocuments(NamedTuple):
    """What a call says about its tokens, read.

    Attributes:
      packed: mask, segment ids and positions; with a plan, its mask may be a `MaskKind`.
      order: of the tokens.
      plan: for the mask, or None.
      columns: tokens of a whole batch row; None: not known.
    """

    packed: PackedMask
    order: Order = PACKED
    plan: Any = None
    columns: int | None = None

    @property
    def layout(self) -> str:
        return "zigzag" if self.order.name == "zigzag" else "contiguous"

    def check_ranks(self, op: str, num_tokens: int, num_ranks: int, ranks: str) -> None:
        """Requires the ranks of this order, and whole batch rows.

        Args:
          op: for messages.
          num_tokens: of the call, on all ranks.
          num_ranks: that share the sequence.
          ranks: the same in words.
        """
        if self.order.num_ranks not in (0, num_ranks):
            raise ValueError(
                f"{op}: the documents are in {self.order}, but {ranks}. Pass "
                f"documents.zigzag({num_ranks}) of packed ones, and tokens in that order."
            )
        if self.columns not in (None, num_tokens):
            raise ValueError(
                f"{op}: the documents are of {self.columns} columns, but the ranks hold "
                f"{num_tokens}. Pass the documents of these tokens: whole ones with global arrays, "
                "and inside jax.shard_map through in_specs=documents.specs(axis_name)."
            )


def read_given(
    op: str, documents: Documents | None, segment_ids: Any, positions: Any, mask: Any
) -> GivenDocuments:
    """Reads the documents and the mask of a call, and selects its plan."""
    if documents is None:
        read = read_mask(op, mask)
        check_mask_order(op, read, PACKED)
        return GivenDocuments(PackedMask(read, segment_ids, positions))
    check_type(op, "documents", documents, Documents, "Pass Documents(segment_ids, positions).")
    if segment_ids is not None or positions is not None:
        raise TypeError(
            f"{op}: got documents, and segment_ids or positions, which they have. Omit the latter."
        )
    mask = documents.mask if mask is None else mask
    plan = _plan(op, documents, mask)
    read = plan.mask if mask is None and plan is not None else read_mask(op, mask)
    check_mask_order(op, read, documents.order)
    packed = PackedMask(read, documents.segment_ids, documents.positions)
    return GivenDocuments(packed, documents.order, plan, documents.columns)


def _plan(op: str, documents: Documents, mask: Mask | MaskKind | str | None) -> Any:
    """Returns the plan for a mask."""
    plans = documents.plans
    if not plans:
        return None
    if mask is None and len(plans) == 1:
        return plans[0]
    kind = read_mask(op, mask).kind
    found = [plan for plan in plans if plan.mask == kind]
    if not found:
        masks = ", ".join(str(plan.mask) for plan in plans)
        how = "place_tokens(masks=...)" if documents.order == PLACED else "plan_attention(mask=...)"
        raise ValueError(
            f"{op}: mask is {kind}, but the documents have a plan for {masks}. Pass one of these "
            f"as mask, or plan for it: {how}."
        )
    return found[0]
