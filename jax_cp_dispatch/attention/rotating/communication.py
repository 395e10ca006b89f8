"""Exchanges in which every rank sends each chunk to at most one other rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, PyTree, Shaped

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch._dispatch import move, outgoing
from jax_cp_dispatch._dispatch.by_xla import dispatch_or_collectives
from jax_cp_dispatch._ranks.communicator import AxisName, num_ranks_here
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options
from jax_cp_dispatch.cycles.integer_rows import CycleRows, check_chunk_maps
from jax_cp_dispatch.metadata import Metadata

# Chunk c of rank r goes to rank `routes[c][r]`, into the same slot c; -1: it is not sent.
Routes = tuple[tuple[int, ...], ...]


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
      axis_name: the mesh axis of the ranks, or several, the major one first.
      shift: ranks to move by, modulo the size of the axis.
      implementation: see `available_implementations`; "xla" makes a collective-permute of each
        array. None is this package's transports between CPU devices, and "xla" on GPUs and TPUs.
      deadline: seconds until an exchange gives up on a missing rank; None is 60, on GPUs 600, or
        `JAX_CP_DISPATCH_DEADLINE`. No effect with "xla".
      num_comm_sm: multiprocessors of a GPU that it may use; see `dispatch`.
    Returns:
      Arrays in the structure of `x`.
    Raises:
      ValueError, NotImplementedError: the implementation is unknown, or not available here.
      jax.errors.JaxRuntimeError: see `dispatch`.
    """
    exchange = read_options(
        "ring_exchange",
        axis_name,
        implementation=implementation,
        deadline=deadline,
        num_comm_sm=num_comm_sm,
    )
    check_integer("ring_exchange", "shift", shift)
    num_ranks = num_ranks_here("ring_exchange", axis_name, "dispatch")
    route = tuple((rank + shift) % num_ranks for rank in range(num_ranks))
    chunks = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], x)
    moved = move_chunks(exchange, chunks, (route,))
    return jax.tree.map(lambda leaf: leaf[0], moved)


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
    exchange = read_options(
        "chunk_exchange",
        axis_name,
        implementation=implementation,
        deadline=deadline,
        num_comm_sm=num_comm_sm,
    )
    num_ranks = num_ranks_here("chunk_exchange", axis_name, "dispatch")
    num_chunks, out_chunk, _ = check_chunk_maps(out_chunk, in_chunk, num_ranks, op="chunk_exchange")
    for leaf in jax.tree.leaves(chunks):
        if jnp.shape(leaf)[:1] != (num_chunks,):
            raise ValueError(
                f"chunk_exchange: an array has shape {jnp.shape(leaf)} but the maps name "
                f"{num_chunks} chunks, which its first axis must count."
            )
    if num_chunks == 0:
        return chunks
    return move_chunks(exchange, chunks, map_routes(out_chunk, num_chunks))


def map_routes(out_chunk: CycleRows, num_chunks: int) -> Routes:
    """Returns the destination of each rank's chunks, from the chunk on each link."""
    routes = np.full((num_chunks, len(out_chunk)), -1)
    for rank, row in enumerate(out_chunk):
        for peer, chunk in enumerate(row):
            if chunk >= 0:
                routes[chunk, rank] = peer
    return tuple(map(tuple, routes.tolist()))


def cycle_routes(cycles: Sequence[Sequence[int]]) -> Routes:
    """Returns routes on which chunk c goes to its rank's successor on cycle c."""
    successors = [dict(zip(row, (*row[1:], row[0]), strict=True)) for row in cycles]
    return tuple(tuple(successor[rank] for rank in sorted(successor)) for successor in successors)


def reverse(routes: Routes) -> Routes:
    """Returns the reverse routes."""
    back = np.full((len(routes), len(routes[0]) if routes else 0), -1)
    for chunk, route in enumerate(routes):
        for rank, peer in enumerate(route):
            if peer >= 0:
                back[chunk, peer] = rank
    return tuple(map(tuple, back.tolist()))


