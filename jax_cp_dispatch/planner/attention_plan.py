"""`AttentionPlan`: which rank computes which queries, and which keys it receives for them."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jax_cp_dispatch._text import outline
from jax_cp_dispatch.documents.fingerprint import check_batch
from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.array_mask import MaskKind
from jax_cp_dispatch.metadata.describe import known, rows_between_ranks
from jax_cp_dispatch.planner.config import CAPACITIES, PlanConfig
from jax_cp_dispatch.planner.describe import (
    PlanToDescribe,
    Rows,
    describe_plan,
    exceeded_capacities,
)
from jax_cp_dispatch.planner.planned_pieces import Home, pieces_of_plan
from jax_cp_dispatch.planner.row_ranges import local_rows
from jax_cp_dispatch.planner.runs import key_ranges, local_runs
from jax_cp_dispatch.planner.seen_rows import SeenRows
from jax_cp_dispatch.planner.slices import check_all_ranks, slice_of
from jax_cp_dispatch.planner.static_size import needed_sizes
from jax_cp_dispatch.planner.traffic import num_moved

# An array or `Metadata`, or anything that a transformation maps over the leaves.
Leaf: TypeAlias = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """Where each query is computed, and to which received keys it attends.

    A rank's rows are its columns of each batch row, one batch row after another. Received queries
    are described by runs (the pieces of documents that a rank computes), so the size of a plan
    grows with the pieces, not with the tokens, unless the mask has arrays. Made outside `jit`, its
    arrays are NumPy, and it can be pickled.

    Attributes:
      q_metadata, kv_metadata: forward metadata of queries and of keys; one slot for each range that
        a rank sends (also to itself), located by `src_offset`. Padding need not move.
      run_row: i32 `[W, P]`; the first received row of each piece; `q_capacity` for unused ones.
      run_position: i32 `[W, P]`; the place of that row's query in its document; -1 for padding.
      run_origin: i32 `[W, P]`; the received row of the document's first key, also if it was not
        sent.
      run_length: i32 `[W, P]`; tokens of the document; None if the mask is causal or has arrays.
      ranges: of a mask with arrays, what received rows see: the keys of each query, i32 `[W,
        q_capacity]`, and the queries of each key, `[W, kv_capacity]`; see `local_ranges`.
      num_rows: i32 `[W]`; rows of queries that a rank receives; -1 in a fallback of
        `plan_attention`.
      pairs_before, pairs_after: f32 `[W]`; query-key pairs of each rank without movement, and with
        this plan. Inside `jit` they are exact up to 2**24 pairs, beyond that correct to about 1e-4
        of the mean.
      largest_needs: i32 `[W, 5]`; in every row the largest need of all ranks: rows of queries, rows
        of keys, ranges of queries sent, ranges of keys sent, pieces. See `fits` and `needs`.
      fingerprint: i32 `[W, 4]`; for each rank, the checksum of the whole plan with its config, mask
        and batch; the rank; the checksums of its own columns of segment ids and positions, and of
        the arrays of the mask, if it has them. See `validate`.
      num_tokens: rows of one rank (static).
      batch: rows of the batch; of one group, if `batch_axis` shards it (static).
      q_capacity, kv_capacity: rows of the receive buffers (static).
      mask: which keys a query sees; of a mask with arrays, its kind.
    """

    q_metadata: Leaf
    kv_metadata: Leaf
    run_row: Leaf
    run_position: Leaf
    run_origin: Leaf
    num_rows: Leaf
    pairs_before: Leaf
    pairs_after: Leaf
    largest_needs: Leaf
    fingerprint: Leaf
    mask: StaticMask | MaskKind
    run_length: Leaf = None
    ranges: MaskRanges | None = None
    num_tokens: int = dataclasses.field(metadata={"static": True})
    batch: int = dataclasses.field(metadata={"static": True})
    q_capacity: int = dataclasses.field(metadata={"static": True})
    kv_capacity: int = dataclasses.field(metadata={"static": True})

    __repr__ = outline  # a plan has many arrays; `describe` is for reading

    @property
    def world_size(self) -> int:
        return self.q_metadata.world_size

    def slice_of(self, rank: int) -> "AttentionPlan":
        """Returns the part of one rank: all arrays with a leading axis of size 1.

        This is what `in_specs=P(axis_name)` gives to the rank, and all that it needs. So the
        processes of a large run need not hold the plan of all ranks.

        Raises:
          ValueError: rank is not in `[0, W)`, or this is a slice already.
        """
        return slice_of("AttentionPlan.slice_of", self, rank)

    def local_ranges(self, rank: Any) -> tuple[Int32[Array | np.ndarray, " rows"], ...]:
        """Returns the first and last + 1 received key of each received query of one rank.

        i32 `[q_capacity]` each; (0, 0) for padding and unused rows. If the mask has ranges of
        queries, also the first and last + 1 received query of each received key, i32
        `[kv_capacity]`. Call anywhere with a concrete `rank` (a plan of NumPy arrays then gives
        NumPy), or inside `jax.shard_map` with `lax.axis_index`, on the plan of all ranks or this
        rank's slice.
        """
        if self.ranges is not None:
            return tuple(x for x in local_rows(self.ranges, rank) if x is not None)
        assert isinstance(self.mask, StaticMask)
        return key_ranges(local_runs(self, rank), size=self.q_capacity, mask=self.mask)

    @property
    def fits(self) -> Bool[Array | np.ndarray, ""]:
        """Whether the plan fits its capacities on all ranks; traced for a plan made under `jit`.

        A plan made outside `jit` fits, except for a fallback of `plan_attention`. A plan that does
        not fit makes attention fail on all ranks. To skip such a training step instead, or to use
        another algorithm, use `lax.cond` on this value.
        """
        given = np.broadcast_to(np.array(_capacities(self), np.int32), self.largest_needs.shape)
        fits = (self.largest_needs <= given).all() & (self.num_rows >= 0).all()
        return np.asarray(fits) if isinstance(fits, np.generic) else fits

    @property
    def needs(self) -> PlanConfig:
        """The smallest capacities for this plan; other choices are defaults.

        Of stacked plans, those that suffice for all. Read outside `jit`.

        Raises:
          TypeError: the values are traced. Inside `jit`, use `fits` or `largest_needs`.
        """
        return PlanConfig(**needed_sizes("AttentionPlan.needs", CAPACITIES, self.largest_needs))

    def validate(
        self, segment_ids: Ids, positions: Ids | None = None, mask: Mask | None = None
    ) -> None:
        """Raises if the plan was made for another batch.

        Call on the host, with the plan of all ranks and the arrays from which it was made. A plan
        made from lengths is one of segment ids 1, 2, ... in each batch row. Positions that were not
        given count from 0 in each document; padding may have any. Inside a program,
        `context_parallel_attention` compares the same checksums, with 32
        bits per rank.

        Raises:
          ValueError: the shape differs, the ids, positions or mask of some rank differ, or the
            batch did not fit, so nothing was planned.
        """
        op = "AttentionPlan.validate"
        given = segment_ids, positions, mask
        check_batch(op, self.fingerprint, *given, num_tokens=self.num_tokens)

    def describe(self) -> str:
        """Returns a text for people: work, tokens, moves between ranks, and capacities used.

        For the three ranks with the most work, before planning and as planned, it names the
        documents that cause it; for a mask with arrays, as planned only. Call on the host, with the
        plan of all ranks.

        Raises:
          TypeError: the values are traced.
          ValueError: this is one rank's part of a plan.
        """
        op = "AttentionPlan.describe"
        if known(op, self.num_rows).min() < 0:
            exceeded = exceeded_capacities(CAPACITIES, self.largest_needs, _capacities(self))
            return f"AttentionPlan: the batch does not fit {exceeded}. Nothing was planned."
        queries, keys = (rows_between_ranks(op, x) for x in (self.q_metadata, self.kv_metadata))
        columns = self.num_tokens // self.batch * self.world_size
        home = Home(self.batch, columns, self.world_size)
        return describe_plan(
            PlanToDescribe(
                name="AttentionPlan",
                pieces=pieces_of_plan(op, self, home),
                traffic={
                    "queries": Rows(queries, self.q_capacity),
                    "keys": Rows(keys, self.kv_capacity),
                },
                num_tokens=self.num_tokens,
                mask=self._seen,
                home=home if self.ranges is None else None,
            )
        )

    @property
    def _seen(self) -> StaticMask | SeenRows:
        if isinstance(self.mask, StaticMask):
            return self.mask
        assert self.ranges is not None
        return SeenRows.of(self.ranges)

    @property
    def imbalance(self) -> Float32[Array | np.ndarray, ""]:
        """Largest work of a rank divided by the mean; 1 is perfect, and the value without work.

        Of stacked plans, the largest of all.

        Raises:
          ValueError: this is one rank's part of a plan.
        """
        return self._imbalance("imbalance", self.pairs_after)

    @property
    def imbalance_before(self) -> Float32[Array | np.ndarray, ""]:
        """`imbalance` without movement."""
        return self._imbalance("imbalance_before", self.pairs_before)

    def _imbalance(self, name: str, pairs: Any) -> Any:
        check_all_ranks(f"AttentionPlan.{name}", pairs.shape[-1], self.world_size)
        xp = np if isinstance(pairs, np.ndarray) else jnp
        mean = pairs.mean(-1)
        each = xp.where(mean > 0, pairs.max(-1) / xp.where(mean > 0, mean, 1), 1)
        return xp.asarray(each.max(), np.float32)

    @property
    def num_q_tokens_moved(self) -> int:
        """Queries that are computed on another rank; of stacked plans, the sum.

        Read outside `jit`.
        """
        return num_moved("AttentionPlan.num_q_tokens_moved", self.q_metadata)

    @property
    def num_kv_tokens_moved(self) -> int:
        """Keys that move between ranks, each copy counted; of stacked plans, the sum.

        Read outside `jit`.
        """
        return num_moved("AttentionPlan.num_kv_tokens_moved", self.kv_metadata)

    def num_tokens_moved_between_nodes(self, ranks_per_node: int) -> tuple[int, int]:
        """Returns the queries, and the keys, that move between nodes of consecutive ranks.

        Each copy counts; of stacked plans, the sum. Call outside `jit`.
        """
        op = "AttentionPlan.num_tokens_moved_between_nodes"
        metadata = self.q_metadata, self.kv_metadata
        q, kv = (num_moved(op, x, ranks_per_node) for x in metadata)
        return q, kv


def _capacities(plan: AttentionPlan) -> tuple[int, ...]:
    """Returns the static sizes, in the order of `largest_needs`."""
    slots = (x.dst_rank.shape[-1] for x in (plan.q_metadata, plan.kv_metadata))
    return (plan.q_capacity, plan.kv_capacity, *slots, plan.run_row.shape[-1])
