"""Chunks of keys that rotate: how they are cut, who holds them at each step, their moves."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32, PyTree, Shaped

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch._arrays import divided, take_in_bounds
from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.movement import move
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName, num_ranks_here
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options
from jax_cp_dispatch.attention.local.ranges import with_rows
from jax_cp_dispatch.cycles import CycleRows, check_chunk_maps
from jax_cp_dispatch.documents.layouts import SequenceLayout
from jax_cp_dispatch.metadata.fields import single_rows


class Chunking(NamedTuple):
    """A rank's keys in C chunks; each chunk has a piece of every block, with equally many rows.

    If the rows of a block do not divide, its last pieces are padded.
    """

    layout: SequenceLayout  # of the tokens on the ranks
    num_chunks: int  # C
    piece_rows: int  # rows of a piece
    most_tokens: int  # the most tokens held at a step: one chunk of each number, from any ranks
    is_in_order: bool  # there is one chunk without padding: its rows are already in sequence order

    @classmethod
    def of(cls, layout: SequenceLayout, num_chunks: int) -> Chunking:
        piece_rows, lengths = -(-layout.block_rows // num_chunks), layout.lengths
        first = np.arange(num_chunks)[:, None, None] * piece_rows
        held = np.clip(lengths - first, 0, piece_rows).sum(2)  # chunk, rank
        is_in_order = num_chunks == 1 and bool((lengths == layout.block_rows).all())
        return cls(layout, num_chunks, piece_rows, int(held.max(1).sum()), is_in_order)

    def tile(self, x: Shaped[Array, "B rows K H"]) -> Shaped[Array, "C B*K chunk_rows H"]:
        C, P = self.num_chunks, self.layout.num_blocks
        B, _, K, H = x.shape
        x = x.reshape(B, P, self.layout.block_rows, K, H)
        x = with_rows(x, C * self.piece_rows, 2)
        x = x.reshape(B, P, C, self.piece_rows, K, H)
        return jnp.transpose(x, (2, 0, 4, 1, 3, 5)).reshape(C, B * K, P * self.piece_rows, H)

    def untile(
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
        blocks = take_in_bounds(np.stack([self.layout.starts, self.layout.lengths], 1), source)
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
        rows = self.chunking.piece_rows
        order = jnp.argsort(self.start).astype(jnp.int32)
        length = take_in_bounds(self.length, order)
        end = jnp.cumsum(length, dtype=jnp.int32)
        row = jnp.arange(num_rows, dtype=jnp.int32)
        piece = jnp.searchsorted(end, row, side="right", method="compare_all")
        piece = jnp.minimum(piece, self.start.size - 1)
        within = jnp.minimum(row - take_in_bounds(end - length, piece), rows - 1)
        x = jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, x.shape[3])
        return take_in_bounds(x, take_in_bounds(order, piece) * rows + within, axis=1)

    def in_slots(self, x: Shaped[Array, "M S H"]) -> Shaped[Array, "C M chunk_rows H"]:
        """The inverse of `in_order`; padding rows of a piece become zero."""
        if self.chunking.is_in_order:
            return x[None, :, : self.chunking.layout.num_rows]
        inside = jnp.arange(self.chunking.piece_rows, dtype=jnp.int32)[None]
        row = (self._first_rows()[:, None] + inside).reshape(-1)
        is_token = (inside < self.length[:, None]).reshape(-1)
        x = jnp.where(is_token[None, :, None], x[:, row], 0)
        x = x.reshape(x.shape[0], self.chunking.num_chunks, -1, x.shape[2])
        return jnp.swapaxes(x, 0, 1)

    def _first_rows(self) -> Int[Array, " pieces"]:
        """Returns the ordered row of each piece's first token."""
        earlier = self.start[None, :] < self.start[:, None]
        return jnp.sum(jnp.where(earlier, self.length[None], 0), axis=1, dtype=jnp.int32)


def rows_before(
    token: Int[Array, "*shape"], start: Int[Array, " pieces"], length: Int[Array, " pieces"]
) -> Int[Array, "*shape"]:
    """Returns how many tokens of the pieces are before each of these tokens."""
    start, length = (x[(None,) * token.ndim] for x in (start, length))
    inside = jnp.minimum(jnp.maximum(token[..., None] - start, 0), length)
    return jnp.sum(inside, axis=-1, dtype=jnp.int32)


# ---- Exchanges in which every rank sends each chunk to at most one other rank.

# Chunk c of rank r goes to rank `routes[c][r]`, into the same slot c; -1: it is not sent.
Routes = tuple[tuple[int, ...], ...]


