"""Rows between ranks by XLA: `ragged_all_to_all`, or for a combine several all-gathers.

`ragged_all_to_all` moves only what the plan says, without a copy between. Each replica of a shard
is one update. XLA takes equally many updates from each rank to each other, so of those from one
rank to another all but the replicas for it are empty. It is only lowered, never differentiated: the
calls are primitives with their own derivatives. JAX's derivative of `ragged_all_to_all` writes rows
to their source, so a row that was sent to several ranks would get the gradient of one.

One all-gather of whole buffers needs W times the memory of one. With a plan that reserves space for
all keys, that exceeds the memory of an accelerator, so rows return in turns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._dispatch.xla_transfers import Transfers, XlaRanks
from jax_cp_dispatch._ranks.varying import vary_alike


class _Updates(NamedTuple):
    """Rows from rank to rank, by replicas; begins of empty updates are ignored."""

    begin: Int32[Array, "W S C"]
    num_sent: Int32[Array, "W S C"]
    begin_there: Int32[Array, "W S C"]
    num_received: Int32[Array, "W S C"]


def send_rows(
    plan: Transfers, ranks: XlaRanks, arrays: Sequence[Shaped[Array, "T ..."]], *, capacity: int
) -> list[Shaped[Array, "capacity ..."]]:
    """Returns this rank's receive buffers of a dispatch; rows that no rank writes are zero."""
    num_rows, rank = plan.num_moved, ranks.rank
    first_row = jnp.broadcast_to(plan.src_row[..., None], num_rows.shape)
    num_ranks = plan.dst_rank.shape[0]
    everywhere = lambda x: jnp.broadcast_to(x[rank], (num_ranks, *x.shape[1:]))
    to = jnp.arange(num_ranks, dtype=jnp.int32)[:, None, None]
    updates = _Updates(
        begin=everywhere(first_row),
        num_sent=jnp.where(plan.dst_rank[rank] == to, num_rows[rank], 0),
        begin_there=everywhere(plan.dst_row),
        num_received=jnp.where(plan.dst_rank == rank, num_rows, 0),
    )
    return _exchange(arrays, capacity, ranks.axis_names, updates)


def return_rows(
    plan: Transfers,
    ranks: XlaRanks,
    arrays: Sequence[Shaped[Array, "capacity ..."]],
    *,
    num_home: int,
) -> tuple[list[Shaped[Array, "home ..."]], Int32[Array, "S C"]]:
    """Brings the rows of a combine home, replica by replica.

    Returns:
      The rows of all replicas of this rank's shards, by slots, then replicas; and where each
      replica begins.
    """
    num_rows, rank = plan.num_moved, ranks.rank
    home = plan.begin_at_home
    num_ranks = plan.dst_rank.shape[0]
    from_ = jnp.arange(num_ranks, dtype=jnp.int32)[:, None, None]
    updates = _Updates(
        begin=plan.dst_row,
        num_sent=jnp.where(plan.dst_rank == rank, num_rows, 0),
        begin_there=home,
        num_received=jnp.where(plan.dst_rank[rank] == from_, num_rows[rank], 0),
    )
    return _exchange(arrays, num_home, ranks.axis_names, updates), home[rank]


def _exchange(
    arrays: Sequence[Array], num_rows: int, axis_names: tuple[str, ...], updates: _Updates
) -> list[Array]:
    """Returns the receive buffers; rows that no rank writes are zero."""
    begin, begin_there = (
        jnp.where(updates.num_sent > 0, x, 0) for x in (updates.begin, updates.begin_there)
    )
    flat = [x.ravel() for x in updates._replace(begin=begin, begin_there=begin_there)]
    results = []
    for x in arrays:
        x, out = vary_alike([x, jnp.zeros((num_rows, *x.shape[1:]), x.dtype)])
        results.append(lax.ragged_all_to_all(x, out, *flat, axis_name=axis_names))
    return results


MAX_GATHERED_BYTES = 2**30
"""Rows that one all-gather of a combine brings to a rank; not measured."""


def gather_in_turns(
    plan: Transfers,
    ranks: XlaRanks,
    arrays: Sequence[Shaped[Array, "capacity ..."]],
    num_home: int,
    num_at_once: int,
) -> tuple[list[Shaped[Array, "home ..."]], Int32[Array, "S C"]]:
    """Brings the rows of a combine home, as `return_rows`; `num_at_once` of each rank in a turn."""
    rank, capacity = ranks.rank, arrays[0].shape[0]
    begin = plan.begin_at_home[rank]
    rows = jnp.arange(num_home, dtype=jnp.int32)
    replica = jnp.searchsorted(begin.ravel(), rows, side="right") - 1
    src_rank = plan.dst_rank[rank].ravel()[replica]
    src_row = plan.dst_row[rank].ravel()[replica] + rows - begin.ravel()[replica]

    def turn(i, homes):
        first = jnp.minimum(i * num_at_once, capacity - num_at_once)
        row = src_row - first
        is_here = (row >= 0) & (row < num_at_once) & (src_rank >= 0)
        results = []
        for x, home in zip(arrays, homes, strict=True):
            gathered = ranks.gather(lax.dynamic_slice_in_dim(x, first, num_at_once))
            taken = gathered.at[src_rank, row].get(mode="clip")
            results.append(jnp.where(is_here.reshape(-1, *[1] * (x.ndim - 1)), taken, home))
        return results

    homes = [jnp.zeros((num_home, *x.shape[1:]), x.dtype) for x in arrays]
    homes = vary_alike([*homes, *arrays, src_row])[: len(homes)]
    return lax.fori_loop(0, -(-capacity // num_at_once), turn, homes), begin
