"""Rows to their ranks by XLA's `ragged_all_to_all`: only what the plan says, and no copy between.

Each replica of a shard is one update. XLA takes equally many updates from each rank to each other,
so of those from one rank to another all but the replicas for it are empty.

Only lowered, never differentiated: the calls are primitives with their own derivatives. JAX's
derivative of `ragged_all_to_all` writes rows to their source, so a row that was sent to several
ranks would get the gradient of one.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._dispatch.xla_plan import Plan
from jax_cp_dispatch._ranks.varying import vary_alike

MAX_UPDATES = 4096
"""Updates per rank and call. NCCL sends each one separately; not measured."""


def send_rows(
    plan: Plan,
    rank: Array,
    arrays: Sequence[Shaped[Array, "T ..."]],
    *,
    axis_names: tuple[str, ...],
    capacity: int,
) -> list[Shaped[Array, "capacity ..."]]:
    """Returns this rank's receive buffers of a dispatch; rows that no rank writes are zero."""
    num_rows = _num_moved(plan)
    first_row = jnp.broadcast_to(plan.src_row[..., None], num_rows.shape)
    num_ranks = plan.dst_rank.shape[0]
    everywhere = lambda x: jnp.broadcast_to(x[rank], (num_ranks, *x.shape[1:]))
    to = jnp.arange(num_ranks, dtype=jnp.int32)[:, None, None]
    return _exchange(
        arrays,
        capacity,
        axis_names,
        begin=everywhere(first_row),
        num_sent=jnp.where(plan.dst_rank[rank] == to, num_rows[rank], 0),
        begin_there=everywhere(plan.dst_row),
        num_received=jnp.where(plan.dst_rank == rank, num_rows, 0),
    )


def return_rows(
    plan: Plan,
    rank: Array,
    arrays: Sequence[Shaped[Array, "capacity ..."]],
    *,
    axis_names: tuple[str, ...],
    num_home: int,
) -> tuple[list[Shaped[Array, "home ..."]], Int32[Array, "S C"]]:
    """Brings the rows of a combine home, replica by replica.

    Returns:
      The rows of all replicas of this rank's shards, by slots, then replicas; and where each
      replica begins.
    """
    num_rows = _num_moved(plan)
    num_ranks = plan.dst_rank.shape[0]
    flat = num_rows.reshape(num_ranks, -1)
    home = (lax.cumsum(flat, axis=1) - flat).reshape(num_rows.shape)
    from_ = jnp.arange(num_ranks, dtype=jnp.int32)[:, None, None]
    homes = _exchange(
        arrays,
        num_home,
        axis_names,
        begin=plan.dst_row,
        num_sent=jnp.where(plan.dst_rank == rank, num_rows, 0),
        begin_there=home,
        num_received=jnp.where(plan.dst_rank[rank] == from_, num_rows[rank], 0),
    )
    return homes, home[rank]


def _exchange(arrays, num_rows, axis_names, *, begin, num_sent, begin_there, num_received):
    """Sends rows by updates `[W, S, C]`, from rank to rank; begins of empty ones are ignored."""
    begin, begin_there = (jnp.where(num_sent > 0, x, 0) for x in (begin, begin_there))
    updates = [x.ravel() for x in (begin, num_sent, begin_there, num_received)]
    results = []
    for x in arrays:
        x, out = vary_alike([x, jnp.zeros((num_rows, *x.shape[1:]), x.dtype)])
        results.append(lax.ragged_all_to_all(x, out, *updates, axis_name=axis_names))
    return results


def _num_moved(plan: Plan) -> Int32[Array, "W S C"]:
    """Returns the rows of each replica; zero everywhere if the plan is invalid."""
    return jnp.where((plan.dst_rank >= 0) & plan.is_valid, plan.num_rows[..., None], 0)
