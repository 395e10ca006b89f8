"""Plans attention on the host, from the documents of a batch; NumPy and C++, without JAX."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch._ranks.runtime import native
from jax_cp_dispatch.planning.config import CAPACITIES, check_ranks
from jax_cp_dispatch.planning.fallback import fallback_plan
from jax_cp_dispatch.planning.piece_table import PieceTable, Spans, home_pieces, lay_out
from jax_cp_dispatch.planning.pieces_fingerprint import pieces_fingerprint
from jax_cp_dispatch.planning.plan import Plan
from jax_cp_dispatch.planning.request import (
    DoesNotFitError,
    PlanRequest,
    check_longest_keys,
    check_mean_queries,
    native_problem,
    static_size,
)
from jax_cp_dispatch.planning.runs import list_runs, row_ranges
from jax_cp_dispatch.planning.transfers import (
    Transfers,
    list_transfers,
    make_metadata,
    num_sent,
    rank_sums,
)

_OP = "plan_attention"


class _Moves(NamedTuple):
    """What ranks compute, its keys, what moves, and the needs in the order of `CAPACITIES`."""

    pieces: PieceTable
    spans: Spans
    queries: Transfers
    keys: Transfers
    needs: Int[np.ndarray, "5 W"]


def plan_on_host(request: PlanRequest, *, fallback: str | None) -> Plan:
    """Returns the plan of a batch, or its part of one rank.

    Costs time and memory in proportion to the pieces, and for all ranks W * W counts of rows.

    Raises:
      DoesNotFitError: a capacity of the config is too small, and there is no fallback.
    """
    documents, config, world_size = request.documents, request.config, request.world_size
    check_ranks(_OP, config, world_size)
    home = home_pieces(documents, world_size)
    moves = _moves(request, home)
    needs = moves.needs.max(1).astype(np.int32)
    try:
        check_longest_keys(_OP, request)
        check_mean_queries(_OP, config, int(documents.lengths.sum()), world_size)
        q, kv, q_slots, kv_slots, num_runs = _sizes(request, moves.needs)
    except DoesNotFitError as error:
        # The search under capacities gives up balance, so its own needs would mislead.
        free = dataclasses.replace(config, q_capacity=None, kv_capacity=None)
        needs = _moves(request._replace(config=free), home).needs.max(1).astype(np.int32)
        if fallback is None:
            sizes = (f"{name}={need}" for name, need in zip(CAPACITIES, needs, strict=True))
            raise DoesNotFitError(
                f"{error} The plan with the best balance needs {', '.join(sizes)}."
            ) from None
        return fallback_plan(request, needs, is_placed=False)
    pieces, held = moves.pieces, request.held
    in_order = request.mask if request.mask.has_arrays else None
    of_ranks = {"world_size": world_size, "rank": request.rank}
    lengths = documents.lengths if request.needs_lengths else None
    runs: Any = {"num_runs": num_runs, "num_rows": q, "lengths": lengths, "rank": request.rank}
    of_runs: dict[str, Any] = list_runs(pieces, moves.needs[-1], **runs)
    return Plan(
        q_metadata=make_metadata(moves.queries, num_slots=q_slots, **of_ranks),
        kv_metadata=make_metadata(moves.keys, num_slots=kv_slots, **of_ranks),
        **of_runs,
        ranges=row_ranges(request, pieces, moves.spans, num_queries=q, num_keys=kv),
        num_rows=moves.needs[0, held].astype(np.int32),
        pairs_before=request.pairs(home),
        pairs=request.pairs(pieces),
        largest_needs=np.tile(needs, (world_size, 1))[held],
        fingerprint=pieces_fingerprint(request, pieces, home, in_order)[held],
        num_tokens=request.num_tokens,
        batch=documents.batch,
        q_capacity=q,
        kv_capacity=kv,
        mask=request.mask.kind,
    )


def _moves(request: PlanRequest, home: PieceTable) -> _Moves:
    documents, config, world_size = request.documents, request.config, request.world_size
    problem = native_problem(
        native.QueryProblem,
        request,
        {
            "columns": (documents.first % documents.columns).tolist(),
            "columns_per_rank": documents.columns // world_size,
            "query_cost": config.query_cost,
            "key_cost": config.key_cost,
            "max_queries": config.q_capacity,
            "max_keys": config.kv_capacity,
            "wanted_piece": config.rows_per_block,
        },
    )
    assigned = native.move_queries(problem)
    pieces, spans = lay_out(assigned.astype(np.int64), request.seen)
    computed = Spans(pieces.rank, pieces.document, pieces.start, pieces.end, pieces.row)
    queries, keys = (list_transfers(home, x) for x in (computed, spans))
    needs = (
        *(rank_sums(x.target, x.tokens, world_size) for x in (queries, keys)),
        *(num_sent(x, world_size) for x in (queries, keys)),
        np.bincount(pieces.rank, minlength=world_size),
    )
    return _Moves(pieces, spans, queries, keys, np.stack(needs))


def _sizes(request: PlanRequest, needs: Int[np.ndarray, "5 W"]) -> list[int]:
    """Returns the static sizes, in the order of `CAPACITIES`."""
    config, columns = request.config, request.documents.columns // request.world_size
    rows = 8 * min(config.rows_per_block, columns), request.documents.num_tokens
    sizes: Any = (
        ("q_capacity", "would receive {} rows of queries", *rows),
        ("kv_capacity", "would receive {} rows of keys", *rows),
        ("max_q_transfers", "would send {} ranges of queries", 8),
        ("max_kv_transfers", "would send {} ranges of keys", 8),
        ("max_pieces", "would compute {} pieces", 8),
    )
    return [
        static_size(_OP, config, name, what, need, *step)
        for (name, what, *step), need in zip(sizes, needs, strict=True)
    ]
