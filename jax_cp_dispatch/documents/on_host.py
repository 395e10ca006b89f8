"""Checks of whole sequences whose documents are known on the host, in any layout."""

from __future__ import annotations

import jax
import numpy as np

from jax_cp_dispatch._arguments import is_on_host
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.documents.segment_ids import read_documents
from jax_cp_dispatch.documents.table import DocumentTable, from_segment_ids
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import check_mask_rules


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
    check_mask_of_documents(op, mask, from_segment_ids(op, segment_ids, positions))


def check_mask_of_documents(op: str, mask: Mask, documents: DocumentTable) -> None:
    """Requires arrays of a mask that are those of the tokens of these documents."""
    if mask.has_arrays:
        check_mask_rules(op, mask, *documents.edges())
