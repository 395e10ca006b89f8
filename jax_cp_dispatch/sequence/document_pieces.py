"""The pieces of contiguous and zigzag order, from segment ids on the ranks.

Only the first and last piece of a chunk (a rank's part of a batch row, or half of it in zigzag
order) can be cut. So the ranks exchange what describes these, and whether ids ascend: at most 36
bytes for each chunk, and 16 more where documents may continue in another call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._arrays import At
from jax_cp_dispatch._ranks.communicator import AxisName, num_ranks_here
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._scans import running_maxima
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.fingerprint import order_fault, order_fingerprint
from jax_cp_dispatch.documents.given import read_given_tokens
from jax_cp_dispatch.documents.layouts import (
    SequenceLayout,
    contiguous_layout,
    zigzag_layout,
    zigzag_permutation,
)
from jax_cp_dispatch.documents.order import begin_columns, gather_sequence, starts_in_order
from jax_cp_dispatch.documents.segment_ids import read_documents
from jax_cp_dispatch.global_call.explicit_axes import refuse_explicit_axes
from jax_cp_dispatch.masks.mask import PACKED, PLACED
from jax_cp_dispatch.sequence.chunk_order import are_in_order, chunk_order
from jax_cp_dispatch.sequence.pieces import Cuts, Options, Pieces, pieces_from_plan
from jax_cp_dispatch.sequence.row_ends import chunk_ends, find_row_ends


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
    options = Options.of_call(op, axis_name, implementation, deadline)
    num_ranks = num_ranks_here(op, axis_name, "the layer itself, which takes documents")
    given = read_given_tokens(op, documents, None, None)
    _, segment_ids, positions = given.packed
    shape = jnp.shape(segment_ids)
    options = dataclasses.replace(options, order=given.order, finds_row_ends=given.order == PACKED)
    ranks = f"axis {axis_name!r} has {num_ranks} ranks"
    given.check_ranks(op, shape[1] * num_ranks, num_ranks, ranks)
    refuse_explicit_axes(op, (given.packed, given.plan))
    if given.order == PLACED:
        return pieces_from_plan(options, given.plan, (segment_ids, positions), shape)
    return pieces_from_ids(options, segment_ids, positions, shape)


def pieces_from_ids(options: Options, segment_ids: Any, positions: Any, shape: Any) -> Pieces:
    """Returns the pieces of this rank's rows [B, T]; without ids, a batch row is one document."""
    if 0 in shape:  # as of one row of padding: no layer reads them
        one = jnp.zeros([max(n, 1) for n in shape], jnp.int32)
        pieces = pieces_from_ids(options, one, None, one.shape)
        return dataclasses.replace(pieces, batch=shape[0], num_tokens=shape[1])
    batch, num_tokens = shape
    num_ranks = jax.lax.axis_size(options.axis_name)
    is_zigzag = options.order.layout == "zigzag" and num_ranks > 1
    make = zigzag_layout if is_zigzag else contiguous_layout
    layout = make(num_ranks, num_tokens)
    checks_order = options.checks_order and segment_ids is not None
    if segment_ids is None:
        segment_ids = np.ones(shape, np.int32)
    segment_ids, positions = read_documents(options.op, segment_ids, positions)
    are_right: Any = True
    if any(x is not None and x.dtype != np.int32 for x in (segment_ids, positions)):
        segment_ids, are_right = _numbered(options.exchange, layout, segment_ids, positions)
        positions = None
    ids, places = _grouped(layout, segment_ids), None
    if positions is not None:
        places = _grouped(layout, positions)
    begins, highest = running_maxima([begin_columns(ids, places), jnp.maximum(ids, 0)])
    starts = jnp.where(ids > 0, begins, -1)
    group = jnp.arange(len(starts), dtype=jnp.int32)[:, None] * layout.block_rows
    edges = _edges(layout, ids, places, starts)
    if checks_order:
        edges |= chunk_order(ids, places, highest)
    if options.finds_row_ends:
        edges |= chunk_ends(starts)
    edges = _in_sequence(options.exchange, layout, edges)
    continues = _continues(edges)
    later, earlier = _cuts(layout, edges, continues)
    rank, fingerprint = jax.lax.axis_index(options.axis_name), None
    if checks_order:
        documents = segment_ids, positions
        in_order = are_in_order(options.exchange, layout, documents, edges, continues[:, :-1])
        fingerprint = order_fingerprint(order_fault(in_order & are_right), rank)
    begin = jnp.where(starts >= 0, starts + group, -1)
    (begin,) = vary_alike([begin], also=options.exchange.axis_names)
    return Pieces(
        begin=begin,
        later=later,
        earlier=earlier,
        rank=rank,
        fingerprint=fingerprint,
        row_ends=find_row_ends(edges, later, num_tokens) if options.finds_row_ends else None,
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
    whole = gather_sequence(exchange, documents, layout.num_ranks)
    order = None
    if layout.num_blocks > 1:
        order = zigzag_permutation(layout.num_tokens, layout.num_ranks)
        whole = jax.tree.map(lambda x: x[:, np.argsort(order)], whole)
    starts, are_right = starts_in_order(*whole)
    (starts,) = vary_alike(
        [starts if order is None else starts[:, order]], also=exchange.axis_names
    )
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


def _continues(edges: dict[str, Array]) -> Array:
    """Returns whether the document at each edge goes on behind it, [B, chunks + 1]."""
    continues = (edges["first"][:, 1:] == edges["last"][:, :-1]) & (edges["first"][:, 1:] > 0)
    if "first_position" in edges:
        continues &= edges["first_position"][:, 1:] > edges["last_position"][:, :-1]
    return jnp.pad(continues, ((0, 0), (1, 1)))


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
