"""`shift_documents`: the shift of a data loader, before the tokens are placed."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Integer, PyTree, Shaped

from jax_cp_dispatch._arguments import check_integer, check_value_of
from jax_cp_dispatch.documents.table import from_segment_ids

_OP = "shift_documents"


def shift_documents(
    x: PyTree[Shaped[np.ndarray, "B T ..."]],
    offset: int,
    *,
    segment_ids: Integer[np.ndarray, "B T"],
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
      segment_ids: the document of each token, 0 = padding.
      positions: the position of each token in its document; None if segment ids alone separate the
        documents.
      fill: the value where the document has no such token, and in padding.
    Returns:
      Arrays in the structure of `x`.
    Raises:
      TypeError, ValueError: an argument is invalid, or a document is not contiguous.
    """
    import jax  # only its trees; no device is used

    check_integer(_OP, "offset", offset)
    document = from_segment_ids(_OP, segment_ids, positions).numbers()
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
