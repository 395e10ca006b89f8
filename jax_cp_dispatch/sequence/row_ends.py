"""The first and the last document of each batch row: those that other calls may continue."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch.sequence.pieces import Cuts, Pieces

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


def chunk_ends(starts: Int32[Array, "B L"]) -> dict[str, Int32[Array, " B"]]:
    """Returns where the tokens of this rank's part of each row begin and end, as its edges.

    And how many tokens its first and its last piece have. `starts`: the first row of each row's
    piece, -1 for padding.
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


def find_row_ends(edges: dict[str, Int32[Array, "B C"]], later: Cuts, rows: int) -> RowEnds:
    """Finds them.

    Args:
      edges: of the chunks of all ranks, in the order of the sequence, with `chunk_ends`.
      later: the pieces that continue others, of all ranks, for each chunk its first.
      rows: tokens of a chunk.
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
