"""Whether packed tokens are in the order of the sequence: each document in one piece.

Segment ids and positions say so. In another order, such as that of a placement or of another
layout, a document would silently be taken for several.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Integer

from jax_cp_dispatch._scans import are_all, running_max, running_maxima
from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.documents.starts import columns_of_begins, document_starts
from jax_cp_dispatch.masks import Mask


def follows_rules(mask: Mask, starts: Any, ends: Any) -> Any:
    """Whether the arrays of a mask are those of the tokens of these documents; -1 is padding."""
    if not mask.has_arrays:
        return True
    column = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    rules = [(x | (starts < 0)).all() for x, _ in mask.rules(column, starts, ends)]
    return jnp.stack(rules).all() if rules else True


_PerToken = Integer[Array, "B T"]


def starts_in_order(
    segment_ids: Ids, positions: Ids | None
) -> tuple[Int32[Array, "B T"], Bool[Array, ""]]:
    """`document_starts` and `is_in_order`, from one pass over the tokens."""
    ids = jnp.asarray(segment_ids)
    positions = None if positions is None else jnp.asarray(positions)
    if ids.dtype != jnp.int32:
        return document_starts(ids, positions), is_in_order(ids, positions)
    tokens = jnp.maximum(ids, 0)
    starts, highest = running_maxima([columns_of_begins(ids, positions), tokens])
    return jnp.where(ids > 0, starts, -1), is_in_order(ids, positions, highest)


@jax.named_scope("cpd.plan")
def is_in_order(
    segment_ids: Ids, positions: Ids | None, highest: _PerToken | None = None
) -> Bool[Array, ""]:
    """Whether no document has separate pieces in its batch row.

    Without positions, every run of an id is a piece. With them, a run also ends where positions do
    not increase, and several documents may have one id: a run continues an earlier one of its id if
    it starts at a higher position, or ends just before the first of a separate one. `highest` is
    the highest id up to each column, of at least 0, if the caller knows it.
    """
    ids = jnp.asarray(segment_ids)
    is_token = ids > 0
    positions = None if positions is None else jnp.asarray(positions)
    same = ids[:, 1:] == ids[:, :-1]
    # Nearly always, the ids of runs ascend. Otherwise all tokens are sorted by id.
    if highest is None:
        highest = jnp.maximum(ids, 0)
        highest = running_max(highest) if ids.dtype == jnp.int32 else lax.cummax(highest, axis=1)
    ascends = are_all(same | ~is_token[:, 1:] | (ids[:, 1:] > highest[:, :-1]))
    if positions is None:
        return lax.cond(ascends, lambda: ascends, lambda: _has_no_pieces(ids, None))
    begins = ~same | (positions[:, 1:] <= positions[:, :-1])
    begins = jnp.pad(begins, ((0, 0), (1, 0)), constant_values=True)
    first = _at(positions, _first_columns(begins))
    restarts = begins[:, 1:] & same & is_token[:, 1:]
    continues = restarts & (positions[:, 1:] > first[:, :-1])

    def separate():
        ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        last = _at(positions, ids.shape[1] - 1 - _first_columns(ends[:, ::-1])[:, ::-1])
        return _has_no_pieces(ids, (first, last))

    return are_all(~continues) & lax.cond(ascends, lambda: ascends, separate)


def _has_no_pieces(
    ids: _PerToken, ends_of_runs: tuple[_PerToken, _PerToken] | None
) -> Bool[Array, ""]:
    """Compares each run with the previous separate one of its id, by a sort of all tokens."""
    column = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    operands = (ids, column, *(ends_of_runs or ()))
    ids, column, *runs = lax.sort(operands, dimension=1, num_keys=2)
    again = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0) & (column[:, 1:] != column[:, :-1] + 1)
    if runs:
        first, last = runs
        continues = first[:, 1:] > first[:, :-1]
        again &= continues | (last[:, 1:] + 1 == first[:, :-1])
    return are_all(~again)


def _first_columns(begins: Bool[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns the column at which the run of each column begins."""
    column = jnp.arange(begins.shape[1], dtype=jnp.int32)
    return running_max(jnp.where(begins, column, 0))


def _at(x: _PerToken, column: Int32[Array, "B T"]) -> _PerToken:
    return jnp.take_along_axis(x, column, axis=1)
