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

from jax_cp_dispatch._arrays import At, run_begins, running_max, running_maxima, where_or_zero
from jax_cp_dispatch._ranks.communicator import AxisName, num_ranks_here
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options, vary_alike
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import check_call_ranks, read_given_tokens, trusted
from jax_cp_dispatch.documents.fingerprint import (
    order_error_code,
    order_fingerprint,
    rank_fingerprint,
)
from jax_cp_dispatch.documents.layouts import (
    SequenceLayout,
    contiguous_layout,
    zigzag_layout,
    zigzag_permutation,
)
from jax_cp_dispatch.documents.segment_ids import (
    begin_columns,
    gather_sequence,
    starts_in_order,
)
from jax_cp_dispatch.global_call import pad_tokens, refuse_explicit_axes
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.planning.plan import plan_of_group
from jax_cp_dispatch.planning.runs import local_runs


class Cuts(NamedTuple):
    """Cut pieces, arrays [X]; `document` is -1 in unused entries."""

    document: Int32[Array, "..."]  # a number that only the pieces of one document share
    start: Int32[Array, "..."]  # tokens of the document before the piece
    length: Int32[Array, "..."]  # tokens of the piece
    row: Int32[Array, "..."]  # its first row on its rank
    rank: Int32[Array, "..."]  # its rank
    # Its number there; in several groups of rows, the number of the group
    slot: Int32[Array, "..."]
    order: Int32[Array, "..."]  # its number among the pieces of the document
    # The row where its rank receives what the earlier pieces send, in order
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
      later: pieces that continue an earlier one: at least those of the documents of this rank.
      earlier: pieces that a later one continues: at least those of the documents of this rank.
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
        x = pad_tokens(x, max(groups * rows // self.batch - self.num_tokens, 0))
        return jax.tree.map(lambda x: x.reshape(groups, rows, *x.shape[2:]), x)

    def restore(self, x: PyTree[Shaped[Array, "G L ..."]]) -> PyTree[Shaped[Array, "B T ..."]]:
        """The inverse of `arrange`."""
        groups, rows = self.begin.shape
        per_row = groups * rows // self.batch
        return jax.tree.map(
            lambda x: x.reshape(self.batch, per_row, *x.shape[2:])[:, : self.num_tokens], x
        )

    def slots(self, own: Cuts) -> Int32[Array, "G L"]:
        """Returns for each row 1 + the number of its piece in `own`, of this rank, else 0."""
        size = self.begin.size
        number = jnp.arange(1, 1 + own.row.shape[0], dtype=jnp.int32)
        row = jnp.where(own.used, own.row, size).astype(jnp.uint32)
        at = jnp.zeros(size, jnp.int32).at[row].set(number, mode="drop")
        begin = jnp.maximum(self.begin, 0).astype(jnp.uint32)
        return where_or_zero(self.is_token, at.at[begin].get(mode="promise_in_bounds"))


def document_pieces(
    documents: Documents,
    *,
    axis_name: AxisName,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Pieces:
    """Finds the pieces of this rank's rows, once for all layers of a step.

    Call inside `jax.shard_map` over `axis_name`, on every rank, and pass the result as `documents`
    to the functions of this module. They then exchange nothing but what the layer needs; given the
    documents, each of them finds the pieces again. Not differentiable.

    Args:
      documents: this rank's columns of them, through `in_specs=documents.specs(axis_name)`, in any
        order.
      axis_name: the mesh axis of the ranks, or several, major axis first.
      implementation, deadline: of the exchange, see `ring_exchange`.
    Returns:
      The pieces; a pytree.
    Raises:
      TypeError, ValueError: an argument is invalid.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    op = "document_pieces"
    exchange = read_options(op, axis_name, implementation=implementation, deadline=deadline)
    num_ranks = num_ranks_here(op, axis_name, "the layer itself, which takes documents")
    given = read_given_tokens(op, documents, None, None)
    shape = jnp.shape(given.segment_ids)
    ranks = f"axis {axis_name!r} has {num_ranks} ranks"
    check_call_ranks(op, given, shape[1] * num_ranks, num_ranks, ranks)
    refuse_explicit_axes(op, given)
    return find_pieces(exchange, given, shape, True, given.order == PACKED)


def find_pieces(
    exchange: CollectiveOptions,
    given: Documents,
    shape: tuple[int, ...],
    checks_order: bool,
    finds_row_ends: bool,
) -> Pieces:
    """Returns the pieces of this rank's rows [B, T]: from the plan of a placement, or from ids.

    Without segment ids, a batch row is one document. Ranks check the order of the documents, and
    find `Pieces.row_ends`, if that is asked for.
    """
    segment_ids, positions = given.segment_ids, given.positions
    if given.plan is not None:
        return _pieces_of_plan(exchange, given, shape)
    if 0 in shape:  # as of one row of padding: no layer reads them
        one = jnp.zeros([max(n, 1) for n in shape], jnp.int32)
        of_one = trusted(one, order=given.order)
        pieces = find_pieces(exchange, of_one, one.shape, checks_order, finds_row_ends)
        return dataclasses.replace(pieces, batch=shape[0], num_tokens=shape[1])
    checks_order &= segment_ids is not None or positions is not None
    if segment_ids is None:
        ones = np.ones if positions is None else jnp.ones
        segment_ids = ones(shape, np.int32)
    documents, is_zigzag = (segment_ids, positions), given.order.layout == "zigzag"
    return _pieces_of_ids(exchange, documents, is_zigzag, checks_order, finds_row_ends)


def _pieces_of_plan(
    exchange: CollectiveOptions, given: Documents, shape: tuple[int, ...]
) -> Pieces:
    op, (batch, num_tokens) = exchange.op, shape
    plan = plan_of_group(op, given.plan)
    if batch * num_tokens != plan.num_tokens or batch != plan.batch:
        raise ValueError(
            f"{op}: a rank holds {batch} x {num_tokens} rows but the plan is for {plan.batch} x "
            f"{plan.num_tokens // plan.batch}. Place the tokens of this batch."
        )
    num_ranks = lax.axis_size(exchange.axis_name)
    if plan.world_size != num_ranks:
        raise ValueError(
            f"{op}: the plan is for world_size={plan.world_size} but axis "
            f"{exchange.axis_name!r} has {num_ranks} devices. Place the tokens again."
        )
    rank = lax.axis_index(exchange.axis_name)
    runs, size = local_runs(plan, rank), plan.num_tokens
    row, first = jnp.arange(size, dtype=jnp.int32), jnp.asarray(runs.row)
    begin = running_max(jnp.zeros(size, jnp.int32).at[first].max(first, mode="drop"))
    begin = jnp.where(row < runs.num_rows, begin, -1)[None]
    (begin,) = vary_alike([begin], also=exchange.axis_names)
    table = jnp.asarray(plan.cut_pieces)
    table = table[0 if table.shape[0] == 1 else rank]
    document, start, length, first_row, rest, *where = jnp.moveaxis(table, -1, 0)
    cuts = Cuts(document, start, length, first_row, *where)
    return Pieces(
        begin=begin,
        later=cuts._replace(document=jnp.where(start > 0, document, -1)),
        earlier=cuts._replace(document=jnp.where(rest > 0, document, -1)),
        rank=rank,
        fingerprint=rank_fingerprint(plan.fingerprint, rank, given.segment_ids, given.positions),
        batch=batch,
        num_tokens=num_tokens,
        world_size=plan.world_size,
        num_slots=plan.max_cut_pieces,
        chains=(1, len(table)),
        min_tokens=1,
    )


# ---- The pieces of contiguous and zigzag order, from segment ids on the ranks.
#
# Only the first and last piece of a chunk (a rank's part of a batch row, or half of it in zigzag
# order) can be cut. So the ranks exchange what describes these, and whether ids ascend: at most 36
# bytes for each chunk, and 16 more where documents may continue in another call.


def _pieces_of_ids(
    exchange: CollectiveOptions,
    documents: tuple[Any, Any],
    is_zigzag: bool,
    checks_order: bool,
    finds_row_ends: bool,
) -> Pieces:
    """Returns the pieces by ids and positions of this rank's columns; see `find_pieces`."""
    segment_ids, positions = documents
    batch, num_tokens = segment_ids.shape
    num_ranks, rank = lax.axis_size(exchange.axis_name), lax.axis_index(exchange.axis_name)
    make = zigzag_layout if is_zigzag and num_ranks > 1 else contiguous_layout
    layout = make(num_ranks, num_tokens)
    are_right: Any = True
    if any(x is not None and x.dtype != np.int32 for x in documents):
        segment_ids, are_right = _numbered(exchange, layout, segment_ids, positions)
        positions = None
    ids, places = _grouped(layout, segment_ids), None
    if positions is not None:
        places = _grouped(layout, positions)
    begins, highest = running_maxima([begin_columns(run_begins(ids, places)), jnp.maximum(ids, 0)])
    starts = jnp.where(ids > 0, begins, -1)
    group = jnp.arange(len(starts), dtype=jnp.int32)[:, None] * layout.block_rows
    edges = _edges(layout, ids, places, starts)
    if checks_order:
        edges |= _chunk_order(ids, places, highest)
    if finds_row_ends:
        edges |= _chunk_ends(starts)
    edges = _in_sequence(exchange, layout, edges)
    # Whether the document at each edge goes on behind it, [B, chunks + 1].
    goes_on = (edges["first"][:, 1:] == edges["last"][:, :-1]) & (edges["first"][:, 1:] > 0)
    if places is not None:
        goes_on &= edges["first_position"][:, 1:] > edges["last_position"][:, :-1]
    continues = jnp.pad(goes_on, ((0, 0), (1, 1)))
    later, earlier = _cuts(layout, edges, continues)
    fingerprint = None
    if checks_order:
        documents = segment_ids, positions
        in_order = _are_in_order(exchange, layout, documents, edges, continues[:, :-1])
        fingerprint = order_fingerprint(order_error_code(in_order & are_right), rank)
    begin = jnp.where(starts >= 0, starts + group, -1)
    (begin,) = vary_alike([begin], also=exchange.axis_names)
    return Pieces(
        begin=begin,
        later=later,
        earlier=earlier,
        rank=rank,
        fingerprint=fingerprint,
        row_ends=_find_row_ends(edges, later, num_tokens) if finds_row_ends else None,
        batch=batch,
        num_tokens=num_tokens,
        world_size=num_ranks,
        num_slots=batch * layout.num_blocks,
        chains=(batch, max(num_ranks * layout.num_blocks - 1, 1)),
        min_tokens=max(int(layout.lengths.min()), 1),
    )


def _numbered(
    exchange: CollectiveOptions, layout: SequenceLayout, segment_ids: Any, positions: Any
) -> tuple[Array, Array]:
    """Returns ids that number the documents, as int32, and whether documents are in order.

    The ranks gather ids and positions beyond int32, and compare them in their own dtype.
    """
    documents = jax.tree.map(jnp.asarray, (segment_ids, positions))
    starts, are_right = starts_in_order(
        *gather_sequence(exchange, documents, layout.num_ranks, layout.num_blocks > 1)
    )
    if layout.num_blocks > 1:
        starts = starts[:, zigzag_permutation(layout.num_tokens, layout.num_ranks)]
    starts = vary_alike(starts, also=exchange.axis_names)
    size = segment_ids.shape[1]
    first = jax.lax.axis_index(exchange.axis_name) * size
    return lax.dynamic_slice_in_dim(starts, first, size, axis=1) + 1, are_right


def _grouped(layout: SequenceLayout, x: Any) -> Array:
    """Cuts a rank's columns into chunks, [B * chunks, rows]; the missing row of one is padding."""
    missing = layout.num_rows - x.shape[1]
    return jnp.pad(jnp.asarray(x), ((0, 0), (0, missing))).reshape(-1, layout.block_rows)


def _edges(layout: SequenceLayout, ids, places, starts) -> dict[str, Array]:
    """Returns id, position and length of the first and last piece of each chunk, [B * chunks]."""
    lengths = np.tile(layout.lengths[0], len(ids) // layout.num_blocks).astype(np.int32)
    last = np.stack([np.arange(len(ids)), np.maximum(lengths - 1, 0)], 1).astype(np.int32)
    at_last = At(jnp.asarray(last), (0, 1)).take
    row = jnp.arange(starts.shape[1], dtype=jnp.int32)
    is_first = (starts == 0) & (row[None] < lengths[:, None])
    last_start, last_id = at_last(starts), jnp.maximum(at_last(ids), 0)
    edges = {
        "first": jnp.maximum(ids[:, 0], 0),
        "last": jnp.where(lengths > 0, last_id, 0),
        "first_tokens": is_first.sum(1, dtype=jnp.int32),
        "last_tokens": jnp.where(last_start >= 0, lengths - last_start, 0),
    }
    if places is not None:
        edges |= {"first_position": places[:, 0], "last_position": at_last(places)}
    return edges


def _order(layout: SequenceLayout) -> np.ndarray:
    """Returns the chunks, which come one rank after another, in the order of the sequence."""
    return np.argsort(layout.starts.reshape(-1), kind="stable")


def _in_sequence(
    exchange: CollectiveOptions, layout: SequenceLayout, edges: dict[str, Array]
) -> dict[str, Array]:
    """Returns what describes the chunks of all ranks, [B, chunks], in the order of the sequence."""
    own = jnp.stack(list(edges.values()), -1)  # one array moves
    shape = -1, layout.num_ranks * layout.num_blocks, len(edges)
    columns = own.reshape(-1, layout.num_blocks * len(edges))
    everything = gather_sequence(exchange, columns, layout.num_ranks).reshape(shape)
    if layout.num_blocks > 1:
        everything = everything[:, _order(layout)]
    named = enumerate(edges)
    return {x: lax.index_in_dim(everything, i, axis=2, keepdims=False) for i, x in named}


def _cuts(layout: SequenceLayout, edges: dict[str, Array], continues: Array) -> tuple[Cuts, Cuts]:
    """Returns the pieces that continue others, and those that are continued, of all ranks."""
    order = _order(layout)
    of_chunks = lambda x: x.reshape(1, -1)[:, order].astype(np.int32)
    starts, lengths = of_chunks(layout.starts), of_chunks(layout.lengths)
    batch, num_chunks = edges["first"].shape
    order, batch_row = order.astype(np.int32), np.arange(batch, dtype=np.int32)[:, None]
    before, after = continues[:, :-1], continues[:, 1:]
    chunk = jnp.arange(num_chunks, dtype=jnp.int32)[None]
    is_whole = edges["last_tokens"] == lengths  # one piece
    # The chunk where the last document of a chunk begins, and its first token in the sequence.
    first_token = starts + lengths - edges["last_tokens"]
    own = [jnp.broadcast_to(chunk, before.shape), first_token]
    head, origin = running_maxima([jnp.where(before & is_whole, -1, x) for x in own])
    number = batch_row * num_chunks + head
    previous = lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
    slot = order[None] % layout.num_blocks
    rank, group = order[None] // layout.num_blocks, batch_row * layout.num_blocks + slot
    row = group * layout.block_rows
    row, rank, group = (jnp.broadcast_to(x, before.shape) for x in (row, rank, group))
    index = chunk - previous(head)  # of the first piece in its document
    base = batch_row * (num_chunks - 1)
    if layout.num_blocks > 1:  # a rank's second chunk comes behind its first in the buffer
        first = order[None] % layout.num_blocks == 0
        partner = np.argsort(order)[order - 1]  # the first chunk of the rank of a second one
        other = lambda x: x[:, partner]
        apart = other(before) & (other(previous(number)) != previous(number))
        base = base + jnp.where(~first & apart, other(index), 0)
    later = Cuts(
        jnp.where(before, previous(number), -1),
        jnp.where(before, starts - previous(origin), 0),
        edges["first_tokens"],
        row,
        rank,
        group,
        index,
        jnp.broadcast_to(base, before.shape),
    )
    begin = lengths - edges["last_tokens"]
    earlier = Cuts(
        jnp.where(after, number, -1),
        jnp.where(after, first_token - origin, 0),
        edges["last_tokens"],
        row + begin,
        rank,
        group,
        chunk - head,
        jnp.zeros(before.shape, jnp.int32),
    )
    flat = lambda x: jnp.asarray(x, jnp.int32).reshape(-1)
    return Cuts._make(map(flat, later)), Cuts._make(map(flat, earlier))


# ---- The first and the last document of each batch row: those that other calls may continue.

# A document that the other documents of a call cannot have.
_OWN = 2**31 - 1


class RowEnds(NamedTuple):
    """Where both documents begin and end, in tokens of the batch row; the same on all ranks.

    Padding before the first and behind the last is not theirs. A row without tokens has none:
    `first` is then [T, T), and `last` [0, 0).
    """

    first_begin: Int32[Array, " B"]
    first_end: Int32[Array, " B"]
    last_begin: Int32[Array, " B"]
    last_end: Int32[Array, " B"]

    def first_piece(self, pieces: Pieces) -> Cuts:
        """Returns this rank's part of the first documents, by batch row."""
        return _part(pieces, self.first_begin, self.first_end)

    def closing_piece(self, pieces: Pieces) -> Cuts:
        """Returns the last piece of each last document, if this rank has it."""
        piece = _part(pieces, self.last_begin, self.last_end)
        is_last = piece.end == self.last_end - self.last_begin
        return piece._replace(document=jnp.where(is_last, piece.document, -1))


def _part(pieces: Pieces, begin: Array, end: Array) -> Cuts:
    rows = pieces.begin.shape[1]
    rank_begin = jnp.asarray(pieces.rank, jnp.int32) * rows
    first, stop = jnp.maximum(begin, rank_begin), jnp.minimum(end, rank_begin + rows)
    slot = jnp.arange(len(begin), dtype=jnp.int32)
    none = jnp.zeros_like(slot)
    return Cuts(
        document=jnp.where(first < stop, _OWN, -1),
        start=jnp.where(first < stop, first - begin, 0),
        length=jnp.maximum(stop - first, 0),
        row=jnp.where(first < stop, slot * rows + first - rank_begin, 0),
        rank=none + pieces.rank,
        slot=slot,
        order=none,
        base=none,
    )


def _chunk_ends(starts: Int32[Array, "B L"]) -> dict[str, Int32[Array, " B"]]:
    """Returns where the tokens of this rank's part of each row begin and end, as its edges.

    They include how many tokens its first and its last piece have. `starts` is the first row of
    each row's piece, -1 for padding.
    """
    row, is_token = jnp.arange(starts.shape[1], dtype=jnp.int32)[None], starts >= 0
    begin = jnp.where(is_token, row, starts.shape[1]).min(1, keepdims=True)
    last = starts.max(1, keepdims=True)
    return {
        "begin": begin[:, 0],
        "begin_tokens": (is_token & (starts == begin)).sum(1, dtype=jnp.int32),
        "end": jnp.where(is_token, row + 1, 0).max(1),
        "end_tokens": (is_token & (starts == last)).sum(1, dtype=jnp.int32),
    }


def _find_row_ends(edges: dict[str, Int32[Array, "B C"]], later: Cuts, rows: int) -> RowEnds:
    """Returns where the first and the last document of each batch row begin and end.

    `edges` are of all chunks, in the order of the sequence, with `_chunk_ends`; `later` has, for
    each chunk, its first piece, if that continues another; `rows` are tokens of a chunk.
    """
    shape = batch, num_chunks = edges["end"].shape
    document, before = (x.reshape(shape) for x in (later.document, later.start))
    chunk = jnp.arange(num_chunks, dtype=jnp.int32)[None]
    first_row, has_tokens = chunk * rows, edges["end"] > 0
    begin, begin_end = edges["begin"], edges["begin"] + edges["begin_tokens"]
    head = jnp.where(has_tokens, chunk, num_chunks).min(1, keepdims=True)
    is_head = chunk == head
    # Documents that pieces continue have the number of the chunk where they begin.
    own = jnp.arange(batch, dtype=jnp.int32)[:, None] * num_chunks + head
    goes_on = (is_head & (begin_end == rows)).any(1, keepdims=True)
    in_chunk = jnp.where(goes_on & (document == own), edges["first_tokens"], 0)
    first_end = jnp.where(is_head, begin_end, in_chunk)
    first_end = jnp.where(first_end > 0, first_row + first_end, 0).max(1)
    tail = jnp.where(has_tokens, chunk, -1).max(1, keepdims=True)
    tail_begin = edges["end"] - edges["end_tokens"]
    last_begin = first_row + tail_begin - jnp.where(tail_begin == 0, before, 0)
    num_tokens = num_chunks * rows
    is_empty = ~has_tokens.any(1)
    return RowEnds(
        first_begin=jnp.where(has_tokens, first_row + begin, num_tokens).min(1),
        first_end=jnp.where(is_empty, num_tokens, first_end),
        last_begin=jnp.where(chunk == tail, last_begin, 0).max(1),
        last_end=jnp.where(has_tokens, first_row + edges["end"], 0).max(1),
    )


# ---- Whether the tokens of all ranks are in the order of the layout, and what happens if not.
#
# Nearly always, ids ascend. The ends of the ranks' chunks, which they exchange anyway, then show
# that each document is one run. Otherwise the ranks gather all ids, as attention does.

_NO_ID = np.int32(2**31 - 1)


def _chunk_order(
    ids: Int32[Array, "G L"], places: Any, highest: Int32[Array, "G L"]
) -> dict[str, Int32[Array, " G"]]:
    """Returns the lowest and highest id of each chunk, and whether its ids ascend without restarts.

    `highest` is the highest id so far, 0 before any.
    A restart is a document with the id of the one before it, which only positions separate.
    """
    same = ids[:, 1:] == ids[:, :-1]
    ascends = same | (ids[:, 1:] <= 0) | (ids[:, 1:] > highest[:, :-1])
    if places is not None:
        ascends &= ~same | (ids[:, 1:] <= 0) | (places[:, 1:] > places[:, :-1])
    return {
        "lowest": jnp.where(ids > 0, ids, _NO_ID).min(1, initial=_NO_ID),
        "highest": highest.max(1, initial=0),
        "ascends": ascends.all(1).astype(jnp.int32),
    }


def _are_in_order(
    exchange: CollectiveOptions,
    layout: SequenceLayout,
    documents: tuple[Any, Any],
    edges: dict[str, Int32[Array, "B C"]],
    continues: Bool[Array, "B C"],
) -> Bool[Array, ""]:
    """Whether each document is one run, the same on all ranks.

    `documents` are those of this rank, for the gather; `edges` of all chunks, in the order of the
    sequence, with `_chunk_order`; `continues`: whether the first document of a chunk continues the
    last of the chunk before.
    """
    before = jnp.pad(running_max(edges["highest"])[:, :-1], ((0, 0), (1, 0)))
    follows = (edges["lowest"] > before) | ((edges["lowest"] == before) & continues)
    ascend = ((edges["ascends"] == 1) & follows).all()
    (ascend,) = vary_alike([ascend], also=exchange.axis_names)

    def compared() -> Array:
        whole = gather_sequence(exchange, documents, layout.num_ranks, layout.num_blocks > 1)
        return vary_alike(starts_in_order(*whole)[1], also=exchange.axis_names)

    return lax.cond(ascend, lambda: ascend, compared)
