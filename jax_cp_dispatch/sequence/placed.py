"""The pieces of placed order, from the plan of a placement."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._scans import running_max
from jax_cp_dispatch.documents.fingerprint import rank_fingerprint
from jax_cp_dispatch.planner import Plan
from jax_cp_dispatch.planner.runs import local_runs
from jax_cp_dispatch.planner.stack import is_stack
from jax_cp_dispatch.sequence.options import Options
from jax_cp_dispatch.sequence.pieces import Cuts, Pieces


def pieces_of_plan(
    options: Options, plan: Plan, documents: tuple[Any, Any], shape: tuple[int, ...]
) -> Pieces:
    """Returns the pieces of this rank's rows [B, T] in placed order."""
    _check(options, plan, shape)
    axis = options.exchange.axis_name
    rank = jax.lax.axis_index(axis)
    runs, size = local_runs(plan, rank), plan.num_tokens
    row, first = jnp.arange(size, dtype=jnp.int32), jnp.asarray(runs.row)
    begin = running_max(jnp.zeros(size, jnp.int32).at[first].max(first, mode="drop"))
    begin = jnp.where(row < runs.num_rows, begin, -1)[None]
    (begin,) = vary_alike([begin], also=options.exchange.axis_names)
    table = jnp.asarray(plan.cut_pieces)
    table = table[0 if table.shape[0] == 1 else rank]
    document, start, length, first_row, rest, *where = jnp.moveaxis(table, -1, 0)
    cuts = Cuts(document, start, length, first_row, *where)
    return Pieces(
        begin=begin,
        later=cuts._replace(document=jnp.where(start > 0, document, -1)),
        earlier=cuts._replace(document=jnp.where(rest > 0, document, -1)),
        rank=rank,
        fingerprint=rank_fingerprint(plan.fingerprint, rank, *documents),
        batch=shape[0],
        num_tokens=shape[1],
        world_size=plan.world_size,
        num_slots=plan.max_cut_pieces,
        chains=(1, len(table)),
        min_tokens=1,
    )


def _check(options: Options, plan: Plan, shape: tuple[int, ...]) -> None:
    op = options.op
    if is_stack(plan):
        raise ValueError(
            f"{op}: got stacked plans, of {list(plan.fingerprint.shape[:-2])}. Pass one of them, "
            "as jax.lax.scan over them does."
        )
    num_tokens = shape[0] * shape[1]
    if num_tokens != plan.num_tokens or shape[0] != plan.batch:
        raise ValueError(
            f"{op}: a rank holds {shape[0]} x {shape[1]} rows but the plan is for {plan.batch} x "
            f"{plan.num_tokens // plan.batch}. Place the tokens of this batch."
        )
    num_ranks = jax.lax.axis_size(options.axis_name)
    if plan.world_size != num_ranks:
        raise ValueError(
            f"{op}: the plan is for world_size={plan.world_size} but axis "
            f"{options.axis_name!r} has {num_ranks} devices. Place the tokens again."
        )
