"""From packed documents to a plan: which rank computes what, and what moves there."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Shaped

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.blocks import BlockGrid
from jax_cp_dispatch.planner.stages import Assignment, Capacities, assign, build, q_bound

# An array or `Metadata`; or whatever a transformation maps over the leaves.
Leaf: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Static choices of a plan. None stands for a default that always fits; see `plan_attention`.

    Attributes:
      block: rows per block, the unit of planning and of moving.
      q_capacity: rows of the buffer in which a rank receives queries.
      kv_capacity: rows of the buffer in which a rank receives keys and values.
      max_kv_destinations: ranks that one block of keys may be sent to (C of the KV metadata).
    """

    block: int = 128
    q_capacity: int | None = None
    kv_capacity: int | None = None
    max_kv_destinations: int | None = None

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value is not None and value < 1:
                raise ValueError(f"PlanConfig: {name} is {value} but must be at least 1.")


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
      num_tokens: rows of one rank (static).
      q_capacity, kv_capacity: rows of the receive buffers (static).
    """

    q_metadata: Leaf
    kv_metadata: Leaf
    kv_start: Leaf
    kv_end: Leaf
    pairs_before: Leaf
    pairs_after: Leaf
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
    for all keys. If given capacities are too small, the counts in the metadata tell the true need,
    on which `dispatch` fails on all ranks.

    Args:
      segment_ids: integers [B, columns]; each rank holds an equal run of columns, in rank order.
      positions: integers of the same shape, or None if documents differ in their segment ids.
      world_size: number of ranks W; must divide the columns.
      window: a query attends at most that many keys, its own the last; None: all before it.
      config: block size and capacities.
    Returns:
      The plan for all ranks, the same on every process that plans the same inputs.
    Raises:
      TypeError: inputs are not integers.
      ValueError: shapes do not fit; or, with concrete inputs only, a segment id is negative or
        stands in two separate runs of one batch row, or a capacity is too small.
    """
    grid = _check_shapes(segment_ids, positions, world_size, config)
    if window is not None and not (isinstance(window, (int, np.integer)) and window >= 1):
        raise ValueError(f"plan_attention: window is {window}; it needs to be at least 1, or None.")
    if isinstance(segment_ids, jax.core.Tracer) or isinstance(positions, jax.core.Tracer):
        assignment = assign(_int32(segment_ids), _int32(positions), grid=grid, window=window)
        return _plan(assignment, grid, _static_capacities(grid, config))
    segments = _to_host(segment_ids)
    positions = None if positions is None else _to_host(positions)
    _check_values(segments, positions)
    # Even while an outer function is traced, what does not depend on its arguments is known now.
    with jax.core.eval_context():
        assignment = assign(_int32(segments), _int32(positions), grid=grid, window=window)
        return _plan(assignment, grid, _exact_capacities(assignment, grid, config))


def _plan(assignment: Assignment, grid: BlockGrid, capacities: Capacities) -> AttentionPlan:
    arrays = build(assignment, grid=grid, capacities=capacities)
    return AttentionPlan(
        **arrays._asdict(),
        pairs_before=assignment.pairs_before,
        pairs_after=assignment.pairs_after,
        num_tokens=grid.rows,
        q_capacity=capacities.q,
        kv_capacity=capacities.kv,
    )


def _static_capacities(grid: BlockGrid, config: PlanConfig) -> Capacities:
    return Capacities(
        q=config.q_capacity or q_bound(grid),
        kv=config.kv_capacity or grid.world_size * grid.rows,
        destinations=config.max_kv_destinations or grid.world_size,
    )


