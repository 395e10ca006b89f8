"""`Pieces`: the pieces of documents in the rows of a rank, and where they are cut.

A piece is a run of consecutive tokens of one document on one rank. A cut piece has an earlier piece
elsewhere, which it continues, or a later one, by which it is continued.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, PyTree, Shaped

from jax_cp_dispatch._arrays import only_where
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._scans import running_max
from jax_cp_dispatch.documents.fingerprint import rank_fingerprint
from jax_cp_dispatch.masks.mask import PACKED, Order
from jax_cp_dispatch.planning import Plan
from jax_cp_dispatch.planning.runs import local_runs
from jax_cp_dispatch.planning.stack import plan_of_group


@dataclasses.dataclass(frozen=True)
class Options:
    """Which ranks hold the tokens, in which order, and how they exchange; static.

    Attributes:
      exchange: the op, its axis, and how to move.
      order: of the tokens.
      checks_order: whether ranks check that documents are in this order; not if that
        was checked on the host.
      finds_row_ends: whether the pieces need `Pieces.row_ends`.
    """

    exchange: CollectiveOptions
    order: Order = PACKED
    checks_order: bool = True
    finds_row_ends: bool = False

    @classmethod
    def of_call(
        cls,
        op: str,
        axis_name: AxisName,
        implementation: str | None = None,
        deadline: float | None = None,
    ) -> Options:
        """Returns checked options; raises the errors of the public functions."""
        given = {"implementation": implementation, "deadline": deadline}
        return cls(read_options(op, axis_name, **given))

    @property
    def op(self) -> str:
        return self.exchange.op

    @property
    def axis_name(self) -> AxisName:
        return self.exchange.axis_name


class Cuts(NamedTuple):
    """Cut pieces, arrays [X]; `document` is -1 in unused entries.

    Attributes:
      document: a number that only the pieces of one document share.
      start: tokens of the document before the piece.
      length: tokens of the piece.
      row: its first row on its rank.
      rank: its rank.
      slot: its number there; in several groups of rows, the number of the group.
      order: its number among the pieces of the document.
      base: the row where its rank receives what the earlier pieces send, in order.
    """

    document: Int32[Array, "..."]
    start: Int32[Array, "..."]
    length: Int32[Array, "..."]
    row: Int32[Array, "..."]
    rank: Int32[Array, "..."]
    slot: Int32[Array, "..."]
    order: Int32[Array, "..."]
    base: Int32[Array, "..."]

    @property
    def end(self) -> Int32[Array, "..."]:
        return self.start + self.length

    @property
    def used(self) -> Bool[Array, "..."]:
        return self.document >= 0

    def on_rank(self, rank: Any, num_slots: int) -> Cuts:
        """Returns those of one rank by their slots, arrays [P]."""
        slot = jnp.where(self.used & (self.rank == rank), self.slot, num_slots)
        none = np.zeros((len(self), num_slots), np.int32)
        none[0] = -1
        table = jnp.asarray(none).at[:, slot.astype(jnp.uint32)].set(jnp.stack(self), mode="drop")
        return Cuts._make(lax.index_in_dim(table, i, keepdims=False) for i in range(len(self)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """The pieces in the rows of one rank, from `document_pieces` or the plan of a placement.

    Rows are arranged as [G, L], in which no piece continues in the next group of rows: the batch
    rows, their halves in zigzag order, or one group of all rows of a placement.

    Attributes:
      begin: i32 [G, L]; the first row of each row's piece, counted over all groups; -1 for padding.
      later: pieces that continue an earlier one: at least all of the documents of this rank.
      earlier: pieces that a later one continues, likewise.
      rank: the index of this rank on the axis.
      fingerprint: i32 [9] or None; what an exchange compares, see `dispatch`.
      row_ends: in packed order, the first and the last document of each batch row; else None.
      batch, num_tokens: the rank's rows [B, T] (static).
      world_size: ranks (static).
      num_slots: the most pieces of `later`, and of `earlier`, on a rank (static).
      chains: received maps are applied in so many chains, of so many maps at most (static).
      min_tokens: of a piece that is neither the first nor the last of its document (static).
    """

    begin: Any
    later: Cuts
    earlier: Cuts
    rank: Any
    fingerprint: Any = None
    row_ends: Any = None
    batch: int = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})
    world_size: int = dataclasses.field(metadata={"static": True})
    num_slots: int = dataclasses.field(metadata={"static": True})
    chains: tuple[int, int] = dataclasses.field(metadata={"static": True})
    min_tokens: int = dataclasses.field(metadata={"static": True})

    @property
    def own_later(self) -> Cuts:
        return self.later.on_rank(self.rank, self.num_slots)

    @property
    def own_earlier(self) -> Cuts:
        return self.earlier.on_rank(self.rank, self.num_slots)

    @property
    def is_token(self) -> Bool[Array, "G L"]:
        return self.begin >= 0

    def arrange(self, x: PyTree[Shaped[Array, "B T ..."]]) -> PyTree[Shaped[Array, "G L ..."]]:
        """Puts the rank's rows [B, T, ...] into groups."""
        groups, rows = self.begin.shape
        per_row = groups * rows // self.batch

        def arranged(x: Any) -> Any:
            missing = max(per_row - self.num_tokens, 0)
            if missing:
                x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(groups, rows, *x.shape[2:])

        return jax.tree.map(arranged, x)

    def restore(self, x: PyTree[Shaped[Array, "G L ..."]]) -> PyTree[Shaped[Array, "B T ..."]]:
        """The inverse of `arrange`."""
        groups, rows = self.begin.shape
        per_row = groups * rows // self.batch
        return jax.tree.map(
            lambda x: x.reshape(self.batch, per_row, *x.shape[2:])[:, : self.num_tokens], x
        )

    def offsets(self) -> Int32[Array, "G L"]:
        """Returns each row's distance from the first row of its piece; -1 for padding."""
        row = jnp.arange(self.begin.size, dtype=jnp.int32).reshape(self.begin.shape)
        return jnp.where(self.is_token, row - self.begin, -1)

    def ends(self) -> Int32[Array, "G L"]:
        """Returns the last row + 1 of each row's piece; 0 for padding."""
        groups, rows = self.begin.shape
        row = jnp.arange(self.begin.size, dtype=jnp.int32).reshape(self.begin.shape)
        last = jnp.pad(
            self.begin[:, 1:] != self.begin[:, :-1], ((0, 0), (0, 1)), constant_values=True
        )
        ends = -running_max(jnp.where(last, -row - 1, -groups * rows)[:, ::-1])[:, ::-1]
        return jnp.where(self.is_token, ends, 0)

    def slots(self, own: Cuts) -> Int32[Array, "G L"]:
        """Returns for each row 1 + the number of its piece in `own`, of this rank, else 0."""
        size = self.begin.size
        number = jnp.arange(1, 1 + own.row.shape[0], dtype=jnp.int32)
        row = jnp.where(own.used, own.row, size).astype(jnp.uint32)
        at = jnp.zeros(size, jnp.int32).at[row].set(number, mode="drop")
        begin = jnp.maximum(self.begin, 0).astype(jnp.uint32)
        return only_where(self.is_token, at.at[begin].get(mode="promise_in_bounds"))


