"""Capacities of a plan: the configured sizes, and the sizes that one batch needs."""

import dataclasses

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._arguments import check_array, check_integer, check_positive
from jax_cp_dispatch._window import reach
from jax_cp_dispatch.planner.blocks import BlockGrid
from jax_cp_dispatch.planner.segment_ids import Ids, is_on_host, read_documents
from jax_cp_dispatch.planner.stages import Assignment, Capacities, assign, q_bound


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Static sizes of a plan. None selects a sufficient default; see `plan_attention`.

    Attributes:
      block: rows per block, the unit of planning and movement.
      q_capacity: rows of the buffer in which a rank receives queries.
      kv_capacity: rows of the buffer in which a rank receives keys and values.
      max_kv_destinations: maximum ranks to which one block of keys is sent (C of the KV metadata).
    """

    block: int = 128
    q_capacity: int | None = None
    kv_capacity: int | None = None
    max_kv_destinations: int | None = None

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value is None and name != "block":
                continue
            check_positive("PlanConfig", **{name: value})

    def needs(
        self,
        segment_ids: Ids,
        positions: Ids | None = None,
        *,
        world_size: int,
        window: int | None = None,
    ) -> "PlanConfig":
        """Returns the smallest capacities for the plan of one batch, with this block size.

        Call on the host with concrete arrays, for example in a data loader before a step that plans
        under `jit`. Balances the work, but creates no plan. For several batches, use the maximum of
        each capacity.

        Args:
          segment_ids, positions, world_size, window: see `plan_attention`.
        Returns:
          A config with the three capacities.
        Raises:
          TypeError, ValueError: as `plan_attention`, except for capacities.
        """
        op = "PlanConfig.needs"
        grid = check_shapes(op, segment_ids, positions, world_size, window, self)
        segment_ids, positions = read_host_documents(op, segment_ids, positions)
        with jax.core.eval_context():
            assignment = assign(segment_ids, positions, grid=grid, window=window)
            q, kv, destinations = _needs(assignment)
        return PlanConfig(self.block, int(q.max()), int(kv.max()), max(destinations, 1))

    def fits(
        self,
        segment_ids: Ids,
        positions: Ids | None = None,
        *,
        world_size: int,
        window: int | None = None,
    ) -> bool:
        """Whether the plan of one batch fits these capacities; None always fits. See `needs`."""
        need = self.needs(segment_ids, positions, world_size=world_size, window=window)
        names = ("q_capacity", "kv_capacity", "max_kv_destinations")
        given = [(getattr(self, name), getattr(need, name)) for name in names]
        return all(capacity is None or capacity >= least for capacity, least in given)


def static_capacities(grid: BlockGrid, config: PlanConfig) -> Capacities:
    return Capacities(
        q=config.q_capacity or q_bound(grid),
        kv=config.kv_capacity or grid.world_size * grid.rows,
        destinations=config.max_kv_destinations or grid.world_size,
    )


def exact_capacities(assignment: Assignment, grid: BlockGrid, config: PlanConfig) -> Capacities:
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

    q_tokens, kv_tokens, need = _needs(assignment)
    destinations = config.max_kv_destinations
    if destinations is None:
        destinations = min(1 << max(need - 1, 0).bit_length(), grid.world_size)
    if destinations < need:
        raise ValueError(
            f"plan_attention: a block of keys goes to {need} ranks but max_kv_destinations is "
            f"{destinations}. Pass max_kv_destinations>={need} or None in PlanConfig."
        )
    all_rows = grid.world_size * grid.rows
    return Capacities(
        q=capacity("q_capacity", config.q_capacity, q_tokens, q_bound(grid)),
        kv=capacity("kv_capacity", config.kv_capacity, kv_tokens, all_rows),
        destinations=destinations,
    )


def _needs(assignment: Assignment) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns each rank's received rows of queries and of keys, and the most ranks of a block."""
    q_tokens, kv_tokens, destinations = jax.device_get(
        (assignment.q_tokens, assignment.kv_tokens, assignment.destinations)
    )
    return q_tokens.sum(1), kv_tokens.sum(1), int(destinations)


def check_shapes(
    op: str, segment_ids, positions, world_size: int, window: int | None, config: PlanConfig
) -> BlockGrid:
    """Checks types and shapes of a plan's arguments; returns the blocks of the batch."""
    if not isinstance(config, PlanConfig):
        raise TypeError(
            f"{op}: config is {config!r}; it needs to be a PlanConfig. Omit it for the default."
        )
    check_integer(op, "world_size", world_size)
    arrays = {"segment_ids": segment_ids}
    if positions is not None:
        arrays["positions"] = positions
    for name, x in arrays.items():
        check_array(op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} has dtype {x.dtype} but must be integers.")
    if segment_ids.ndim != 2 or 0 in segment_ids.shape:
        raise ValueError(
            f"{op}: segment_ids has shape {segment_ids.shape} but must be [B, columns], "
            "not empty. For a single packed row pass segment_ids[None]."
        )
    if positions is not None and positions.shape != segment_ids.shape:
        raise ValueError(
            f"{op}: positions has shape {positions.shape} but segment_ids has "
            f"{segment_ids.shape}. Pass equal shapes, or positions=None."
        )
    reach(op, True, window)
    batch, columns = segment_ids.shape
    if world_size < 1 or columns % world_size:
        raise ValueError(
            f"{op}: {columns} columns cannot be split over world_size={world_size} "
            "ranks. Pad the columns with segment 0 to a multiple of world_size >= 1."
        )
    if batch * columns >= 2**31:
        raise ValueError(
            f"{op}: {batch} x {columns} rows do not fit 32-bit row numbers. "
            "Plan fewer batch rows at a time."
        )
    columns //= world_size
    return BlockGrid(batch, world_size, columns, min(config.block, columns))


def read_host_documents(
    op: str, segment_ids: Ids, positions: Ids | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns checked ids and positions; requires values that this process knows."""
    for x in (segment_ids, positions):
        if x is not None and not is_on_host(x):
            raise ValueError(
                f"{op}: an input is traced or spread over processes. Pass the whole array, as "
                "NumPy, on every process, or plan inside jit."
            )
    return read_documents(op, segment_ids, positions)