@door("ring_exchange")
def ring_exchange(
    x: PyTree[Shaped[Array, "..."]],
    *,
    axis_name: AxisName,
    shift: int = 1,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> PyTree[Shaped[Array, "..."]]:
    """Sends `x` to rank + shift and returns that of rank - shift, all arrays in one exchange.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis. Linear; its transpose
    is the exchange with `-shift`.

    Args:
      x: any arrays, of the same shapes on all ranks.
      shift: ranks to move by, modulo the size of the axis.
      implementation: see `available_implementations`; "xla" makes a collective-permute of each
        array. None is this package's transports between CPU devices, and "xla" on GPUs and TPUs.
      axis_name, deadline, num_comm_sm: see `dispatch`.
    Returns:
      Arrays in the structure of `x`.
    Raises:
      ValueError, NotImplementedError: the implementation is unknown, or not available here.
      jax.errors.JaxRuntimeError: see `dispatch`.
    """
    op = "ring_exchange"
    exchange = read_options(op, axis_name, None, implementation, deadline, num_comm_sm)
    check_integer(op, "shift", shift)
    num_ranks = num_ranks_here(op, axis_name, "dispatch")
    route = tuple((rank + shift) % num_ranks for rank in range(num_ranks))
    chunks = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], x)
    moved = move_chunks(exchange, chunks, (route,))
    return jax.tree.map(lambda leaf: leaf[0], moved)