def move_chunks(
    exchange: CollectiveOptions,
    chunks: Any,
    routes: Routes,
    fingerprint: Int32[Array, " 9"] | None = None,
) -> Any:
    """Moves chunk c of every rank r into slot c of rank `routes[c][r]`; other slots become zero.

    Ranks compare a fingerprint first; XLA's collectives do not.
    """
    by_collectives = _ByCollectives(routes, exchange.axis_name)
    by_xla = lambda moved: _of_leaves(by_collectives, moved[0])
    by_dispatch = lambda moved: _by_dispatch(exchange, moved[0], moved[1], by_collectives)
    return dispatch_or_collectives(exchange, (chunks, fingerprint), by_dispatch, by_xla)


def _of_leaves(move, chunks):
    leaves, tree = jax.tree.flatten(chunks)
    return jax.tree.unflatten(tree, move(leaves))


class _ByCollectives(NamedTuple):
    """One all-to-all if every rank sends to all others, which uses all links at once.

    Otherwise, in rings and between nodes, one collective-permute for each chunk.
    """

    routes: Routes
    axis_name: AxisName

    @jax.named_scope("cpd.exchange")
    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        num_chunks, num_ranks = len(self.routes), len(self.routes[0])
        peers = np.asarray(self.routes).T  # [rank, chunk]
        others = [[peer for peer in range(num_ranks) if peer != rank] for rank in range(num_ranks)]
        if num_chunks > 1 and np.array_equal(np.sort(peers, axis=1), others):
            return _by_all_to_all(arrays, peers, self.axis_name)
        pairs = [[(r, to) for r, to in enumerate(route) if to >= 0] for route in self.routes]
        permute = lambda x, arcs: lax.ppermute(x, self.axis_name, arcs)
        return [
            jnp.stack([permute(x[chunk], arcs) for chunk, arcs in enumerate(pairs)]) for x in arrays
        ]

    def transposed(self) -> _ByCollectives:
        return self._replace(routes=reverse(self.routes))


def _by_all_to_all(arrays, peers, axis_name):
    num_ranks, num_chunks = peers.shape
    chunk_for = np.zeros((num_ranks, num_ranks), np.int32)  # [rank, peer]; own: any value
    chunk_for[np.arange(num_ranks)[:, None], peers] = np.arange(num_chunks)
    sender = np.zeros_like(peers)  # [rank, chunk]
    sender[peers, np.arange(num_chunks)] = np.arange(num_ranks)[:, None]
    rank = lax.axis_index(axis_name)
    outgoing, incoming = jnp.asarray(chunk_for)[rank], jnp.asarray(sender)[rank]

    return [lax.all_to_all(x[outgoing], axis_name, 0, 0)[incoming] for x in arrays]


def _by_dispatch(exchange: CollectiveOptions, chunks: Any, fingerprint, by_collectives):
    """Moves chunks by `dispatch`: each chunk is one token, and each token one shard."""
    routes = by_collectives.routes
    num_chunks, num_ranks = len(routes), len(routes[0])
    to = np.asarray(routes, np.int32).T  # [rank, chunk]
    moves = to >= 0
    received = np.zeros((num_ranks, num_ranks + 1), np.uint32)
    sender = np.broadcast_to(np.arange(num_ranks)[:, None], to.shape)
    np.add.at(received, (to[moves], sender[moves]), 1)
    received[:, -1] = received.sum(1)
    plan = Metadata(
        dst_rank=to,
        dst_offset=np.where(moves, np.arange(num_chunks), 0).astype(np.uint32),
        seq_len=np.ones(to.shape, np.uint32),
        num_recv_tokens=received,
        world_size=num_ranks,
    )
    argument = outgoing(exchange.op, "chunks", chunks, plan, capacity=num_chunks)
    return move(exchange, [argument._replace(fingerprint=fingerprint)], by_collectives)[0]
