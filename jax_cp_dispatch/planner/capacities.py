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
from jax_cp_dispatch.planner.stages import Capacities, assign, kv_transfers_bound, q_bound

# Fields of `PlanConfig`, in the order of `AttentionPlan.needs`.
CAPACITIES = ("q_capacity", "kv_capacity", "max_q_transfers", "max_kv_transfers", "max_pieces")


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Static choices of a plan. A capacity of None selects a default; see `plan_attention`.

    Attributes:
      block: inside `jit`, rows per block, the unit of planning and movement. Outside, the fewest
        queries that are split from a document.
      q_capacity: rows of the buffer in which a rank receives queries.
      kv_capacity: rows of the buffer in which a rank receives keys and values.
      max_q_transfers, max_kv_transfers: ranges of queries, and of keys, that one rank may send.
      max_pieces: pieces of documents that one rank may compute.
      num_heads, num_kv_heads: heads of queries, and of keys. A plan made outside `jit` moves as few
        bytes as possible: a query and its output count `2 * num_heads`, a key and its value
        `2 * num_kv_heads`. Only the ratio matters.
      balance_tolerance: fraction by which the work of a rank may exceed the mean. A larger
        tolerance moves fewer bytes.
    """

    block: int = 128
    q_capacity: int | None = None
    kv_capacity: int | None = None
    max_q_transfers: int | None = None
    max_kv_transfers: int | None = None
    max_pieces: int | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    balance_tolerance: float = 0.01

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if name == "balance_tolerance" or (value is None and name in CAPACITIES):
                continue
            check_positive("PlanConfig", **{name: value})
        if not 0 <= self.balance_tolerance <= 1:
            raise ValueError(
                f"PlanConfig: balance_tolerance is {self.balance_tolerance}; it needs to be in "
                "[0, 1]. 0.01 allows 1 % above the mean."
            )

    def needs(
        self,
        segment_ids: Ids,
        positions: Ids | None = None,
        *,
        world_size: int,
        window: int | None = None,
    ) -> "PlanConfig":
        """Returns the smallest capacities for the plan of one batch that is made inside `jit`.

        Call on the host with concrete arrays, for example in a data loader before a step that plans
        under `jit`. Balances the work, but creates no plan. For several batches, use the maximum of
        each capacity. A plan made outside `jit` assigns queries differently; its own needs are in
        `AttentionPlan.needs`.

        Args:
          segment_ids, positions, world_size, window: see `plan_attention`.
        Returns:
          This config with its capacities replaced.
        Raises:
          TypeError, ValueError: as `plan_attention`, except for capacities.
        """
        op = "PlanConfig.needs"
        grid = check_shapes(op, segment_ids, positions, world_size, window, self)
        segment_ids, positions = read_host_documents(op, segment_ids, positions)
        options = {"window": window, "tolerance": self.balance_tolerance}
        with jax.core.eval_context():
            needs = assign(segment_ids, positions, grid=grid, **options).needs
            values = [max(int(x), 1) for x in jax.device_get(needs)]
        return dataclasses.replace(self, **dict(zip(CAPACITIES, values, strict=True)))

    def fits(
        self,
        segment_ids: Ids,
        positions: Ids | None = None,
        *,
        world_size: int,
        window: int | None = None,
    ) -> bool:
        """Whether the plan of one batch fits these capacities inside `jit`; None always fits.

        See `needs`.
        """
        need = self.needs(segment_ids, positions, world_size=world_size, window=window)
        given = [(getattr(self, name), getattr(need, name)) for name in CAPACITIES]
        return all(capacity is None or capacity >= least for capacity, least in given)


def static_capacities(grid: BlockGrid, config: PlanConfig) -> Capacities:
    """Returns the configured capacities of a plan inside `jit`, by default always sufficient."""
    q = config.q_capacity or q_bound(grid)
    return Capacities(
        q=q,
        kv=config.kv_capacity or grid.world_size * grid.rows,
        q_transfers=config.max_q_transfers or grid.batch * grid.per_piece,
        kv_transfers=config.max_kv_transfers or kv_transfers_bound(grid),
        pieces=config.max_pieces or q,
    )


def check_shapes(
    op: str, segment_ids, positions, world_size: int, window: int | None, config: PlanConfig
) -> BlockGrid:
    """Checks types and shapes of a plan's arguments; returns the blocks of the batch."""
    check_config(op, config)
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


def check_config(op: str, config: PlanConfig) -> None:
    if not isinstance(config, PlanConfig):
        raise TypeError(
            f"{op}: config is {config!r}; it needs to be a PlanConfig. Omit it for the default."
        )


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