@door("chunk_exchange")
def chunk_exchange(
    chunks: PyTree[Shaped[Array, "C ..."]],
    out_chunk: CycleRows,
    in_chunk: CycleRows,
    *,
    axis_name: AxisName,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> PyTree[Shaped[Array, "C ..."]]:
    """Sends at most one chunk over each link, all in one exchange: a step of Hamilton attention.

    Call where `ring_exchange` may be called. Linear; its transpose is the exchange with both maps
    transposed.

    Args:
      chunks: arrays of C chunks each.
      out_chunk: for ranks a, b the chunk that a sends to b, or -1; see `chunk_maps`.
      in_chunk: for ranks a, b the slot in which a receives from b, or -1: the transpose of
        `out_chunk`, because a chunk keeps its number.
      axis_name, implementation, deadline, num_comm_sm: see `ring_exchange`; "xla" makes an
        all-to-all of each array if all links are used, else a collective-permute of each chunk.
    Returns:
      The received chunks in the structure of `chunks`; slots that no rank fills are zero.
    Raises:
      ValueError: the maps contradict each other, or do not match the axis or the chunks.
      NotImplementedError, jax.errors.JaxRuntimeError: see `ring_exchange`.
    """
    op = "chunk_exchange"
    exchange = read_options(op, axis_name, None, implementation, deadline, num_comm_sm)
    num_ranks = num_ranks_here(op, axis_name, "dispatch")
    num_chunks, out_chunk = check_chunk_maps(op, out_chunk, in_chunk, num_ranks)
    for leaf in jax.tree.leaves(chunks):
        if jnp.shape(leaf)[:1] != (num_chunks,):
            raise ValueError(
                f"{op}: an array has shape {jnp.shape(leaf)} but the maps name "
                f"{num_chunks} chunks, which its first axis must count."
            )
    if num_chunks == 0:
        return chunks
    routes = np.full((num_chunks, num_ranks), -1)
    for rank, row in enumerate(out_chunk):
        for peer, chunk in enumerate(row):
            if chunk >= 0:
                routes[chunk, rank] = peer
    return move_chunks(exchange, chunks, tuple(map(tuple, routes.tolist())))


def reverse(routes: Routes) -> Routes:
    back = np.full((len(routes), len(routes[0]) if routes else 0), -1)
    for chunk, route in enumerate(routes):
        for rank, peer in enumerate(route):
            if peer >= 0:
                back[chunk, peer] = rank
    return tuple(map(tuple, back.tolist()))


def move_chunks(
    exchange: CollectiveOptions | None,
    chunks: Any,
    routes: Routes,
    fingerprint: Int32[Array, " 9"] | None = None,
) -> Any:
    """Moves chunk c of every rank r into slot c of rank `routes[c][r]`; other slots become zero.

    Ranks compare a fingerprint first; XLA's collectives do not. Without an exchange, for the
    profile of one rank, nothing moves.
    """
    if exchange is None:
        return chunks
    num_chunks = len(routes)
    plan = single_rows(np.asarray(routes).T, np.arange(num_chunks))
    sent = outgoing(chunks, plan, capacity=num_chunks, fingerprint=fingerprint)
    return move(exchange, [sent], _Permutation(routes, exchange.axis_name))[0]


class _Permutation(NamedTuple):
    """One all-to-all if every rank sends to all others, which uses all links at once.

    Otherwise, in rings and between nodes, one collective-permute for each chunk.
    """

    routes: Routes
    axis_name: AxisName

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        peers, name = np.asarray(self.routes).T, self.axis_name  # [rank, chunk]
        num_ranks, num_chunks = peers.shape
        others = [[peer for peer in range(num_ranks) if peer != rank] for rank in range(num_ranks)]
        if num_chunks == 1 or not np.array_equal(np.sort(peers, axis=1), others):
            pairs = [[(r, to) for r, to in enumerate(route) if to >= 0] for route in self.routes]
            permute = lambda x, arcs: lax.ppermute(x, name, arcs)
            return [
                jnp.stack([permute(x[c], arcs) for c, arcs in enumerate(pairs)]) for x in arrays
            ]
        chunk_for = np.zeros((num_ranks, num_ranks), np.int32)  # [rank, peer]; own: any value
        chunk_for[np.arange(num_ranks)[:, None], peers] = np.arange(num_chunks)
        sender = np.zeros_like(peers)  # [rank, chunk]
        sender[peers, np.arange(num_chunks)] = np.arange(num_ranks)[:, None]
        rank = lax.axis_index(name)
        outgoing, incoming = jnp.asarray(chunk_for)[rank], jnp.asarray(sender)[rank]
        return [lax.all_to_all(x[outgoing], name, 0, 0)[incoming] for x in arrays]

    def transposed(self) -> _Permutation:
        return self._replace(routes=reverse(self.routes))


# ---- Schedules: which rank holds which chunks of keys and values at each step, and their routes.
#
# Every rank cuts its keys and values into C chunks. At step 0 it holds its own chunks; after n - 1
# exchanges it has held every chunk of every rank once.


@dataclasses.dataclass(frozen=True)
class Schedule(abc.ABC):
    """What each rank holds at each step; hashable. Methods take numbers, or traced ones.

    Without an `exchange`, nothing moves.
    """

    @property
    @abc.abstractmethod
    def routes(self) -> Routes:
        """Where the chunks in each slot of each rank go after each step."""

    @property
    def num_chunks(self) -> int:
        """The chunks of a rank."""
        return len(self.routes)

    @abc.abstractmethod
    def held(self, rank, step) -> tuple[Int[Array, " C"], Int[Array, " C"]]:
        """Returns, of each slot of `rank` at `step`, whose chunk it holds, and its number."""

    @abc.abstractmethod
    def fetch_keys(self, exchange: CollectiveOptions | None, own, held, step, fingerprint=None):
        """Fetches the chunks of step + 1, given a rank's own and those that it holds at `step`."""

    def begin(self, gradients) -> tuple[Any, Any]:
        """Returns `travelling` and `home` after step 0, given the gradients of own chunks."""
        return gradients, ()

    @abc.abstractmethod
    def return_gradients(
        self, exchange: CollectiveOptions | None, travelling, home, step
    ) -> tuple[Any, Any]:
        """Moves the gradients of step - 1 while those of `step` are computed.

        Returns the gradients to add to those of `step` before they move on, or None; and `home`.
        After the last step the first is complete, or, if it is None, `home`.
        """


@dataclasses.dataclass(frozen=True)
class CycleSchedule(Schedule):
    """Chunk c moves along cycle c, and its gradient one step later. One cycle is a ring.

    Rows are arc-disjoint Hamiltonian cycles, so each link carries one chunk per step.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def routes(self) -> Routes:
        nexts = [dict(zip(row, (*row[1:], row[0]), strict=True)) for row in self.rows]
        return tuple(tuple(following[rank] for rank in sorted(following)) for following in nexts)

    def held(self, rank, step):
        rows, n = np.array(self.rows, np.int32), len(self.rows[0])
        place = take_in_bounds(np.argsort(rows, axis=1).astype(np.int32).T, rank)
        _, source = divided(place + n - step, n)
        chunk = np.arange(len(rows), dtype=np.int32)
        return take_in_bounds(rows.reshape(-1), source + n * chunk), jnp.asarray(chunk)

    def fetch_keys(self, exchange, own, held, step, fingerprint=None):
        return move_chunks(exchange, held, self.routes, fingerprint)

    def return_gradients(self, exchange, travelling, home, step):
        return move_chunks(exchange, travelling, self.routes), home


@dataclasses.dataclass(frozen=True)
class DirectSchedule(Schedule):
    """At step t, slot s gets a chunk directly from rank r - 1 - s; its gradient returns directly.

    Chunk c uses slot (c + t - 1) mod (n - 1). Needs no cycles, but a third set of chunks, because
    each rank keeps its own for sending.
    """

    num_ranks: int

    @property
    def routes(self) -> Routes:
        n = self.num_ranks
        return tuple(tuple((rank + 1 + slot) % n for rank in range(n)) for slot in range(n - 1))

    def _chunks(self, step):
        """Returns the chunk in each slot at `step` >= 1."""
        first = np.arange(self.num_chunks, dtype=np.int32) + 1 + self.num_chunks
        return divided(jnp.asarray(first) - step, self.num_chunks)[1]

    def held(self, rank, step):
        slot = jnp.arange(self.num_ranks - 1, dtype=jnp.int32)
        is_own = jnp.asarray(step) == 0
        _, peer = divided(rank + self.num_ranks - 1 - slot, self.num_ranks)
        return jnp.where(is_own, rank, peer), jnp.where(is_own, slot, self._chunks(step))

    def fetch_keys(self, exchange, own, held, step, fingerprint=None):
        chunks = jax.tree.map(lambda x: x[self._chunks(step + 1)], own)
        return move_chunks(exchange, chunks, self.routes, fingerprint)

    def begin(self, gradients):
        return jax.tree.map(jnp.zeros_like, gradients), gradients

    def return_gradients(self, exchange, travelling, home, step):
        back = move_chunks(exchange, travelling, reverse(self.routes))
        slots = jnp.argsort(self._chunks(step - 1))
        return None, jax.tree.map(lambda h, x: h + x[slots], home, back)
