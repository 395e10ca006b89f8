"""From packed documents to a plan: which rank computes what, and what moves there."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.blocks import BlockGrid
from jax_cp_dispatch.planner.capacities import (
    PlanConfig,
    check_shapes,
    exact_capacities,
    read_host_documents,
    static_capacities,
)
from jax_cp_dispatch.planner.segment_ids import Ids, read_documents, words
from jax_cp_dispatch.planner.stages import Assignment, Capacities, assign, build
from jax_cp_dispatch.planner.stamp import checksums, make_stamp

# An array or `Metadata`; or whatever a transformation maps over the leaves.
Leaf: TypeAlias = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """Where each query is computed, and which received keys it attends.

    A rank's rows are its columns of each batch row, one batch row after another.

    Attributes:
      q_metadata: forward metadata of the queries' blocks; blocks without any query stay at home.
      kv_metadata: forward metadata of the keys' blocks, each at most once per rank.
      kv_start, kv_end: i32 `[W, q_capacity]`; for each row that a rank receives as a query, the
        rows of its received keys that it attends; (0, 0) for padding and rows that nobody writes.
      pairs_before, pairs_after: f32 `[W]`; query-key pairs of each rank if nothing moved, and by
        this plan; exact up to 2**24 pairs, correct to about 1e-4 of the mean beyond.
      needs: i32 `[W, 3]`; on every row the largest need of all ranks: rows of queries, rows of
        keys, destinations of one block of keys. See `fits`.
      stamp: i32 `[W, 3]`; for each rank the checksums of the whole batch, and of its own columns
        of the segment ids and the positions. See `validate`.
      num_tokens: rows of one rank (static).
      q_capacity, kv_capacity: rows of the receive buffers (static).
    """

    q_metadata: Leaf
    kv_metadata: Leaf
    kv_start: Leaf
    kv_end: Leaf
    pairs_before: Leaf
    pairs_after: Leaf
    needs: Leaf
    stamp: Leaf
    num_tokens: int = dataclasses.field(metadata={"static": True})
    q_capacity: int = dataclasses.field(metadata={"static": True})
    kv_capacity: int = dataclasses.field(metadata={"static": True})

    @property
    def world_size(self) -> int:
        return self.q_metadata.world_size

    def local_ranges(self, rank: Any) -> tuple[Int32[Array, " q"], Int32[Array, " q"]]:
        """`kv_start`, `kv_end` of one rank, from the plan of all ranks or this rank's slice of it.

        The counterpart of `Metadata.local_view`.
        """
        if self.kv_start.ndim == 1:
            return self.kv_start, self.kv_end
        is_slice = self.kv_start.shape[0] == 1
        start, end = (x[0] if is_slice else x[rank] for x in (self.kv_start, self.kv_end))
        return start, end

    def local_stamp(self, rank: Any) -> Int32[Array, " 3"]:
        """`stamp` of one rank, from the plan of all ranks or this rank's slice of it."""
        if self.stamp.ndim == 1:
            return self.stamp
        return self.stamp[0] if self.stamp.shape[0] == 1 else self.stamp[rank]

    @property
    def fits(self) -> Bool[Array, ""]:
        """Whether the capacities hold the plan, on all ranks; traced for a plan made under `jit`.

        A plan made outside of `jit` always fits. One that does not makes attention fail on all
        ranks; `lax.cond` on this keeps the state of a training step instead.
        """
        capacities = (self.q_capacity, self.kv_capacity, self.kv_metadata.dst_rank.shape[-1])
        given = np.broadcast_to(np.array(capacities, np.int32), self.needs.shape)
        return (self.needs <= given).all()

    def validate(self, segment_ids: Ids, positions: Ids | None = None) -> None:
        """Raises if the plan was made for another batch.

        Call on the host, with the plan of all ranks and the arrays that it was made from; positions
        are compared if they are given. Inside a program `balanced_attention` and
        `context_parallel_attention` compare the same checksums, of 32 bits per rank.

        Raises:
          ValueError: another shape, or on some rank other ids or positions.
        """
        op, num_ranks = "AttentionPlan.validate", self.world_size
        given = {"segment_ids": segment_ids, "positions": positions}
        for place, (name, x) in enumerate(given.items(), start=1):
            if x is None:
                continue
            if x.ndim != 2 or x.size != num_ranks * self.num_tokens or x.shape[1] % num_ranks:
                raise ValueError(
                    f"{op}: {name} has shape {x.shape} but the plan is for {num_ranks} ranks of "
                    f"{self.num_tokens} rows. Pass the plan of this batch."
                )
            expected, seen = jax.device_get((self.stamp[:, place], checksums(words(x), num_ranks)))
            if (expected != seen).any():
                raise ValueError(
                    f"{op}: the plan was made for another batch: the {name} of rank "
                    f"{int((expected != seen).argmax())} are not those of the plan. Pass the plan "
                    "that plan_attention makes of this batch."
                )

    @property
    def imbalance(self) -> Float32[Array, ""]:
        """Largest work of a rank over the mean; 1 is perfect, also for no work at all."""
        return _imbalance(self.pairs_after)

    @property
    def imbalance_before(self) -> Float32[Array, ""]:
        """What `imbalance` would be if nothing moved."""
        return _imbalance(self.pairs_before)

    @property
    def num_q_tokens_moved(self) -> int:
        """Queries that are computed away from home, over all ranks; outside `jit`."""
        return _num_moved(self.q_metadata)

    @property
    def num_kv_tokens_moved(self) -> int:
        """Keys that cross from one rank to another, each copy counted; outside `jit`."""
        return _num_moved(self.kv_metadata)


