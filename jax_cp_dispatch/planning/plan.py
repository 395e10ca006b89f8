"""`Plan`: which rank computes which queries, and which keys it receives for them."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch._text import describe_plan, exceeded, known, outline
from jax_cp_dispatch.documents.fingerprint import check_batch
from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.mask import MaskKind
from jax_cp_dispatch.planning.config import CAPACITIES, PLACED_CAPACITIES, PlanConfig
from jax_cp_dispatch.planning.request import check_all_ranks, num_moved
from jax_cp_dispatch.planning.runs import key_ranges, local_rows, local_runs

# ---- Saved plans and placements: a pickle names its format, so that another version can refuse it.
#
# The fields are a pickle of their own. So what this version no longer has, in a plan of another
# one, is found after its format has been read. The name and the module of `load_saved` are in every
# saved plan: they stay.

# To be counted up with every change of the fields of `Plan` or `Placement`, or of their meaning.
FORMAT = 2


def reduce_saved(self: Any) -> tuple[Any, ...]:
    """`__reduce__` of a dataclass: its class, and its fields without what is cached."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    kind = type(self)
    return load_saved, (FORMAT, kind.__name__, pickle.dumps((kind, fields), protocol=5))


def load_saved(found: int, name: str, payload: bytes) -> Any:
    """Returns the saved object.

    Raises:
      ValueError: another version of the package has saved it.
    """
    advice = "Plan the batch again, with this version of jax_cp_dispatch."
    if found != FORMAT:
        raise ValueError(
            f"{name}: this was saved in format {found} of plans, but this version of "
            f"jax_cp_dispatch reads format {FORMAT}. {advice}"
        )
    try:
        kind, fields = pickle.loads(payload)
        return kind(**fields)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name}: another version of jax_cp_dispatch has saved this: {error}. {advice}"
        ) from error


