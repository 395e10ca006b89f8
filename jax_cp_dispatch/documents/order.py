"""Where documents begin, and whether tokens are in the order of the sequence.

Segment ids and positions say so. In another order, such as that of a placement or of another
layout, a document would silently be taken for several.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Integer, PyTree

from jax_cp_dispatch._dispatch import move, outgoing
from jax_cp_dispatch._dispatch.by_xla import dispatch_or_collectives
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._scans import are_all, running_max, running_maxima
from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.metadata import Metadata


def document_starts(
    segment_ids: Integer[Array, "B T"], positions: Integer[Array, "B T"] | None
) -> Int32[Array, "B T"]:
    """Returns the column at which each column's document starts; -1 at padding (segment <= 0)."""
    starts = running_max(begin_columns(segment_ids, positions))
    return jnp.where(segment_ids > 0, starts, -1)


def begin_columns(
    segment_ids: Integer[Array, "B T"], positions: Integer[Array, "B T"] | None
) -> Int32[Array, "B T"]:
    """Returns the column of each column at which a document or padding begins; 0 elsewhere."""
    column = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    if positions is not None:
        new |= positions[:, 1:] <= positions[:, :-1]
    new = jnp.pad(new, ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(new, column, 0)


def document_ends(starts: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns one past the last column of each column's document."""
    column = jnp.arange(starts.shape[1], dtype=jnp.int32)
    is_last = jnp.pad(starts[:, 1:] != starts[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = jnp.where(is_last, column, starts.shape[1])
    return 1 - jnp.flip(running_max(jnp.flip(-last, axis=1)), axis=1)


def gather_sequence(
    exchange: CollectiveOptions, arrays: PyTree[Integer[Array, "B T"]], num_ranks: int
) -> PyTree[Integer[Array, "B W_T"]]:
    """Returns the columns of all ranks, one rank after the other, on every rank.

    Between CPU devices all arrays move in one `dispatch`, so the deadline holds. XLA's all-gather
    would wait without a limit for a process that hangs.

    Args:
      exchange: options of the call.
      arrays: of this rank; the same shapes on all ranks.
      num_ranks: of the axis, W.
    """
    leaves, structure = jax.tree.flatten(arrays)
    if num_ranks == 1 or not leaves:
        return arrays
    arrays = structure.unflatten(vary_alike(leaves, also=exchange.axis_names))
    by_xla = lambda arrays: jax.tree.map(
        lambda x: lax.all_gather(x, exchange.axis_name, axis=1, tiled=True), arrays
    )
    by_dispatch = lambda arrays: _by_dispatch(exchange, arrays, num_ranks)
    return dispatch_or_collectives(exchange, arrays, by_dispatch, by_xla)


def _by_dispatch(exchange: CollectiveOptions, arrays: Any, num_ranks: int):
    """Sends this rank's arrays to all ranks as one token, to the row of its number."""
    plan = plan_to_all(num_ranks)
    tokens = jax.tree.map(lambda x: x[None], arrays)
    ids = outgoing(exchange.op, "segment_ids", tokens, plan, capacity=num_ranks)
    (gathered,) = move(exchange, [ids])
    in_columns = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], num_ranks * x.shape[2])
    return jax.tree.map(in_columns, gathered)


def plan_to_all(num_ranks: int) -> Metadata:
    """Returns the plan by which each rank sends one token to all, to the row of its number."""
    rank = np.arange(num_ranks)
    received = np.ones((num_ranks, num_ranks + 1), np.uint32)
    received[:, -1] = num_ranks
    to_all = (num_ranks, 1, num_ranks)  # a replica for every rank
    return Metadata(
        dst_rank=np.tile(rank.astype(np.int32), (num_ranks, 1, 1)),
        dst_offset=np.repeat(rank.astype(np.uint32), num_ranks).reshape(to_all),
        seq_len=np.ones((num_ranks, 1), np.uint32),
        num_recv_tokens=received,
        world_size=num_ranks,
    )


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
    starts, highest = running_maxima([begin_columns(ids, positions), tokens])
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


def _has_no_pieces(ids: _PerToken, run_ends: tuple[_PerToken, _PerToken] | None) -> Bool[Array, ""]:
    """Compares each run with the previous separate one of its id, by a sort of all tokens."""
    column = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    operands = (ids, column, *(run_ends or ()))
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
