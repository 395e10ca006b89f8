"""The documents of a call: `documents=`, or its short form `segment_ids=` and `positions=`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_cp_dispatch._arguments import check_type, is_on_host
from jax_cp_dispatch.documents.documents import Documents
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.documents.segment_ids import read_documents
from jax_cp_dispatch.documents.table import DocumentTable, from_segment_ids
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.array_mask import MaskKind
from jax_cp_dispatch.masks.mask import PACKED, PLACED, Order
from jax_cp_dispatch.masks.read import check_mask_order, check_mask_rules, read_mask


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

    def without_plan(self, op: str) -> GivenDocuments:
        """Returns the same without the plan, whose mask needs to be known."""
        if isinstance(self.packed.mask, MaskKind):
            raise ValueError(
                f"{op}: the plan of the documents is for {self.packed.mask}, whose arrays it does "
                "not have. Pass the mask as mask=."
            )
        return self._replace(plan=None)

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
    op: str,
    documents: Documents | None,
    segment_ids: Any,
    positions: Any,
    mask: Any,
    *,
    follows_plan: bool = True,
) -> GivenDocuments:
    """Reads the documents and the mask of a call, and selects its plan.

    Args:
      op: for messages.
      documents, segment_ids, positions, mask: of the call.
      follows_plan: whether the call follows a plan of packed documents; others ignore it, but not
        its mask.
    """
    if documents is None:
        read = read_mask(op, mask)
        check_mask_order(op, read, PACKED)
        return GivenDocuments(PackedMask(read, segment_ids, positions))
    _check(op, documents, segment_ids, positions)
    mask = documents.mask if mask is None else mask
    plans, order = documents.plans, documents.order
    if mask is None and len(plans) == 1:
        plan, read = plans[0], plans[0].mask
    else:
        read = read_mask(op, mask)
        plan = next((plan for plan in plans if plan.mask == read.kind), None)
        needs_plan = follows_plan or order == PLACED or mask is None
        if plans and plan is None and needs_plan:
            raise ValueError(
                f"{op}: mask is {read.kind}, but the documents have a plan for "
                f"{', '.join(str(x.mask) for x in plans)}. Pass one of these as mask, or plan for "
                f"this one: place_tokens and plan_attention take mask=."
            )
    check_mask_order(op, read, order)
    packed = _packed(read, documents)
    given = GivenDocuments(packed, order, plan, documents.columns)
    return given if follows_plan or order == PLACED else given.without_plan(op)


def read_given_tokens(
    op: str, documents: Documents | None, segment_ids: Any, positions: Any
) -> GivenDocuments:
    """Reads the documents of a call without a mask; of a placement, the plan of any mask."""
    if documents is None:
        return GivenDocuments(PackedMask(None, segment_ids, positions))
    _check(op, documents, segment_ids, positions)
    plan = documents.plan if documents.order == PLACED else None
    return GivenDocuments(_packed(None, documents), documents.order, plan, documents.columns)


def _packed(mask: Any, documents: Documents) -> PackedMask:
    # Counted positions start again in each piece of a document, and would hide that there are two.
    positions = None if documents.counted else documents.positions
    return PackedMask(mask, documents.segment_ids, positions)


def _check(op: str, documents: Any, segment_ids: Any, positions: Any) -> None:
    check_type(op, "documents", documents, Documents, "Pass Documents(segment_ids, positions).")
    if segment_ids is not None or positions is not None:
        raise TypeError(
            f"{op}: got documents, and segment_ids or positions, which they have. Omit the latter."
        )


def read_sequences(op: str, segment_ids, positions, *, layout: str, num_ranks: int):
    """`read_documents` of whole sequences, in a layout whose ranks divide the tokens."""
    known = next((x for x in (segment_ids, positions) if x is not None), None)
    order = None
    if layout == "zigzag" and known is not None:
        order = zigzag_permutation(known.shape[1], num_ranks, inverse=True)
    return read_documents(op, segment_ids, positions, order=order)


def check_known_mask(op: str, packed: PackedMask, *, layout: str, num_ranks: int) -> None:
    """Requires a mask of these tokens, if all arrays of whole sequences are known on the host."""
    leaves = jax.tree.leaves(packed)
    if not packed.mask.has_arrays or not all(map(is_on_host, leaves)):
        return
    columns = slice(None)
    if layout == "zigzag":
        columns = zigzag_permutation(leaves[0].shape[1], num_ranks, inverse=True)
    mask, segment_ids, positions = jax.tree.map(lambda x: np.asarray(x)[:, columns], packed)
    if segment_ids is None:
        segment_ids = np.ones(leaves[0].shape, np.int32)
    check_document_mask(op, mask, from_segment_ids(op, segment_ids, positions))


def check_document_mask(op: str, mask: Mask, documents: DocumentTable) -> None:
    """Requires arrays of a mask that are those of the tokens of these documents."""
    if mask.has_arrays:
        check_mask_rules(op, mask, *documents.edges())
