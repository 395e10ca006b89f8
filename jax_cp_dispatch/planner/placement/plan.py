"""`PlacedPlan`: the keys that each rank receives if no queries move."""

import dataclasses
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._text import outline
from jax_cp_dispatch.documents.fingerprint import check_batch
from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.array_mask import MaskKind
from jax_cp_dispatch.metadata.describe import known, rows_between_ranks
from jax_cp_dispatch.planner.describe import (
    PlanToDescribe,
    Rows,
    describe_plan,
    exceeded_capacities,
)
from jax_cp_dispatch.planner.placement.config import CAPACITIES, PlacementConfig
from jax_cp_dispatch.planner.planned_pieces import pieces_of_placed
from jax_cp_dispatch.planner.row_ranges import local_rows
from jax_cp_dispatch.planner.runs import key_ranges, local_runs
from jax_cp_dispatch.planner.seen_rows import SeenRows
from jax_cp_dispatch.planner.slices import check_all_ranks, slice_of
from jax_cp_dispatch.planner.static_size import needed_sizes
from jax_cp_dispatch.planner.traffic import num_moved

# Fields that are equal in the plans of all masks of a placement.
OF_ALL_MASKS = ("run_row", "run_position", "run_length", "cut_pieces", "num_rows")
# An array or `Metadata`, or anything that a transformation maps over the leaves.
Leaf: TypeAlias = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlacedPlan:
    """A plan of attention over placed tokens: queries stay; keys and values move to the queries.

    A rank's rows are its places, with padding at the end. Runs (the pieces of documents that the
    rank holds) describe them, so the size of a plan grows with the pieces, not with the tokens.

    Attributes:
      kv_metadata: forward metadata of the keys; one slot for each range that a rank sends (also to
        itself), located by `src_offset`.
      run_row: i32 `[W, P]`; the first row of each piece, ascending; `num_tokens` for padding.
      run_position: i32 `[W, P]`; the place of that row's token in its document.
      run_origin: i32 `[W, P]`; the received row where the document starts, or would start.
      run_length: i32 `[W, P]`; tokens of the document.
      cut_pieces: i32 `[W, X, 9]`; the cut pieces of each rank, `max_cut_pieces` of them, and those
        on other ranks of the same documents: document, tokens before it, its tokens, its first row,
        tokens after it, its rank, its number among the cut pieces of its rank, its number in the
        document, and the row where its rank receives what the pieces before it send; -1 in unused
        entries. The piece before one is that of the same document with the number before.
      num_rows: i32 `[W]`; rows of each rank that are not padding; -1 if the batch does not fit.
      pairs: f32 `[W]`; query-key pairs of each rank.
      largest_needs: i32 `[W, 5]`; in every row the largest need of all ranks: rows of keys, ranges
        of keys sent, pieces, cut pieces, linked pieces. See `needs`.
      fingerprint: i32 `[W, 4]`; for each rank, the checksum of the whole plan with its config, mask
        and placed batch; the rank; the checksums of its own rows of segment ids and positions in
        placed order. See `validate`.
      num_tokens: rows of one rank (static).
      batch: rows of the batch; of one group, if `batch_axis` shards it (static).
      kv_capacity: rows of the receive buffer (static).
      max_cut_pieces: see `PlacementConfig` (static).
      mask: which keys a query sees; of a mask with arrays, its kind.
      ranges: of a mask with arrays, what each rank's rows see; see `local_ranges`.
    """

    kv_metadata: Leaf
    run_row: Leaf
    run_position: Leaf
    run_origin: Leaf
    run_length: Leaf
    cut_pieces: Leaf
    num_rows: Leaf
    pairs: Leaf
    largest_needs: Leaf
    fingerprint: Leaf
    mask: StaticMask | MaskKind
    ranges: MaskRanges | None = None
    num_tokens: int = dataclasses.field(metadata={"static": True})
    batch: int = dataclasses.field(metadata={"static": True})
    kv_capacity: int = dataclasses.field(metadata={"static": True})
    max_cut_pieces: int = dataclasses.field(metadata={"static": True})

    __repr__ = outline  # a plan has many arrays; `describe` is for reading

    @property
    def world_size(self) -> int:
        return self.kv_metadata.world_size

    def slice_of(self, rank: int) -> "PlacedPlan":
        """Returns the part of one rank: all arrays with a leading axis of size 1.

        This is what `in_specs=P(axis_name)` gives to the rank, and all that it needs.

        Raises:
          ValueError: rank is not in `[0, W)`, or this is a slice already.
        """
        return slice_of("PlacedPlan.slice_of", self, rank)

    def local_ranges(self, rank: Any) -> tuple[Int32[Array | np.ndarray, " rows"], ...]:
        """Returns the first and last + 1 received key of each row of one rank.

        i32 `[T]` each; (0, 0) for padding. If the mask has ranges of queries, also the first and
        last + 1 row of each received key, i32 `[kv_capacity]`. Call anywhere with a concrete `rank`
        (a plan of NumPy arrays then gives NumPy), or inside `jax.shard_map` with `lax.axis_index`,
        on the plan of all ranks or this rank's slice.
        """
        if self.ranges is not None:
            return tuple(x for x in local_rows(self.ranges, rank) if x is not None)
        assert isinstance(self.mask, StaticMask)
        return key_ranges(local_runs(self, rank), size=self.num_tokens, mask=self.mask)

    @property
    def fits(self) -> Bool[Array | np.ndarray, ""]:
        """Whether the batch fits its capacities; false only for a fallback of `place_tokens`.

        Of stacked plans, false if none fits: tokens of a group that fits are placed, and no ring
        may read them. `place_tokens(num_groups=)` places all groups or none.
        Inside a program, `jax.lax.cond` on this value can select another algorithm. Attention with
        a plan that does not fit fails on all ranks.
        """
        fits = (self.num_rows >= 0).all(-1).any()
        return np.asarray(fits) if isinstance(self.num_rows, np.ndarray) else fits

    @property
    def needs(self) -> PlacementConfig:
        """The smallest capacities for this plan; other choices are defaults.

        Of stacked plans, those that suffice for all. Read outside `jit`. `Placement.needs` has the
        other choices too.

        Raises:
          TypeError: the values are traced. Inside `jit`, use `fits` or `largest_needs`.
        """
        return PlacementConfig(**needed_sizes("PlacedPlan.needs", CAPACITIES, self.largest_needs))

    def validate(
        self, segment_ids: Ids, positions: Ids | None = None, mask: Mask | None = None
    ) -> None:
        """Raises if the plan was made for another batch.

        Call on the host, with the plan of all ranks and the arrays of its batch in placed order:
        `Placement.apply` of them. Padding may have any positions. Documents that were given by
        their lengths are numbered from 1 in each batch row, and positions that were not given count
        from 0 in each document. Inside a program, `context_parallel_attention`
        compares the same checksums, with 32 bits per rank.

        Raises:
          ValueError: the shape differs, the ids, positions or mask of some rank differ, or the
            batch did not fit, so nothing was planned.
        """
        op = "PlacedPlan.validate"
        given = segment_ids, positions, mask
        check_batch(op, self.fingerprint, *given, num_tokens=self.num_tokens)

    def describe(self) -> str:
        """Returns a text for people: work, tokens, moves between ranks, and capacities used.

        For the three ranks with the most work, it names the pieces of documents that cause it. Call
        on the host, with the plan of all ranks. `Placement.describe` also says where in the batch
        these documents are, and which ranks have the most work if nothing is placed.

        Raises:
          TypeError: the values are traced.
          ValueError: this is one rank's part of a plan.
        """
        op = "PlacedPlan.describe"
        if known(op, self.num_rows).min() < 0:
            exceeded = exceeded_capacities(CAPACITIES, self.largest_needs, self._capacities)
            return f"PlacedPlan: the batch does not fit {exceeded}. Nothing was placed."
        keys = Rows(rows_between_ranks(op, self.kv_metadata), self.kv_capacity)
        return describe_plan(
            PlanToDescribe(
                name="PlacedPlan",
                pieces=pieces_of_placed(op, self),
                traffic={"keys": keys},
                num_tokens=self.num_tokens,
                mask=self.seen,
                home=None,
            )
        )

    @property
    def seen(self) -> StaticMask | SeenRows:
        """What the rows see: the mask, or of one with arrays, its ranges."""
        if isinstance(self.mask, StaticMask):
            return self.mask
        assert self.ranges is not None
        return SeenRows.of(self.ranges)

    @property
    def _capacities(self) -> tuple[int, ...]:
        """The static sizes, in the order of `largest_needs`."""
        slots = (x.shape[-1] for x in (self.kv_metadata.dst_rank, self.run_row))
        linked = self.cut_pieces.shape[-2] - self.max_cut_pieces
        return self.kv_capacity, *slots, self.max_cut_pieces, linked

    @property
    def imbalance(self) -> float:
        """Largest work of a rank divided by the mean; 1 is perfect, and the value without work.

        Of stacked plans, the largest of all. Read outside `jit`.

        Raises:
          ValueError: this is one rank's part of a plan.
        """
        pairs = np.asarray(self.pairs, np.float64)
        check_all_ranks("PlacedPlan.imbalance", pairs.shape[-1], self.world_size)
        mean = pairs.mean(-1)
        return float(np.where(mean > 0, pairs.max(-1) / np.where(mean > 0, mean, 1), 1).max())

    @property
    def num_kv_tokens_moved(self) -> int:
        """Keys that move between ranks, each copy counted; of stacked plans, the sum.

        Read outside `jit`.
        """
        return num_moved("PlacedPlan.num_kv_tokens_moved", self.kv_metadata)
