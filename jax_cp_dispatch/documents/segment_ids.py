"""Reads segment ids and positions: defines their meaning and rejects invalid ones.

A document is a run of one segment id in one batch row; 0 is padding. Only equality with neighbours
and with 0 matters, so ids may have any integer dtype: `number_ids` makes them int32. Ids that are
known on the host are checked. Negative traced ids are padding too. A document in several pieces is
an error: values that are known on the host are checked here, traced ones in the program
(`order.py`).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32, Integer

from jax_cp_dispatch._arguments import check_array, clip_to_int32, is_on_host
from jax_cp_dispatch._scans import running_max
from jax_cp_dispatch.masks.array_mask import gathered

Ids = Integer[Array, "B T"] | Integer[np.ndarray, "B T"]
_INT32 = np.iinfo(np.int32)


def check_ids(op: str, segment_ids: Any, positions: Any, *, may_be_empty: bool = False) -> None:
    """Requires integers of whole batch rows, of the same shape; positions may be None."""
    arrays = {"segment_ids": segment_ids}
    if positions is not None:
        arrays["positions"] = positions
    for name, x in arrays.items():
        check_array(op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} has dtype {x.dtype}; it needs an integer dtype.")
    if segment_ids.ndim != 2 or (0 in segment_ids.shape and not may_be_empty):
        raise ValueError(
            f"{op}: segment_ids has shape {segment_ids.shape} but must be [B, columns], not empty. "
            "For a single packed row pass segment_ids[None]."
        )
    if positions is not None and positions.shape != segment_ids.shape:
        raise ValueError(
            f"{op}: positions has shape {positions.shape} but segment_ids has "
            f"{segment_ids.shape}. Pass equal shapes, or positions=None."
        )


def check_documents(op: str, segment_ids: Any, positions: Any, shape: Any, tokens: str) -> None:
    """Requires integers of this shape, or None.

    Args:
      tokens: what has the shape, for the message.
    """
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
        if x is None:
            continue
        check_array(op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} has dtype {x.dtype}; it needs to be integers.")
        if x.shape != shape:
            raise ValueError(
                f"{op}: {name} has shape {x.shape} but {tokens} {shape}. Pass one integer for "
                "each token."
            )


def read_documents(
    op: str,
    segment_ids: Ids | None,
    positions: Ids | None,
    *,
    order: Int[np.ndarray, " T"] | None = None,
) -> tuple[Any, Any]:
    """Returns segment ids and positions as integers of at least 32 bits with exact comparisons.

    Values known on the host are returned as NumPy int32, by `number_ids`. Traced values, and values
    spread over processes, keep a wide dtype: a rank alone cannot number them.

    Args:
      op: the public operation, for error messages.
      segment_ids, positions: integers of whole batch rows, or of one rank's columns.
      order: the columns in the order of the sequence; None: they are in order.
    Raises:
      ValueError: of the values known on the host, an id is negative, a position does not fit 32
        bits, or a document has several pieces in a batch row.
    """
    if positions is not None:
        positions = _widened(positions)
        if is_on_host(positions):
            positions = np.asarray(positions)
            _check_positions(op, positions)
            positions = positions.astype(np.int32)
    columns = slice(None) if order is None else order
    if segment_ids is None:
        if isinstance(positions, np.ndarray):
            _check_runs(op, np.ones(positions.shape, np.int32), positions[:, columns])
        return None, positions
    segment_ids = _widened(segment_ids)
    if not is_on_host(segment_ids):
        return segment_ids, positions
    segment_ids = np.asarray(segment_ids)
    _check_signs(op, segment_ids)
    if positions is None or is_on_host(positions):
        places = None if positions is None else np.asarray(positions)[:, columns]
        _check_runs(op, segment_ids[:, columns], places)
    return number_ids(segment_ids), positions


def _widened(x: Ids) -> Ids:
    return x.astype(np.int32) if x.dtype.itemsize < 4 else x


def _check_positions(op: str, positions: np.ndarray) -> None:
    if positions.size and (positions.max() > _INT32.max or positions.min() < _INT32.min):
        raise ValueError(f"{op}: positions has a value beyond 32 bits. Count from 0 per document.")


def _check_signs(op: str, segment_ids: np.ndarray) -> None:
    if segment_ids.size and segment_ids.min() < 0:
        row, column = np.argwhere(segment_ids < 0)[0]
        raise ValueError(
            f"{op}: segment_ids[{row}, {column}] is {segment_ids[row, column]}; it needs to "
            "be at least 0. Mark padding with 0 and number documents from 1: add 1 to ids that "
            "count from 0, with padding -1."
        )


def _check_runs(op: str, segment_ids: np.ndarray, positions: np.ndarray | None) -> None:
    """Rejects documents in several pieces, by the rule of `is_in_order` in `order.py`."""
    begins = np.ones(segment_ids.shape, bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    if positions is not None:
        begins[:, 1:] |= positions[:, 1:] <= positions[:, :-1]
    row, first = np.nonzero(begins)
    last = np.nonzero(np.roll(begins, -1, axis=1))[1]
    segment = segment_ids[row, first]
    order = np.lexsort((first, segment, row))  # runs of one id in one row are adjacent
    row, first, last, segment = (x[order] for x in (row, first, last, segment))
    again = (row[1:] == row[:-1]) & (segment[1:] == segment[:-1]) & (segment[1:] != 0)
    if positions is not None:
        start, end = positions[row, first], positions[row, last]
        is_separate = first[1:] != last[:-1] + 1
        again &= (start[1:] > start[:-1]) | is_separate & (end[1:] + 1 == start[:-1])
    if again.any():
        at = int(np.flatnonzero(again)[0])
        raise ValueError(
            f"{op}: segment {segment[at]} occurs in separate runs of batch row {row[at]}, but a "
            "document must be contiguous. Give each run its own segment id, or sort the row by "
            "document. For SharedPrefix and Tree, whose positions return to those of the prompt or "
            "of a parent, omit positions here. For tokens in another order, pass documents= in it: "
            "documents.zigzag(num_ranks), or Placement.documents."
        )


def number_ids(segment_ids: Ids) -> Int32[Any, "B T"]:
    """Returns int32 ids of whole batch rows: in a row with larger ones, 1 + the first column of it.

    So equal ids stay equal, different ones differ, and 0 stays 0, on the host and traced alike.
    """
    ids = segment_ids
    if ids.dtype.itemsize < 4 or ids.dtype == np.int32:
        return ids.astype(np.int32)
    if not isinstance(ids, np.ndarray):
        return _number_traced(gathered(ids, rows=True))
    numbers = ids.astype(np.int32)
    for row in np.flatnonzero((ids > _INT32.max).any(axis=1)):
        _, first, place = np.unique(ids[row], return_index=True, return_inverse=True)
        numbers[row] = np.where(ids[row] > 0, first[place] + 1, 0)
    return numbers


def _number_traced(ids: Integer[Array, "B T"]) -> Int32[Array, "B T"]:
    is_wide = (ids > ids.dtype.type(_INT32.max)).any(axis=1, keepdims=True)
    column = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    of_id, held = lax.sort((ids, column), dimension=1, num_keys=2)
    is_first = jnp.pad(of_id[:, 1:] != of_id[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = jnp.take_along_axis(held, running_max(jnp.where(is_first, column, 0)), axis=1)
    _, first = lax.sort((held, first), dimension=1, num_keys=1)
    return jnp.where(is_wide, jnp.where(ids > 0, first + 1, 0), clip_to_int32(ids))
