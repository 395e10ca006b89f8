"""Reads segment ids and positions: defines their meaning and rejects invalid ones.

A document is a run of one segment id in one batch row; 0 is padding. Only equality with neighbours
and with 0 matters, so ids may have any integer dtype: `number_ids` makes them int32. Ids that are
known on the host are checked. Negative traced ids are padding too. A document in several pieces is
an error, on the host by `normalize_segment_ids`, in the program by `starts_in_order`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, Integer, PyTree

from jax_cp_dispatch._arguments import HostOrDevice, clip_to_int32, is_on_host
from jax_cp_dispatch._arrays import are_all, run_begins, running_max, running_maxima
from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.movement import move
from jax_cp_dispatch._dispatch.xla import AllGather
from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch._ranks.options import CollectiveOptions, vary_alike
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.masks.mask import gathered
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.metadata.fields import single_rows

Ids = Integer[Array, "B T"] | Integer[np.ndarray, "B T"]
_INT32 = np.iinfo(np.int32)
STEPS_OF_DOCUMENTS = {
    "segment_ids": "Pass one integer for each token; for a single packed row, segment_ids[None].",
    "positions": "Pass one integer for each token, or positions=None.",
}


class _Tokens(NamedTuple):
    segment_ids: Integer[HostOrDevice, "B T"]
    positions: Integer[HostOrDevice, "B T"] | None


def check_ids(op: str, segment_ids: Any, positions: Any, *, may_be_empty: bool = False) -> None:
    """Requires integers of whole batch rows, of the same shape."""
    given = {"segment_ids": segment_ids, "positions": positions}
    check_annotated(op, _Tokens, given, STEPS_OF_DOCUMENTS)
    if 0 in segment_ids.shape and not may_be_empty:
        raise ValueError(
            f"{op}: segment_ids has shape {segment_ids.shape} but must be [B, columns], not empty. "
            "Pass at least one token."
        )


def check_documents(op: str, segment_ids: Any, positions: Any, shape: Any, tokens: str) -> None:
    """Requires documents of this shape, or None; `tokens` is what has it, in words."""
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
        if x is not None and x.shape != shape:
            raise ValueError(
                f"{op}: {name} has shape {x.shape} but {tokens} {shape}. Pass one integer for "
                "each token."
            )


def normalize_segment_ids(
    op: str,
    segment_ids: Ids | None,
    positions: Ids | None,
    *,
    order: Int[np.ndarray, " T"] | None = None,
) -> tuple[Any, Any]:
    """Returns segment ids and positions as integers of at least 32 bits with exact comparisons.

    Values known on the host are returned as NumPy int32, by `number_ids`. Traced values, and values
    spread over processes, keep a wide dtype: a rank alone cannot number them. `order` has the
    columns in the order of the sequence; None: they are in order.

    Raises:
      ValueError: of the values known on the host, an id is negative, a position does not fit 32
        bits, or a document has several pieces in a batch row, by the rule of `starts_in_order`.
    """
    ids, positions = (
        x if x is None or x.dtype.itemsize >= 4 else x.astype(np.int32)
        for x in (segment_ids, positions)
    )
    if positions is not None and is_on_host(positions):
        positions = np.asarray(positions)
        if positions.size and (positions.max() > _INT32.max or positions.min() < _INT32.min):
            raise ValueError(
                f"{op}: positions has a value beyond 32 bits. Count from 0 per document."
            )
        positions = positions.astype(np.int32)
    if ids is not None and is_on_host(ids):
        ids = np.asarray(ids)
        if ids.size and ids.min() < 0:
            row, column = np.argwhere(ids < 0)[0]
            raise ValueError(
                f"{op}: segment_ids[{row}, {column}] is {ids[row, column]}; it needs to be at "
                "least 0. Mark padding with 0 and number documents from 1: add 1 to ids that count "
                "from 0, with padding -1."
            )
    numbered = number_ids(ids) if isinstance(ids, np.ndarray) else ids
    given = [x for x in (ids, positions) if x is not None]
    if not given or not all(isinstance(x, np.ndarray) for x in given):
        return numbered, positions
    segments: Any = np.ones(given[0].shape, np.int32) if ids is None else ids
    places = positions
    if order is not None:
        segments, places = (x if x is None else x[:, order] for x in (segments, places))
    begins = run_begins(segments, places)
    row, first = np.nonzero(begins)
    last = np.nonzero(np.roll(begins, -1, axis=1))[1]
    segment = segments[row, first]
    by_id = np.lexsort((first, segment, row))  # runs of one id in one row are adjacent
    row, first, last, segment = (x[by_id] for x in (row, first, last, segment))
    again = (row[1:] == row[:-1]) & (segment[1:] == segment[:-1]) & (segment[1:] != 0)
    if places is not None:
        start, end = places[row, first], places[row, last]
        is_separate = first[1:] != last[:-1] + 1
        again &= (start[1:] > start[:-1]) | is_separate & (end[1:] + 1 == start[:-1])
    for at in np.flatnonzero(again)[:1]:
        raise ValueError(
            f"{op}: segment {segment[at]} occurs in separate runs of batch row {row[at]}, but a "
            "document must be contiguous. Give each run its own segment id, or sort the row by "
            "document. For SharedPrefix and Tree, whose positions return to those of the prompt or "
            "of a parent, omit positions here. For tokens in another order, pass documents= in it: "
            "documents.zigzag(num_ranks), or Placement.documents."
        )
    return numbered, positions


def number_ids(segment_ids: Ids) -> Int32[Any, "B T"]:
    """Returns int32 ids of whole batch rows: in a row with larger ones, 1 + the first column of it.

    So equal ids stay equal, different ones differ, and 0 stays 0, on the host and traced alike.
    """
    ids = segment_ids
    if ids.dtype.itemsize < 4 or ids.dtype == np.int32:
        return ids.astype(np.int32)
    if isinstance(ids, np.ndarray):
        numbers = ids.astype(np.int32)
        for row in np.flatnonzero((ids > _INT32.max).any(axis=1)):
            _, first, place = np.unique(ids[row], return_index=True, return_inverse=True)
            numbers[row] = np.where(ids[row] > 0, first[place] + 1, 0)
        return numbers
    ids = gathered(ids, rows=True)
    is_wide = (ids > ids.dtype.type(_INT32.max)).any(axis=1, keepdims=True)
    column = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    of_id, held = lax.sort((ids, column), dimension=1, num_keys=2)
    begins = jnp.where(run_begins(of_id), column, 0)
    first = jnp.take_along_axis(held, running_max(begins), axis=1)
    _, first = lax.sort((held, first), dimension=1, num_keys=1)
    return jnp.where(is_wide, jnp.where(ids > 0, first + 1, 0), clip_to_int32(ids))


# ---- Where documents begin, and whether tokens are in the order of the sequence.
#
# Segment ids and positions say so. In another order, such as that of a placement or of another
# layout, a document would silently be taken for several.


def document_starts(
    segment_ids: Integer[HostOrDevice, "B T"], positions: Integer[HostOrDevice, "B T"] | None
) -> Any:
    """Returns the column at which each column's document starts; -1 at padding (segment <= 0)."""
    starts = running_max(begin_columns(run_begins(segment_ids, positions)))
    xp = np if isinstance(starts, np.ndarray) else jnp
    return xp.where(segment_ids > 0, starts, -1)


