"""Plans attention of packed documents: what each rank computes, and what moves there."""

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
from jax_cp_dispatch.planner.describe import describe_plan, sender_of
from jax_cp_dispatch.planner.segment_ids import Ids, read_documents, words
from jax_cp_dispatch.planner.stages import Assignment, Capacities, assign, build
from jax_cp_dispatch.planner.stamp import check_batch, stamp_of_batch

# An array or `Metadata`, or anything that a transformation maps over the leaves.
Leaf: TypeAlias = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """Where each query is computed, and to which received keys it attends.

    A rank's rows are its columns of each batch row, one batch row after another.

    Attributes:
      q_metadata: forward metadata of the queries' blocks; blocks without queries do not move.
      kv_metadata: forward metadata of the keys' blocks, each at most once per rank.
      kv_start, kv_end: i32 `[W, q_capacity]`; for each received query row, the range of received
        key rows to which it attends; (0, 0) for padding and unused rows.
      pairs_before, pairs_after: f32 `[W]`; query-key pairs of each rank without movement, and with
        this plan; exact up to 2**24 pairs, beyond that correct to about 1e-4 of the mean.
      needs: i32 `[W, 3]`; in every row the largest need of all ranks: rows of queries, rows of
        keys, destinations of one block of keys. See `fits`.
      stamp: i32 `[W, 3]`; for each rank, the checksums of the whole batch, and of its own columns
        of segment ids and positions. See `validate`.
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
        """Returns `kv_start`, `kv_end` of one rank, from the plan of all ranks or its slice.

        The counterpart of `Metadata.local_view`.
        """
        if self.kv_start.ndim == 1:
            return self.kv_start, self.kv_end
        is_slice = self.kv_start.shape[0] == 1
        start, end = (x[0] if is_slice else x[rank] for x in (self.kv_start, self.kv_end))
        return start, end

    def local_stamp(self, rank: Any) -> Int32[Array, " 3"]:
        """Returns `stamp` of one rank, from the plan of all ranks or this rank's slice."""
        if self.stamp.ndim == 1:
            return self.stamp
        return self.stamp[0] if self.stamp.shape[0] == 1 else self.stamp[rank]

    @property
    def fits(self) -> Bool[Array, ""]:
        """Whether the plan fits its capacities on all ranks; traced for a plan made under `jit`.

        A plan made outside `jit` always fits. A plan that does not fit makes attention fail on all
        ranks. To skip such a training step instead, use `lax.cond` on this value.
        """
        capacities = (self.q_capacity, self.kv_capacity, self.kv_metadata.dst_rank.shape[-1])
        given = np.broadcast_to(np.array(capacities, np.int32), self.needs.shape)
        return (self.needs <= given).all()

    def validate(self, segment_ids: Ids, positions: Ids | None = None) -> None:
        """Raises if the plan was made for another batch.

        Call on the host, with the plan of all ranks and the arrays from which it was made.
        Positions are compared if they are given. Inside a program, `balanced_attention` and
        `context_parallel_attention` compare the same checksums, with 32 bits per rank.

        Raises:
          ValueError: the shape differs, or the ids or positions of some rank differ.
        """
        op = "AttentionPlan.validate"
        check_batch(op, self.stamp, segment_ids, positions, num_tokens=self.num_tokens)

    def describe(self) -> str:
        """Returns a text for people: work, tokens, moves between ranks, and capacities used.

        For the three ranks with the most work, it names the pieces of documents that cause it. Call
        on the host, with the plan of all ranks.

        Raises:
          TypeError: the values are traced.
          ValueError: this is one rank's part of a plan.
        """
        return describe_plan(
            "AttentionPlan.describe",
            self,
            pairs=self.pairs_after,
            pairs_before=self.pairs_before,
            queries=self.q_metadata,
            where=sender_of(self.q_metadata),
        )

    @property
    def imbalance(self) -> Float32[Array, ""]:
        """Largest work of a rank divided by the mean; 1 is perfect, and the value without work."""
        return _imbalance(self.pairs_after)

    @property
    def imbalance_before(self) -> Float32[Array, ""]:
        """`imbalance` without movement."""
        return _imbalance(self.pairs_before)

    @property
    def num_q_tokens_moved(self) -> int:
        """Queries that are computed on another rank, over all ranks. Read outside `jit`."""
        return _num_moved(self.q_metadata)

    @property
    def num_kv_tokens_moved(self) -> int:
        """Keys that move between ranks, each copy counted. Read outside `jit`."""
        return _num_moved(self.kv_metadata)


@jax.named_scope("cpd.plan")
def plan_attention(
    segment_ids: Shaped[Array | np.ndarray, "..."],
    positions: Shaped[Array | np.ndarray, "..."] | None = None,
    *,
    world_size: int,
    window: int | None = None,
    config: PlanConfig = PlanConfig(),
) -> AttentionPlan:
    """Plans causal attention over packed documents so that all ranks have nearly equal work.

    A query attends to the keys of its document at its own and earlier positions. Segment 0 is
    padding, anywhere in a row. A document is a run of one segment id in one batch row; it also ends
    where `positions` does not increase.

    Call outside `jit` with concrete arrays, or inside `jit` or `shard_map` with traced arrays that
    every rank holds in full. Not differentiable.

    Concrete inputs are checked, and capacities default to what the plan needs, rounded up so that
    similar batches share compiled programs (by at most 8 blocks or 1/16; `max_kv_destinations` to a
    power of two). Constants inside `jit` count as concrete.

    Traced inputs are not checked: negative segments are padding, and each run of a segment id is a
    separate document. Capacities default to bounds that are always large enough: with T rows per
    rank, `q_capacity` is 2 * T + block, `kv_capacity` is W * T, and there are W destinations, so
    the KV buffer of every rank can hold all keys. If given capacities are too small,
    `AttentionPlan.fits` is false. The counts in the metadata then contain the true need, and
    `dispatch` fails on all ranks.

    Args:
      segment_ids: integers [B, columns] of any dtype; each rank holds an equal range of columns, in
        rank order.
      positions: integers of the same shape; None if segment ids alone separate the documents.
      world_size: number of ranks W; must divide the columns.
      window: maximum keys to which a query attends, the last of which is its own; None: no limit.
      config: block size and capacities.
    Returns:
      The plan for all ranks, the same in every process with the same inputs.
    Raises:
      TypeError: inputs are not integers.
      ValueError: shapes do not match. With concrete inputs also: a segment id is negative, or
        occurs in two separate runs of one batch row whose positions do not restart; a position
        exceeds 32 bits; or a capacity is too small.
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
    # While an outer function is traced, values that do not depend on its arguments are still known.
    with jax.core.eval_context():
        assignment = assign(segment_ids, positions, grid=grid, window=window)
        stamp = _stamp(*given, world_size, window)
        return _plan(assignment, stamp, grid, exact_capacities(assignment, grid, config))


def _stamp(segment_ids: Ids, positions: Ids | None, num_ranks: int, window: int | None) -> Array:
    places = None if positions is None else words(positions)
    return stamp_of_batch(words(segment_ids), places, num_ranks=num_ranks, window=window)


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
