"""`shift_documents`: the shift of a data loader, before the tokens are placed."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Integer, PyTree, Shaped

from jax_cp_dispatch._arguments import check_integer, check_value_of
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.given import read_given_tokens
from jax_cp_dispatch.documents.table import from_segment_ids
from jax_cp_dispatch.masks.token_order import PACKED

_OP = "shift_documents"


def shift_documents(
    x: PyTree[Shaped[np.ndarray, "B T ..."]],
    offset: int,
    *,
    documents: Documents | None = None,
    segment_ids: Integer[np.ndarray, "B T"] | None = None,
    positions: Integer[np.ndarray, "B T"] | None = None,
    fill: float | int = 0,
) -> PyTree[Shaped[np.ndarray, "B T ..."]]:
    """Gives each token the row of the token `offset` before it in its document.

    For data loaders: NumPy, on batches in the order of their documents; place the result. The
    labels of next-token prediction are `shift_documents(tokens, -1, ...)`, those of prediction
    depth d `shift_documents(tokens, -d, ...)`.

    Args:
      x: arrays of any dtype.
      offset: tokens; negative: the row of a later token.
      documents: in packed order, on the host.
      segment_ids, positions: the short form, see `context_parallel_attention`.
      fill: the value where the document has no such token, and in padding.
    Returns:
      Arrays in the structure of `x`.
    Raises:
      TypeError, ValueError: an argument is invalid, or a document is not contiguous.
    """
    import jax  # only its trees; no device is used

    check_integer(_OP, "offset", offset)
    if documents is None and segment_ids is None:
        raise TypeError(f"{_OP}: got no documents. Pass documents, or segment_ids.")
    given = read_given_tokens(_OP, documents, segment_ids, positions)
    if given.order != PACKED:
        raise ValueError(
            f"{_OP}: the documents are in {given.order}, in which neighbours need not be "
            "neighbours in a document. Shift in packed order, then apply the other order."
        )
    document = from_segment_ids(_OP, *given.packed[1:]).numbers()
    num_tokens = document.shape[1]
    source = np.arange(num_tokens) - offset
    inside = (source >= 0) & (source < num_tokens)
    source = np.clip(source, 0, max(num_tokens - 1, 0))
    valid = inside & (document == document[:, source]) & (document > 0)

    def shifted(x: Any) -> Any:
        if x.shape[:2] != document.shape:
            raise ValueError(
                f"{_OP}: an array has shape {x.shape} but segment_ids {document.shape}; it needs "
                "to start with [B, T]."
            )
        check_value_of(_OP, "fill", fill, x.dtype)
        keep = valid.reshape(*valid.shape, *[1] * (x.ndim - 2))
        return np.where(keep, x[:, source], np.asarray(fill, x.dtype))

    return jax.tree.map(shifted, x)