def begin_columns(begins: Bool[HostOrDevice, "B T"]) -> Any:
    """Returns the column of each column at which a run begins; 0 elsewhere."""
    xp = np if isinstance(begins, np.ndarray) else jnp
    return xp.where(begins, xp.arange(begins.shape[1], dtype=np.int32), 0)


def gather_sequence(
    exchange: CollectiveOptions,
    arrays: PyTree[Integer[Array, "B T"]],
    num_ranks: int,
    is_zigzag: bool = False,
) -> PyTree[Integer[Array, "B W_T"]]:
    """Returns the columns of all ranks, in the order of the sequence, on every rank.

    Ranks hold consecutive columns, or, if `is_zigzag`, those of `zigzag_permutation`.
    All ranks pass the same shapes. Between CPU devices all arrays move in one `dispatch`, so the
    deadline holds. XLA's all-gather would wait without a limit for a process that hangs.
    """
    if num_ranks == 1 or not jax.tree.leaves(arrays):
        return arrays
    arrays = vary_alike(arrays, also=exchange.axis_names)
    tokens = jax.tree.map(lambda x: x[None], arrays)
    sent = outgoing(tokens, plan_to_all(num_ranks), capacity=num_ranks)
    (gathered,) = move(exchange, [sent], AllGather(exchange.axis_name))
    in_columns = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], num_ranks * x.shape[2])
    whole = jax.tree.map(in_columns, gathered)
    if not is_zigzag:
        return whole
    order = zigzag_permutation(jax.tree.leaves(whole)[0].shape[1], num_ranks, inverse=True)
    return jax.tree.map(lambda x: x[:, order], whole)


