"""Cuts keys into chunks; the order and ranges of the chunks that a rank holds at one step."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from jax_cp_dispatch._arrays import known_inside
from jax_cp_dispatch.attention.local.rows import with_rows
from jax_cp_dispatch.documents.layouts import SequenceLayout


class Chunking(NamedTuple):
    """A rank's keys in C chunks; each chunk has a piece of every block, with equally many rows.

    If the rows of a block do not divide, its last pieces are padded.
    """

    layout: SequenceLayout
    num_chunks: int

    @property
    def piece_rows(self) -> int:
        return -(-self.layout.block_rows // self.num_chunks)

    @property
    def is_in_order(self) -> bool:
        """Whether there is one chunk without padding: its rows are already in sequence order."""
        return self.num_chunks == 1 and bool((self.layout.lengths == self.layout.block_rows).all())

    @property
    def chunk_rows(self) -> int:
        return self.layout.num_blocks * self.piece_rows

    @property
    def most_tokens(self) -> int:
        """The maximum tokens held at a step: one chunk of each number, from any ranks."""
        first = np.arange(self.num_chunks)[:, None, None] * self.piece_rows
        lengths = np.clip(self.layout.lengths - first, 0, self.piece_rows)  # chunk, rank, block
        return int(lengths.sum(2).max(1).sum())

    def cut(self, x: Shaped[Array, "B rows K H"]) -> Shaped[Array, "C B*K chunk_rows H"]:
        C, P = self.num_chunks, self.layout.num_blocks
        B, _, K, H = x.shape
        x = x.reshape(B, P, self.layout.block_rows, K, H)
        x = with_rows(x, C * self.piece_rows, 2)
        x = x.reshape(B, P, C, self.piece_rows, K, H)
        return jnp.transpose(x, (2, 0, 4, 1, 3, 5)).reshape(C, B * K, self.chunk_rows, H)

    def uncut(
        self, x: Shaped[Array, "C M chunk_rows H"], batch: int
    ) -> Shaped[Array, "B rows K H"]:
        C, P = self.num_chunks, self.layout.num_blocks
        H = x.shape[3]
        x = x.reshape(C, batch, -1, P, self.piece_rows, H)
        x = jnp.transpose(x, (1, 3, 0, 4, 2, 5)).reshape(batch, P, C * self.piece_rows, -1, H)
        return x[:, :, : self.layout.block_rows].reshape(batch, -1, *x.shape[3:])

    def key_order(self, source: Int[Array, " C"], chunk: Int[Array, " C"]) -> KeyOrder:
        """Returns the order if each slot holds chunk `chunk[slot]` of rank `source[slot]`."""
        rows, first = np.int32(self.piece_rows), chunk[:, None] * self.piece_rows
        blocks = known_inside(np.stack([self.layout.starts, self.layout.lengths], 1), source)
        start, length = blocks[:, 0] + first, lax.clamp(np.int32(0), blocks[:, 1] - first, rows)
        return KeyOrder(self, start.reshape(-1), length.reshape(-1))


class KeyOrder(NamedTuple):
    """The C * blocks pieces that a rank holds at one step, in slots of `piece_rows` rows.

    Attention reads the tokens of all pieces in sequence order, without gaps: then the keys of a
    query are contiguous. Arrays have an axis of M = B * K matrices, like blocks, so nothing is
    transposed at a step.
    """

    chunking: Chunking
    start: Int[Array, " pieces"]  # first token of each piece
    length: Int[Array, " pieces"]  # its tokens

    def rows_before(self, token: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Returns how many rows hold tokens before each of these."""
        start, length = (x[(None,) * token.ndim] for x in (self.start, self.length))
        inside = jnp.minimum(jnp.maximum(token[..., None] - start, 0), length)
        return jnp.sum(inside, axis=-1, dtype=jnp.int32)

    def tokens(self, num_rows: int) -> Int[Array, " S"]:
        """Returns the token of each of S = `num_rows` ordered rows; -1 after the last token."""
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        start, first, length = (x[None] for x in (self.start, self._first_rows(), self.length))
        is_in = (row >= first) & (row < first + length)
        return jnp.max(jnp.where(is_in, start + row - first, -1), axis=1)

    def in_order(
        self, x: Shaped[Array, "C M chunk_rows H"], num_rows: int
    ) -> Shaped[Array, "M S H"]:
        """Orders the rows as S = `num_rows` rows; rows after the last token repeat any token."""
        if self.chunking.is_in_order:
            return with_rows(x[0], num_rows, 1)
        x = jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, x.shape[3])
        return known_inside(x, self._slot_rows(num_rows), axis=1)

    def in_slots(self, x: Shaped[Array, "M S H"]) -> Shaped[Array, "C M chunk_rows H"]:
        """The inverse of `in_order`; padding rows of a piece become zero."""
        if self.chunking.is_in_order:
            return x[None, :, : self.chunking.chunk_rows]
        row, is_token = self._ordered_rows()
        x = jnp.where(is_token[None, :, None], x[:, row], 0)
        x = x.reshape(x.shape[0], self.chunking.num_chunks, -1, x.shape[2])
        return jnp.swapaxes(x, 0, 1)

    def _slot_rows(self, num_rows: int) -> Int[Array, " S"]:
        """Maps each ordered row to its row in slots; rows after the last token map to any row."""
        rows, num_pieces = self.chunking.piece_rows, self.start.size
        order = jnp.argsort(self.start).astype(jnp.int32)
        length = known_inside(self.length, order)
        end = jnp.cumsum(length, dtype=jnp.int32)
        row = jnp.arange(num_rows, dtype=jnp.int32)
        piece = jnp.searchsorted(end, row, side="right", method="compare_all")
        piece = jnp.minimum(piece, num_pieces - 1)
        within = jnp.minimum(row - known_inside(end - length, piece), rows - 1)
        return known_inside(order, piece) * rows + within

    def _ordered_rows(self) -> tuple[Int[Array, " S"], Bool[Array, " S"]]:
        """Maps each row in slots to its ordered row, and says whether it holds a token."""
        rows, first = self.chunking.piece_rows, self._first_rows()
        inside = jnp.arange(rows, dtype=jnp.int32)[None]
        return (first[:, None] + inside).reshape(-1), (inside < self.length[:, None]).reshape(-1)

    def _first_rows(self) -> Int[Array, " pieces"]:
        """Returns the ordered row of each piece's first token."""
        earlier = self.start[None, :] < self.start[:, None]
        return jnp.sum(jnp.where(earlier, self.length[None], 0), axis=1, dtype=jnp.int32)