# An array or `Metadata`, or anything that a transformation maps over the leaves.
Leaf: TypeAlias = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Where each query is computed, and to which received keys it attends.

    `plan_attention` makes plans that move queries and keys. The plans of `place_tokens` move keys
    to the queries, which are already on their ranks: `is_placed`.

    A rank's rows are its columns of each batch row, one batch row after another; if the tokens are
    placed, its places, with padding at the end. The queries that a rank computes are described by
    runs, the pieces of documents in consecutive rows. So the size of a plan grows with the pieces,
    not with the tokens, unless the mask has arrays. Made outside `jit`, its arrays are NumPy, and
    it can be pickled.

    Attributes:
      kv_metadata: forward metadata of the keys; one slot for each range that a rank sends (also to
        itself), located by `src_offset`. Padding need not move.
      q_metadata: the same of the queries; None if they stay.
      run_row: i32 `[W, P]`; the first row of each piece, ascending; `q_capacity` for unused ones.
      run_position: i32 `[W, P]`; the place of that row's query in its document; -1 for padding.
      run_origin: i32 `[W, P]`; the received row of the document's first key, also if it was not
        sent.
      run_length: i32 `[W, P]`; tokens of the document. If queries move, None for a mask that is
        causal or has arrays.
      cut_pieces: of a placement, i32 `[W, X, 9]`: for each rank, the `max_cut_pieces` pieces of cut
        documents that it holds, then the pieces of the same documents on other ranks. The nine
        numbers of a piece are its document, the tokens of the document before it, its own tokens,
        its first row, the tokens of the document after it, its rank, its number among the cut
        pieces of this rank, its number in the document, and the row where its rank receives what
        earlier pieces send. They are -1 in unused entries.
      ranges: of a mask with arrays, what the rows see: the keys of each query, i32 `[W,
        q_capacity]`, and the queries of each key, `[W, kv_capacity]`; see `local_ranges`.
      num_rows: i32 `[W]`; rows of queries that a rank computes; -1 in a fallback.
      pairs_before, pairs: f32 `[W]`; query-key pairs of each rank if tokens stay in the order of
        the batch, and with this plan; of several masks the weighted sum, in a unit that makes
        weights integers. Inside `jit` they are exact up to 2**24 pairs, beyond that correct to
        about 1e-4 of the mean.
      largest_needs: i32 `[W, 5]`; in every row the largest need of all ranks, in the order of
        `capacities`. See `fits` and `needs`.
      fingerprint: i32 `[W, 4]`; for each rank, the checksum of the whole plan with its config, mask
        and batch; the rank; the checksums of its own rows of segment ids and positions, and of the
        arrays of the mask, if it has them. See `validate`.
      num_tokens: rows of one rank (static).
      batch: rows of the batch; of one group, if `batch_axis` shards it (static).
      q_capacity, kv_capacity: rows of the buffers of queries and of keys (static). If queries stay,
        `q_capacity` is `num_tokens`.
      max_cut_pieces: see `PlanConfig` (static).
      mask: which keys a query sees; of a mask with arrays, its kind.
    """

    kv_metadata: Leaf
    q_metadata: Leaf = None
    run_row: Leaf
    run_position: Leaf
    run_origin: Leaf
    run_length: Leaf = None
    cut_pieces: Leaf = None
    ranges: MaskRanges | None = None
    num_rows: Leaf
    pairs_before: Leaf
    pairs: Leaf
    largest_needs: Leaf
    fingerprint: Leaf
    mask: Mask | MaskKind
    num_tokens: int = dataclasses.field(metadata={"static": True})
    batch: int = dataclasses.field(metadata={"static": True})
    q_capacity: int = dataclasses.field(metadata={"static": True})
    kv_capacity: int = dataclasses.field(metadata={"static": True})
    max_cut_pieces: int = dataclasses.field(default=0, metadata={"static": True})

    __repr__ = outline  # a plan has many arrays; `describe` is for reading
    __reduce__ = reduce_saved

    @property
    def world_size(self) -> int:
        return self.kv_metadata.world_size

    @property
    def is_placed(self) -> bool:
        """Whether queries stay, because `place_tokens` has put the tokens on their ranks."""
        return self.q_metadata is None

    @property
    def capacities(self) -> dict[str, int]:
        """The static sizes, by the names of `PlanConfig`, in the order of `largest_needs`."""
        slots = self.kv_metadata.dst_rank.shape[-1]
        num_runs = self.run_row.shape[-1]
        if self.is_placed:
            linked = self.cut_pieces.shape[-2] - self.max_cut_pieces
            sizes = self.kv_capacity, slots, num_runs, self.max_cut_pieces, linked
            return dict(zip(PLACED_CAPACITIES, sizes, strict=True))
        q_slots = self.q_metadata.dst_rank.shape[-1]
        sizes = self.q_capacity, self.kv_capacity, q_slots, slots, num_runs
        return dict(zip(CAPACITIES, sizes, strict=True))

    def slice_of(self, rank: int) -> Plan:
        """Returns the part of one rank: all arrays with a leading axis of size 1.

        This is what `in_specs=P(axis_name)` gives to the rank, and all that it needs. So the
        processes of a large run need not hold the plan of all ranks.

        Raises:
          ValueError: rank is not in `[0, W)`, or this is a slice already.
        """
        return slice_plan("Plan.slice_of", self, rank)

    def local_ranges(self, rank: Any) -> tuple[Int32[Array | np.ndarray, " rows"], ...]:
        """Returns the first and last + 1 received key of each query that one rank computes.

        i32 `[q_capacity]` each; (0, 0) for padding and unused rows. If the mask has ranges of
        queries, also the first and last + 1 row of the queries of each received key, i32
        `[kv_capacity]`. Call anywhere with a concrete `rank` (a plan of NumPy arrays then gives
        NumPy), or inside `jax.shard_map` with `lax.axis_index`, on the plan of all ranks or this
        rank's slice.
        """
        if self.ranges is not None:
            return tuple(x for x in local_rows(self.ranges, rank) if x is not None)
        assert isinstance(self.mask, StaticMask)
        return key_ranges(local_runs(self, rank), size=self.q_capacity, mask=self.mask)[:2]

    @property
    def fits(self) -> Bool[Array | np.ndarray, ""]:
        """Whether the plan fits its capacities on all ranks; traced for a plan made under `jit`.

        A plan made outside `jit` fits, except for a fallback of `plan_attention` or `place_tokens`.
        A plan that does not fit makes attention fail on all ranks. To skip such a training step
        instead, or to use another algorithm, use `lax.cond` on this value.

        For stacked plans: True if every plan fits. For stacked placements: True if any fits,
        because its tokens are in placed order and a ring would misread them.
        `place_tokens(num_groups=)` places all groups or none.
        """
        if self.is_placed:
            fits = (self.num_rows >= 0).all(-1).any()
        else:
            sizes = np.array(list(self.capacities.values()), np.int32)
            given = np.broadcast_to(sizes, self.largest_needs.shape)
            fits = (self.largest_needs <= given).all() & (self.num_rows >= 0).all()
        return np.asarray(fits) if isinstance(fits, np.generic) else fits

    @property
    def reason(self) -> str | None:
        """Why the batch does not fit, of the plan of a fallback or one made inside `jit`; or None.

        Read outside `jit`. `Placement.reason` also names the rank.
        """
        if known("Plan.reason", self.fits):
            return None
        return f"Plan: the batch does not fit {exceeded(self.capacities, self.largest_needs)}."

    @property
    def needs(self) -> PlanConfig:
        """The smallest capacities for this plan; other choices are defaults.

        For stacked plans, they suffice for all. Read outside `jit`. `Placement.needs` has the
        other choices too.

        Raises:
          TypeError: the values are traced. Inside `jit`, use `fits` or `largest_needs`.
        """
        names = list(self.capacities)
        needs = known("Plan.needs", self.largest_needs).reshape(-1, len(names)).max(0)
        sizes: dict[str, Any] = dict(zip(names, np.maximum(needs, 1).tolist(), strict=True))
        return PlanConfig(**sizes)

    def validate(
        self, segment_ids: Ids, positions: Ids | None = None, mask: Mask | None = None
    ) -> None:
        """Raises if the plan was made for another batch.

        Call on the host, with the plan of all ranks and the arrays from which it was made; if the
        tokens are placed, `Placement.apply` of them. A plan made from lengths is one of segment ids
        1, 2, ... in each batch row. Positions that were not given count from 0 in each document;
        padding may have any. Inside a program, attention compares the same checksums, with 32 bits
        per rank.

        Raises:
          ValueError: the shape differs, the ids, positions or mask of some rank differ, or the
            batch did not fit, so nothing was planned.
        """
        given = segment_ids, positions, mask
        check_batch("Plan.validate", self.fingerprint, *given, num_tokens=self.num_tokens)

    def describe(self) -> str:
        """Returns a text for people: work, tokens, moves between ranks, and capacities used.

        Call on the host, with the plan of all ranks.

        Raises:
          TypeError: the values are traced.
          ValueError: this is one rank's part of a plan.
        """
        return describe_plan("Plan.describe", self)

    @property
    def imbalance(self) -> Float32[Array | np.ndarray, ""]:
        """Largest work of a rank divided by the mean; 1 is perfect, and the value without work.

        An array without axes, NumPy or JAX like the plan; `float` of it is for people. Of stacked
        plans, the largest of all.

        Raises:
          ValueError: this is one rank's part of a plan.
        """
        return self._imbalance("imbalance", self.pairs)

    @property
    def imbalance_before(self) -> Float32[Array | np.ndarray, ""]:
        """`imbalance` if tokens stay in the order of the batch."""
        return self._imbalance("imbalance_before", self.pairs_before)

    def _imbalance(self, name: str, pairs: Any) -> Any:
        check_all_ranks(f"Plan.{name}", pairs.shape[-1], self.world_size)
        xp = np if isinstance(pairs, np.ndarray) else jnp
        mean = pairs.mean(-1)
        each = xp.where(mean > 0, pairs.max(-1) / xp.where(mean > 0, mean, 1), 1)
        return xp.asarray(each.max(), np.float32)

    @property
    def num_q_tokens_moved(self) -> int:
        """Queries that are computed on another rank; of stacked plans, the sum.

        Read outside `jit`.
        """
        return 0 if self.is_placed else num_moved("Plan.num_q_tokens_moved", self.q_metadata)

    @property
    def num_kv_tokens_moved(self) -> int:
        """Keys that move between ranks, each copy counted; of stacked plans, the sum.

        Read outside `jit`.
        """
        return num_moved("Plan.num_kv_tokens_moved", self.kv_metadata)

    def num_tokens_moved_between_nodes(self, ranks_per_node: int) -> tuple[int, int]:
        """Returns the queries, and the keys, that move between nodes of consecutive ranks.

        Each copy counts; of stacked plans, the sum. Call outside `jit`.
        """
        op = "Plan.num_tokens_moved_between_nodes"
        q = 0 if self.is_placed else num_moved(op, self.q_metadata, ranks_per_node)
        return q, num_moved(op, self.kv_metadata, ranks_per_node)


def slice_plan(op: str, plan: Plan, rank: int) -> Plan:
    """Returns the part of one rank of the plan of all ranks; for `slice_of`."""
    whole: Any = plan
    held, world_size = np.shape(whole.fingerprint)[0], whole.world_size
    check_integer(op, "rank", rank)
    if not 0 <= rank < world_size or held != world_size:
        raise ValueError(
            f"{op}: got rank {rank} with {held} of {world_size} ranks. Call it on the plan of all "
            f"ranks, with a rank in [0, {world_size})."
        )
    return jax.tree.map(lambda x: x[rank : rank + 1], plan)


# ---- `stack_plans`: plans of several batches as one, with common static sizes.

_OP = "stack_plans"

_STATIC_CAPACITIES = ("q_capacity", "kv_capacity", "max_cut_pieces")
# What unused entries contain; those of all other fields are 0.
_UNUSED = {"dst_rank": -1, "cut_pieces": -1, "run_row": np.iinfo(np.int32).max}


def stack_plans(plans: Iterable[Plan]) -> Plan:
    """Returns one plan whose arrays have a leading axis over `plans`, padded to common sizes.

    Use it for the groups of a batch that is sharded over `batch_axis`, one plan for each, in the
    order of the batch: pass the result to `Documents.with_plan`. Or use it for micro-batches:
    `jax.lax.scan` over the result gives each step its own plan, in one compiled program. For both,
    stack the groups of each micro-batch, then the micro-batches.

    Call on the host, or anywhere with traced plans. NumPy arrays give NumPy. Different numbers of
    plans, or other capacities, compile anew; fix the capacities in `PlanConfig`.

    Args:
      plans: all of `plan_attention` or all of `place_tokens`, for the same ranks, tokens per rank
        and mask.
    Returns:
      A plan with the largest capacities. Its `imbalance` is the largest of all
      plans, and its numbers of moved tokens are sums. Call `validate` and `describe` on the single
      plans.
    Raises:
      TypeError, ValueError: there is no plan, or the plans differ in more than capacities.
    """
    if not isinstance(plans, Iterable):
        raise TypeError(f"{_OP}: got {type(plans).__name__}. Pass a list of plans.")
    plans = list(plans)
    if not plans:
        raise ValueError(f"{_OP}: got an empty list. Pass at least one plan.")
    for plan in plans:
        check_plan(_OP, plan)
    if len({plan.is_placed for plan in plans}) > 1:
        raise TypeError(
            f"{_OP}: some plans are those of a placement, others move queries. Pass plans of "
            "plan_attention, or plans of place_tokens."
        )
    for name in ("world_size", "num_tokens", "batch", "mask"):
        values = [getattr(plan, name) for plan in plans]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{_OP}: {name} is {values}; it needs to be the same in all plans. Plan batches of "
                "one shape (by lengths, pass columns=) for the same ranks, with the same mask."
            )
    shapes = [np.shape(plan.fingerprint) for plan in plans]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{_OP}: the plans have fingerprints of shapes {shapes}. Stack plans of all ranks "
            "only, or stacks of the same number of plans."
        )
    sizes = {name: max(getattr(plan, name) for plan in plans) for name in _STATIC_CAPACITIES}

    def stacked(path, *arrays):
        xp = np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
        shape = np.max([x.shape for x in arrays], axis=0)
        unused = _UNUSED.get(getattr(path[-1], "name", ""), 0)
        padded = []
        for x in arrays:
            missing = [(0, size - have) for have, size in zip(x.shape, shape, strict=True)]
            padded.append(xp.pad(x, missing, constant_values=unused))
        return xp.stack(padded)

    padded_to = (dataclasses.replace(plan, **sizes) for plan in plans)
    return jax.tree_util.tree_map_with_path(stacked, *padded_to)


def is_stack(plan: Plan | None) -> bool:
    """Whether this is a result of `stack_plans`, or a part of it with its leading axis."""
    return plan is not None and plan.fingerprint.ndim > 2


def plan_of_group(op: str, plan: Plan) -> Plan:
    """Returns the plan of this group of ranks, which alone it has of stacked ones."""
    if not is_stack(plan):
        return plan
    if plan.fingerprint.shape[:-2] != (1,):
        raise ValueError(
            f"{op}: got stacked plans, of {list(plan.fingerprint.shape[:-2])}. Pass one of them: "
            "each step of jax.lax.scan has its own, and jax.tree.map(lambda x: x[i], plans) is the "
            "i-th. For groups of batch rows, use in_specs=documents.specs(axis_name, batch_axis)."
        )
    return jax.tree.map(lambda x: x[0], plan)


def check_groups(op: str, plan: Any, *, num_groups: int, batch: tuple[str, ...]) -> None:
    """Requires one plan for each group of the batch; a single group may have it in a stack."""
    held = plan.fingerprint.shape[-2] if plan.fingerprint.ndim > 1 else 1
    if held != plan.world_size:
        raise ValueError(
            f"{op}: the plan is the part of {held} of {plan.world_size} ranks. Pass the plan of "
            "all ranks, or global arrays with the part of each rank as its shard; or call it "
            "inside jax.shard_map, with in_specs=documents.specs(axis_name)."
        )
    groups = f"batch_axis {batch!r} splits the batch into {num_groups} independent groups"
    if not is_stack(plan):
        if num_groups > 1:
            raise ValueError(
                f"{op}: got a single plan, but {groups}. Plan the rows of each group and pass "
                "Documents.with_plan(stack_plans([...])), one plan per group, or place them by "
                "place_tokens(num_groups=...). Or pass batch_axis=() and a plan for all rows, "
                "which each group then computes."
            )
        return
    if plan.fingerprint.shape[:-2] != (num_groups,):
        groups = groups if num_groups > 1 else "the batch is not sharded"
        raise ValueError(
            f"{op}: got plans stacked as {list(plan.fingerprint.shape[:-2])}, but {groups}. Pass "
            "stack_plans of one plan per group, and name the axis of the groups as batch_axis. For "
            "micro-batches, call attention inside jax.lax.scan over their plans."
        )


def check_plan(op: str, plan: Any) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"{op}: plan is of type {type(plan).__name__}; it needs to be a Plan. Pass "
            "plan_attention(...) or place_tokens(...).plan."
        )