def plan_attention(
    segment_ids: Shaped[Array | np.ndarray, "..."],
    positions: Shaped[Array | np.ndarray, "..."] | None = None,
    *,
    world_size: int,
    window: int | None = None,
    config: PlanConfig = PlanConfig(),
) -> AttentionPlan:
    """Plans causal attention over packed documents so that all ranks have nearly equal work.

    A query attends the keys of its document at its own and earlier positions. Segment 0 is padding
    and may stand anywhere. A document is a run of one segment id in one batch row; it also ends
    where `positions` does not increase.

    Call outside `jit` with concrete arrays, or inside `jit` or `shard_map` with traced ones that
    every rank holds in full. Not differentiable; there is nothing to differentiate.

    Concrete inputs are checked, and capacities default to what the plan needs, rounded up so that
    similar batches share compiled programs (by at most 8 blocks or 1/16; `max_kv_destinations` to a
    power of two). Constants inside `jit` count as concrete.

    Traced inputs are not: negative segments are padding, and each run of a segment id is a document
    of its own. Then the defaults are bounds that always fit: with T rows per rank `q_capacity`
    2 * T + block, `kv_capacity` W * T, and W destinations; so the KV buffer of every rank has room
    for all keys. If given capacities are too small, `AttentionPlan.fits` is false, and the counts
    in the metadata tell the true need, on which `dispatch` fails on all ranks.

    Args:
      segment_ids: integers [B, columns] of any dtype; each rank holds an equal run of columns, in
        rank order.
      positions: integers of the same shape, or None if documents differ in their segment ids.
      world_size: number of ranks W; must divide the columns.
      window: a query attends at most that many keys, its own the last; None: all before it.
      config: block size and capacities.
    Returns:
      The plan for all ranks, the same on every process that plans the same inputs.
    Raises:
      TypeError: inputs are not integers.
      ValueError: shapes do not fit; or, with concrete inputs only, a segment id is negative or
        stands in two separate runs of one batch row whose positions do not start again, a position
        is beyond 32 bits, or a capacity is too small.
    """
    op = "plan_attention"
    grid = check_shapes(op, segment_ids, positions, world_size, window, config)
    given = segment_ids, positions
    if isinstance(segment_ids, jax.core.Tracer) or isinstance(positions, jax.core.Tracer):
        segment_ids, positions = read_documents(op, segment_ids, positions)
        assignment = assign(segment_ids, positions, grid=grid, window=window)
        stamp = _stamp(*given, world_size, window)
        return _plan(assignment, stamp, grid, static_capacities(grid, config))
    segment_ids, positions = read_host_documents(op, segment_ids, positions)
    # Even while an outer function is traced, what does not depend on its arguments is known now.
    with jax.core.eval_context():
        assignment = assign(segment_ids, positions, grid=grid, window=window)
        stamp = _stamp(*given, world_size, window)
        return _plan(assignment, stamp, grid, exact_capacities(assignment, grid, config))


def _stamp(segment_ids: Ids, positions: Ids | None, num_ranks: int, window: int | None) -> Array:
    places = None if positions is None else words(positions)
    return make_stamp(words(segment_ids), places, num_ranks=num_ranks, window=window)


def _plan(
    assignment: Assignment, stamp: Any, grid: BlockGrid, capacities: Capacities
) -> AttentionPlan:
    arrays = build(assignment, grid=grid, capacities=capacities)
    return AttentionPlan(
        **arrays._asdict(),
        stamp=stamp,
        pairs_before=assignment.pairs_before,
        pairs_after=assignment.pairs_after,
        num_tokens=grid.rows,
        q_capacity=capacities.q,
        kv_capacity=capacities.kv,
    )


def _imbalance(pairs: Float32[Array, " W"]) -> Float32[Array, ""]:
    mean = pairs.mean()
    return jnp.where(mean > 0, pairs.max() / jnp.where(mean > 0, mean, 1), 1)


def _num_moved(metadata: Metadata) -> int:
    received = np.asarray(metadata.num_recv_tokens)[:, :-1].astype(np.int64)
    return int(received.sum() - received.trace())