def _exact_capacities(assignment: Assignment, grid: BlockGrid, config: PlanConfig) -> Capacities:
    def capacity(name: str, given: int | None, tokens: np.ndarray, bound: int) -> int:
        need, rank = int(tokens.max()), int(tokens.argmax())
        if given is None:
            step = max(8 * grid.block, 1 << max(need.bit_length() - 5, 0))
            return min(max(-(-need // step), 1) * step, bound)
        if given < need:
            raise ValueError(
                f"plan_attention: rank {rank} would receive {need} rows but {name} is {given}. "
                f"Pass {name}>={need} or None in PlanConfig."
            )
        return given

    q_tokens, kv_tokens, need = jax.device_get(
        (assignment.q_tokens, assignment.kv_tokens, assignment.destinations)
    )
    destinations = config.max_kv_destinations
    if destinations is None:
        destinations = min(1 << max(int(need) - 1, 0).bit_length(), grid.world_size)
    if destinations < need:
        raise ValueError(
            f"plan_attention: a block of keys goes to {need} ranks but max_kv_destinations is "
            f"{destinations}. Pass max_kv_destinations>={need} or None in PlanConfig."
        )
    all_rows = grid.world_size * grid.rows
    return Capacities(
        q=capacity("q_capacity", config.q_capacity, q_tokens.sum(1), q_bound(grid)),
        kv=capacity("kv_capacity", config.kv_capacity, kv_tokens.sum(1), all_rows),
        destinations=destinations,
    )


def _check_shapes(segment_ids, positions, world_size: int, config: PlanConfig) -> BlockGrid:
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"plan_attention: {name} has dtype {x.dtype} but must be integers.")
    if segment_ids.ndim != 2 or 0 in segment_ids.shape:
        raise ValueError(
            f"plan_attention: segment_ids has shape {segment_ids.shape} but must be [B, columns], "
            "not empty. For a single packed row pass segment_ids[None]."
        )
    if positions is not None and positions.shape != segment_ids.shape:
        raise ValueError(
            f"plan_attention: positions has shape {positions.shape} but segment_ids has "
            f"{segment_ids.shape}. Pass equal shapes, or positions=None."
        )
    batch, columns = segment_ids.shape
    if world_size < 1 or columns % world_size:
        raise ValueError(
            f"plan_attention: {columns} columns cannot be split over world_size={world_size} "
            "ranks. Pad the columns with segment 0 to a multiple of world_size >= 1."
        )
    if batch * columns >= 2**31:
        raise ValueError(
            f"plan_attention: {batch} x {columns} rows do not fit 32-bit row numbers. "
            "Plan fewer batch rows at a time."
        )
    columns //= world_size
    return BlockGrid(batch, world_size, columns, min(config.block, columns))


def _check_values(segment_ids: np.ndarray, positions: np.ndarray | None) -> None:
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
        if x is not None and (x.max() >= 2**31 or x.min() < -(2**31)):
            raise ValueError(
                f"plan_attention: {name} has a value beyond 32 bits. Number {name} from 0."
            )
    if segment_ids.min() < 0:
        row, column = np.argwhere(segment_ids < 0)[0]
        raise ValueError(
            f"plan_attention: segment_ids[{row}, {column}] is {segment_ids[row, column]} but must "
            "be at least 0. Mark padding with 0 and number documents from 1."
        )
    new = np.ones(segment_ids.shape, bool)
    new[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    row, column = np.nonzero(new & (segment_ids > 0))
    run = np.stack([row, segment_ids[row, column]], axis=1)
    unique, count = np.unique(run, axis=0, return_counts=True)
    if (count > 1).any():
        row, segment = unique[count > 1][0]
        raise ValueError(
            f"plan_attention: segment {segment} stands in separate runs of batch row {row}, but a "
            "document must be contiguous. Give each run its own segment id, or sort the row by "
            "document."
        )


def _to_host(x: Array | np.ndarray) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            "plan_attention: an input is spread over processes. Pass the whole array, as NumPy, on "
            "every process, or plan inside jit."
        )
    return np.asarray(x)


def _int32(x: Array | np.ndarray | None) -> Int32[Array, "B T"] | None:
    return None if x is None else jnp.asarray(x, jnp.int32)


def _imbalance(pairs: Float32[Array, " W"]) -> Float32[Array, ""]:
    mean = pairs.mean()
    return jnp.where(mean > 0, pairs.max() / jnp.where(mean > 0, mean, 1), 1)


def _num_moved(metadata: Metadata) -> int:
    received = np.asarray(metadata.num_recv_tokens)[:, :-1].astype(np.int64)
    return int(received.sum() - received.trace())
