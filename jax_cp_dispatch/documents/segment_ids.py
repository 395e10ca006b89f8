"""Reads segment ids and positions: defines their meaning and rejects invalid ones.

A document is a run of one segment id in one batch row; 0 is padding. Only equality with neighbours
and with 0 matters, so ids may have any integer dtype. Ids that are known on the host are checked.
Of traced ids, negative ones are padding too. A document in several pieces is an error: of values
known on the host here, of traced ones in the program (`order.py`).
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer

from jax_cp_dispatch._arguments import check_array, is_on_host

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

    Values known on the host are returned as NumPy int32; rows with larger ids are renumbered in the
    order of the ids. Traced values, and values spread over processes, keep a wide dtype.

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
    return _renumbered(segment_ids), positions


def fold_to_int32(x: Integer[Array | np.ndarray, "..."]) -> Any:
    """Maps each integer to one int32 of its sign: itself if it fits, else a mix of all its bits.

    Returns NumPy for NumPy, so that JAX's default of 32 bits loses nothing.
    """
    if x.dtype.itemsize < 4 or x.dtype == np.int32:
        return x.astype(np.int32)
    if isinstance(x, jax.Array) and is_on_host(x) and x.dtype.itemsize == 8:
        x = np.asarray(x)  # operations on it need `jax.enable_x64`
    low = x.astype(np.uint32)
    high = (x >> x.dtype.type(31)) >> x.dtype.type(1) if x.dtype.itemsize == 8 else low & ZERO
    sign = ZERO - (low >> np.uint32(31))
    mixed = (low ^ mix(high.astype(np.uint32) + np.uint32(0x9E3779B9))) >> np.uint32(1)
    mixed = mixed | (x < 0).astype(np.uint32) << np.uint32(31)
    mixed = mixed + (mixed == ZERO).astype(np.uint32)
    where = np.where if isinstance(x, np.ndarray) else jnp.where
    return where(high.astype(np.uint32) == sign, low, mixed).astype(np.int32)


ZERO = np.uint32(0)


def mix(x):
    """A bijection of uint32 whose every output bit depends on every input bit (MurmurHash3)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


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


def _renumbered(segment_ids: np.ndarray) -> np.ndarray:
    """Converts to int32; in rows with larger ids the n-th smallest id becomes n, and 0 stays 0."""
    ids = segment_ids.astype(np.int32)
    if segment_ids.dtype.itemsize == 4 and segment_ids.dtype != np.uint32:
        return ids
    for row in np.flatnonzero((segment_ids > _INT32.max).any(axis=1)):
        known, ids[row] = np.unique(segment_ids[row], return_inverse=True)
        ids[row] += int(known[0] != 0)
    return ids
