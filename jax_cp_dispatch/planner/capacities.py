"""Capacities of a plan inside `jit`, and checks of the arrays from which a plan is made."""

import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._arguments import check_array, check_integer
from jax_cp_dispatch._window import reach
from jax_cp_dispatch.planner.blocks import BlockGrid
from jax_cp_dispatch.planner.config import PlanConfig, check_config
from jax_cp_dispatch.planner.segment_ids import Ids, is_on_host, read_documents
from jax_cp_dispatch.planner.stages import Capacities, kv_transfers_bound, q_bound


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
    return BlockGrid(batch, world_size, columns, min(config.rows_per_block, columns))


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