def plan_to_all(num_ranks: int) -> Metadata:
    """Returns the plan by which each rank sends one token to all, to the row of its number."""
    rank = np.arange(num_ranks)
    return single_rows(np.tile(rank, (num_ranks, 1, 1)), rank[:, None, None])


@jax.named_scope("cpd.plan")
def starts_in_order(
    segment_ids: Ids, positions: Ids | None
) -> tuple[Int32[Array, "B T"], Bool[Array, ""]]:
    """Returns `document_starts`, and whether no document has separate pieces in its batch row.

    Without positions, every run of an id is a piece. With them, a run also ends where positions do
    not increase, and several documents may have one id: a run continues an earlier one of its id if
    it starts at a higher position, or ends just before the first of a separate one.
    """
    ids = jnp.asarray(segment_ids)
    positions = None if positions is None else jnp.asarray(positions)
    begins: Any = run_begins(ids, positions)
    run, highest, is_token = begin_columns(begins), jnp.maximum(ids, 0), ids > 0
    if ids.dtype == jnp.int32:
        run, highest = running_maxima([run, highest])
    else:
        run, highest = running_max(run), lax.cummax(highest, axis=1)
    starts = jnp.where(is_token, run, -1)
    # Nearly always, the ids of runs ascend. Otherwise all tokens are sorted by id.
    same = ids[:, 1:] == ids[:, :-1]
    ascends = are_all(same | ~is_token[:, 1:] | (ids[:, 1:] > highest[:, :-1]))
    if positions is None:
        return starts, lax.cond(ascends, lambda: ascends, lambda: _has_no_pieces(ids))
    first = jnp.take_along_axis(positions, run, axis=1)
    restarts = begins[:, 1:] & same & is_token[:, 1:]
    continues = restarts & (positions[:, 1:] > first[:, :-1])

    def separate():
        ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        backwards = running_max(begin_columns(ends[:, ::-1]))[:, ::-1]
        last = jnp.take_along_axis(positions, ids.shape[1] - 1 - backwards, axis=1)
        return _has_no_pieces(ids, first, last)

    return starts, are_all(~continues) & lax.cond(ascends, lambda: ascends, separate)


def _has_no_pieces(ids: Integer[Array, "B T"], *ends: Integer[Array, "B T"]) -> Bool[Array, ""]:
    """Compares each run with the previous separate one of its id, by a sort of all tokens.

    `ends`: the first and the last position of the run of each token, if runs have positions.
    """
    column = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    ids, column, *runs = lax.sort((ids, column, *ends), dimension=1, num_keys=2)
    again = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0) & (column[:, 1:] != column[:, :-1] + 1)
    if runs:
        first, last = runs
        continues = first[:, 1:] > first[:, :-1]
        again &= continues | (last[:, 1:] + 1 == first[:, :-1])
    return are_all(~again)
