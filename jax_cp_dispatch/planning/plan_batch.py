"""`plan_attention`: plans attention of packed documents, on the host or inside a program."""

from collections.abc import Iterable

import jax
import jax.core
import numpy as np
from jaxtyping import Array, Shaped

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.documents.given import check_document_mask
from jax_cp_dispatch.documents.table import Row, document_table
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import check_mask_arrays, read_mask, read_mask_on_host
from jax_cp_dispatch.planning.config import (
    CAPACITIES,
    PlanConfig,
    check_config,
    check_fallback,
    check_traced,
)
from jax_cp_dispatch.planning.inside_jit import check_shapes, plan_inside
from jax_cp_dispatch.planning.on_host import plan_on_host
from jax_cp_dispatch.planning.plan import Plan
from jax_cp_dispatch.planning.request import PlanRequest
from jax_cp_dispatch.planning.seen_keys import seen_keys
from jax_cp_dispatch.planning.transfers import check_rank

_OP = "plan_attention"


@jax.named_scope("cpd.plan")
def plan_attention(
    segment_ids: Shaped[Array | np.ndarray, "..."] | None = None,
    positions: Shaped[Array | np.ndarray, "..."] | None = None,
    *,
    world_size: int,
    lengths: Iterable[Row] | Row | None = None,
    columns: int | None = None,
    mask: Mask | str | None = None,
    config: PlanConfig = PlanConfig(),
    fallback: str | None = None,
    rank: int | None = None,
) -> Plan:
    """Plans attention over packed documents so that all ranks have nearly equal work.

    Segment 0 is padding, anywhere in a row. A document is a run of one segment id in one batch row;
    it also ends where `positions` does not increase.

    Call outside `jit` with lengths or concrete arrays, also in worker processes of a data loader:
    it then uses no device and does not initialize JAX. Or call inside `jit` or `shard_map` with
    traced arrays that every rank holds in full. Not differentiable.

    From lengths and concrete arrays, the plan moves few bytes, as `config` counts them, for a work
    of each rank of at most `1 + balance_tolerance` times the mean. Inputs are checked, and
    capacities default to what the plan needs, rounded up by at most 1/8 (or 8 blocks, or 8 ranges)
    so that similar batches share compiled programs. Constants inside `jit` count as concrete.

    Traced arrays are planned block by block. Negative segments are padding. An id with several runs
    in a batch row is not an error here, but attention with such a plan fails on all ranks.
    Capacities default to bounds that are always large enough: with T rows per rank, B batch rows
    and J blocks of a rank in one of them, `q_capacity` is 2 * T + block, `kv_capacity` is W * T,
    `max_q_transfers` is B * J, `max_kv_transfers` is B * (J + W - 1), or B * (J + 2 * (W - 1)) if
    queries see later keys, and `max_pieces` is `q_capacity`. If given capacities are too small,
    `Plan.fits` is false. The counts in the metadata then contain the true need, and
    `dispatch` fails on all ranks.

    Args:
      segment_ids: integers [B, columns] of any dtype; each rank holds an equal range of columns, in
        rank order.
      positions: integers of the same shape; None if segment ids alone separate the documents.
        Positions that you pass to attention are compared with these; None counts from 0.
      world_size: number of ranks W; must divide the columns.
      lengths: instead of segment ids: tokens of the documents, in order; one list per batch row, or
        one list for a single row. The rest of a row is padding.
      columns: with lengths only; tokens of a batch row, a multiple of W. None: the longest row,
        rounded up.
      mask: which keys a query sees, of `jax_cp_dispatch.masks`, with arrays `[B, columns]`. None:
        causal.
      config: block size, capacities, costs and balance tolerance.
      fallback: outside `jit`, "ring" returns, instead of an error for a batch that does not fit the
        config, a plan of the usual shapes that moves nothing. Its `fits` is false: use a ring for
        this batch. Needs all capacities. Inside `jit`, `fits` is false for such a plan anyway.
      rank: outside `jit`, returns the part of this rank alone, like `Plan.slice_of`, but
        without arrays of all ranks, whose counts of rows grow with W * W. It is the index on the
        mesh axis, not that of a process. None: all ranks.
    Returns:
      The plan for all ranks, the same in every process with the same inputs.
    Raises:
      TypeError: inputs are not integers, or `mask` is not a mask.
      ValueError: shapes do not match. With concrete inputs also: a segment id is negative, or
        occurs in separate runs of one batch row whose positions do not start again; a position
        exceeds 32 bits; or a capacity is too small and there is no fallback. Or the arrays of
        the mask have another shape.
    """
    mask = read_mask(_OP, mask)
    check_config(_OP, config)
    check_integer(_OP, "world_size", world_size)
    world_size = int(world_size)
    check_fallback(_OP, fallback, config, CAPACITIES)
    check_rank(_OP, rank, world_size)
    if segment_ids is not None and lengths is None:
        if isinstance(segment_ids, list | tuple):
            raise TypeError(
                f"{_OP}: segment_ids is of type {type(segment_ids).__name__}; it needs to be an "
                "array. Pass numpy.asarray(segment_ids), or document lengths as lengths=."
            )
        if columns is not None:
            raise ValueError(f"{_OP}: got columns without lengths. Omit columns.")
        grid = check_shapes(_OP, segment_ids, positions, world_size, config)
        check_mask_arrays(_OP, mask, segment_ids.shape)
        arrays = jax.tree.leaves((segment_ids, positions, mask))
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            check_traced(_OP, config)
            if rank is not None:
                raise ValueError(
                    f"{_OP}: rank is {rank} but the plan is made inside jit, by all ranks. Omit "
                    "rank, or plan outside jit."
                )
            return plan_inside(segment_ids, positions, grid=grid, mask=mask, config=config)
    documents = document_table(
        _OP,
        world_size=world_size,
        lengths=lengths,
        segment_ids=segment_ids,
        positions=positions,
        columns=columns,
    )
    shape = documents.batch, documents.columns
    mask = read_mask_on_host(_OP, mask, shape)
    check_document_mask(_OP, mask, documents)
    seen = seen_keys(mask, documents)
    request = PlanRequest(documents, positions, world_size, seen, config, rank)
    return plan_on_host(request, fallback=fallback)
