"""Assigns blocks to ranks: the replaceable decision of a plan."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._arrays import divided
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._scans import running_sum, smallest, sum_by_key
from jax_cp_dispatch.planning.key_limit import KeyLimit

# The repair stops after this many moves.
_MOVES_PER_RANK = 4


def balance_blocks(
    cost: Int32[Array, "B W J"],
    num_rows: Int32[Array, "B W J"],
    *,
    row_limit: int,
    tolerance: float,
    keys: KeyLimit | None = None,
) -> Int32[Array, "B W J"]:
    """Assigns blocks to ranks so that all ranks have nearly equal cost and few rows move.

    Every rank keeps its own blocks up to the mean cost. A rank above the mean gives away its blocks
    with the highest cost per row. These fill the ranks below the mean in global order, so that
    neighbouring blocks, which share keys, go to one rank. Finally, single blocks move from the most
    to the least loaded rank until the largest cost is within the tolerance.

    Before the last step, a rank has at most `2 T + block` rows, where T is the number of rows per
    rank. Proof: A giving rank keeps at least the mean M on at most T rows. It gives away its most
    expensive rows, so these cost at least M/T each. A receiving rank keeps at most T rows and
    receives a cost of at most M, that is at most T rows, plus the other halves of the two blocks at
    the ends of its share. The last step respects `row_limit`.

    With a limit of keys, blocks that exceed it stay at home, which costs balance. Beside the keys
    of all its own queries, a rank has room for those that it gets.

    Call anywhere, also under `jax.jit`. All sums are of integers, so equal inputs give equal
    assignments. Not differentiable.

    Args:
      cost: of block j of rank w in batch row b; the sum is below 2**30.
      num_rows: rows that move with the block; 0 if there is nothing to compute.
      row_limit: maximum rows of a rank in the last step.
      tolerance: fraction by which the largest cost may exceed the mean.
      keys: of the blocks, and their limit; None: no assignment exceeds it.
    Returns:
      The rank that computes the block.
    """
    num_ranks = cost.shape[1]
    home = jnp.broadcast_to(jnp.arange(num_ranks, dtype=jnp.int32)[:, None], cost.shape)
    load = cost.sum((0, 2), dtype=jnp.int32)
    mean, _ = divided(load.sum(dtype=jnp.int32) + num_ranks - 1, num_ranks)
    given = _dearest(cost, num_rows, jnp.maximum(load - mean, 0))
    poured = _pour(jnp.where(given, cost, 0), jnp.maximum(mean - load, 0))
    target = mean + (mean.astype(jnp.float32) * tolerance).astype(jnp.int32)
    held_keys = None
    if keys is not None:
        taken, held_keys = keys.taken(given.reshape(-1), poured.reshape(-1), num_ranks)
        given = taken.reshape(given.shape)
    assigned = jnp.where(given, poured, home)
    return _repair(assigned, cost, num_rows, mean, target, row_limit, keys, held_keys)


def _dearest(
    cost: Int32[Array, "B W J"], num_rows: Int32[Array, "B W J"], surplus: Int32[Array, " W"]
) -> Bool[Array, "B W J"]:
    """Selects each rank's blocks with the highest cost per row, up to its surplus."""
    num_batch, num_ranks, num_blocks = cost.shape

    def by_rank(x):
        return x.swapaxes(0, 1).reshape(num_ranks, num_batch * num_blocks)

    per_row = by_rank(cost).astype(jnp.float32) / jnp.maximum(by_rank(num_rows), 1).astype(
        jnp.float32
    )
    block = lax.broadcasted_iota(jnp.int32, per_row.shape, 1)
    _, ordered_cost, order = lax.sort((-per_row, by_rank(cost), block), dimension=1, num_keys=1)
    total = running_sum(ordered_cost)
    given = (total <= surplus[:, None]) & (ordered_cost > 0)
    _, given = lax.sort((order, given), dimension=1, num_keys=1)
    return given.reshape(num_ranks, num_batch, num_blocks).swapaxes(0, 1)


def _pour(cost: Int32[Array, "B W J"], deficit: Int32[Array, " W"]) -> Int32[Array, "B W J"]:
    """Returns the rank in whose share of the concatenated deficits each block's middle lies."""
    flat = cost.reshape(-1)
    middle = running_sum(flat) - flat + flat // 2
    ends = running_sum(deficit)
    # `jnp.searchsorted` cannot be traced inside a partly manual `shard_map` in JAX 0.10.
    rank = (ends[None] <= middle[:, None]).sum(1, dtype=jnp.int32)
    return rank.reshape(cost.shape)


def _repair(
    assigned: Int32[Array, "B W J"],
    cost: Int32[Array, "B W J"],
    num_rows: Int32[Array, "B W J"],
    mean: Int32[Array, ""],
    target: Int32[Array, ""],
    row_limit: int,
    keys: KeyLimit | None,
    held_keys: Int32[Array, " W"] | None,
) -> Int32[Array, "B W J"]:
    """Moves single blocks from the most to the least loaded rank while this reduces the maximum."""
    shape, num_ranks = assigned.shape, assigned.shape[1]
    assigned, cost, num_rows = assigned.reshape(-1), cost.reshape(-1), num_rows.reshape(-1)
    ranks = jnp.arange(num_ranks, dtype=jnp.int32)
    blocks = jnp.arange(len(cost), dtype=jnp.int32)
    of_keys = [] if keys is None else [keys.alone]  # a rank that gives a block may keep its keys
    sizes = jnp.stack([cost, num_rows, *of_keys])

    def go_on(state):
        _, held, moves_left = state
        return (moves_left > 0) & (held[0].max() > target)

    def move(state):
        assigned, held, moves_left = state
        load, rows, *num_keys = held
        (heaviest, giver), (lightest, taker) = smallest(-load, load)
        heaviest = -heaviest
        fits = (assigned == giver) & (rows[taker] + num_rows <= row_limit)
        if keys is not None:
            fits &= num_keys[0][taker] + keys.alone <= keys.limit
        # The larger of the two loads after the move; values below the mean gain nothing, and
        # blocks without cost change nothing.
        after = jnp.maximum(jnp.maximum(heaviest - cost, lightest + cost), mean)
        ((after, block),) = smallest(jnp.where(fits, after, heaviest))
        helps = after < heaviest
        # Comparisons of all elements; `at[]` would compile to more.
        sign = (ranks == taker).astype(jnp.int32) - (ranks == giver).astype(jnp.int32)
        sign = jnp.where(helps, sign, 0)
        signs = jnp.stack([sign, sign, *(jnp.maximum(sign, 0) for _ in num_keys)])
        return [
            jnp.where(helps & (blocks == block), taker, assigned),
            held + signs * sizes[:, block, None],
            jnp.where(helps, moves_left - 1, 0),
        ]

    sums = sum_by_key([cost, num_rows], assigned, num_ranks)
    held = jnp.stack(sums if held_keys is None else [*sums, held_keys])
    state = vary_alike([assigned, held, jnp.int32(_MOVES_PER_RANK * num_ranks)])
    return lax.while_loop(go_on, move, state)[0].reshape(shape)