def pieces_from_plan(
    options: Options, plan: Plan, documents: tuple[Any, Any], shape: tuple[int, ...]
) -> Pieces:
    """Returns the pieces of this rank's rows [B, T] in placed order."""
    plan = plan_of_group(options.op, plan)
    _check(options, plan, shape)
    axis = options.exchange.axis_name
    rank = jax.lax.axis_index(axis)
    runs, size = local_runs(plan, rank), plan.num_tokens
    row, first = jnp.arange(size, dtype=jnp.int32), jnp.asarray(runs.row)
    begin = running_max(jnp.zeros(size, jnp.int32).at[first].max(first, mode="drop"))
    begin = jnp.where(row < runs.num_rows, begin, -1)[None]
    (begin,) = vary_alike([begin], also=options.exchange.axis_names)
    table = jnp.asarray(plan.cut_pieces)
    table = table[0 if table.shape[0] == 1 else rank]
    document, start, length, first_row, rest, *where = jnp.moveaxis(table, -1, 0)
    cuts = Cuts(document, start, length, first_row, *where)
    return Pieces(
        begin=begin,
        later=cuts._replace(document=jnp.where(start > 0, document, -1)),
        earlier=cuts._replace(document=jnp.where(rest > 0, document, -1)),
        rank=rank,
        fingerprint=rank_fingerprint(plan.fingerprint, rank, *documents),
        batch=shape[0],
        num_tokens=shape[1],
        world_size=plan.world_size,
        num_slots=plan.max_cut_pieces,
        chains=(1, len(table)),
        min_tokens=1,
    )


def _check(options: Options, plan: Plan, shape: tuple[int, ...]) -> None:
    op = options.op
    num_tokens = shape[0] * shape[1]
    if num_tokens != plan.num_tokens or shape[0] != plan.batch:
        raise ValueError(
            f"{op}: a rank holds {shape[0]} x {shape[1]} rows but the plan is for {plan.batch} x "
            f"{plan.num_tokens // plan.batch}. Place the tokens of this batch."
        )
    num_ranks = jax.lax.axis_size(options.axis_name)
    if plan.world_size != num_ranks:
        raise ValueError(
            f"{op}: the plan is for world_size={plan.world_size} but axis "
            f"{options.axis_name!r} has {num_ranks} devices. Place the tokens again."
        )
