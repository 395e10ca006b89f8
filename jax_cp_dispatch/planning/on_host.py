"""Plans attention on the host, from the documents of a batch; NumPy and C++, without JAX."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.core
import numpy as np
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._arguments import check_integer, check_type
from jax_cp_dispatch._ranks.runtime import native
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import check_document_mask
from jax_cp_dispatch.documents.fingerprint import fallback_fingerprint
from jax_cp_dispatch.documents.segment_ids import check_ids
from jax_cp_dispatch.documents.table import Row, check_table_sizes, document_table, list_documents
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.read import read_mask, read_mask_on_host
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning.config import (
    CAPACITIES,
    PLACED_CAPACITIES,
    PlanConfig,
    check_fallback,
    check_ranks,
)
from jax_cp_dispatch.planning.inside_jit import plan_inside
from jax_cp_dispatch.planning.plan import Plan
from jax_cp_dispatch.planning.request import (
    DoesNotFitError,
    PlannedPieces,
    PlanRequest,
    by_slot,
    check_longest_keys,
    check_rank,
    home_pieces,
    lay_out,
    list_transfers,
    make_metadata,
    native_problem,
    pieces_fingerprint,
    rank_sums,
    read_layers,
    static_sizes,
)
from jax_cp_dispatch.planning.runs import cut_pieces, cut_table, row_ranges

_OP = "plan_attention"


# What a rank would do that exceeds a capacity, of a plan that moves queries, and of a placement.
_ACTIONS = {
    "q_capacity": "would receive {} rows of queries",
    "kv_capacity": "would receive {} rows of keys",
    "max_q_transfers": "would send {} ranges of queries",
    "max_kv_transfers": "would send {} ranges of keys",
    "max_pieces": "would compute {} pieces",
}
_PLACED_ACTIONS = {
    "max_kv_transfers": "would send {} ranges of keys",
    "max_pieces": "would hold {} pieces",
    "kv_capacity": "would receive {} rows",
    "max_cut_pieces": "would hold {} pieces of cut documents",
    "max_linked_pieces": "would share cut documents with {} pieces on other ranks",
}


def _make_plan(
    request: PlanRequest,
    pieces: PlannedPieces,
    spans: PlannedPieces,
    in_order: Mask | None,
    *,
    is_placed: bool,
) -> Plan:
    """Returns a plan, or its part of one rank.

    Costs time and memory in proportion to the pieces, and for all ranks W * W counts of rows.
    `pieces` are what ranks compute and `spans` its keys; see `lay_out`. `in_order` is a mask with
    arrays, in the order of the rows that ranks pass to attention; if `is_placed`, these are the
    pieces, so that queries stay. Raises DoesNotFitError if a capacity of the config is too small.
    """
    documents, config, num_ranks = request.documents, request.config, request.num_ranks
    home = home_pieces(documents, num_ranks)
    held = pieces if is_placed else home
    keys = list_transfers(held, spans)
    of_ranks: Any = {"num_ranks": num_ranks, "rank": request.rank}
    counts = lambda ranks: np.bincount(ranks, minlength=num_ranks)
    num_keys = rank_sums(keys.target, keys.tokens, num_ranks)
    of_pieces = counts(keys.source), counts(pieces.rank)
    q_metadata, table = None, None
    if is_placed:
        cut = cut_pieces(pieces, documents.lengths, num_ranks)
        values = num_keys, *of_pieces, cut.held, cut.linked
        needs = dict(zip(PLACED_CAPACITIES, values, strict=True))
        steps = {"kv_capacity": 1024, "max_cut_pieces": 4, "max_linked_pieces": 4}
        sizes = static_sizes("place_tokens", request, needs, _PLACED_ACTIONS, steps)
        q_capacity, least = request.num_tokens, 1
        num_cuts, num_linked = sizes["max_cut_pieces"], sizes["max_linked_pieces"]
        table = cut_table(cut, request.held, num_slots=num_cuts, num_linked=num_linked)
    else:
        queries = list_transfers(home, pieces)
        num_queries = rank_sums(queries.target, queries.tokens, num_ranks)
        values = num_queries, num_keys, counts(queries.source), *of_pieces
        needs: dict[str, np.ndarray] = dict(zip(CAPACITIES, values, strict=True))
        of_blocks = 8 * min(config.rows_per_block, documents.columns // num_ranks)
        steps = {"q_capacity": of_blocks, "kv_capacity": of_blocks}
        sizes = static_sizes(_OP, request, needs, _ACTIONS, steps)
        q_capacity, least, num_cuts = sizes["q_capacity"], 0, 0
        q_metadata = make_metadata(queries, num_slots=sizes["max_q_transfers"], **of_ranks)
    zero = np.int32(0)
    of_runs = {
        "run_row": (pieces.row, np.int32(q_capacity)),
        "run_position": (pieces.start, zero),
        "run_origin": (pieces.origin, zero),
    }
    reads_lengths = isinstance(request.seen, StaticMask) and not request.mask.is_causal
    if is_placed or reads_lengths:
        of_runs["run_length"] = documents.lengths[pieces.document], zero
    runs: Any = by_slot(pieces.rank, of_runs, num_slots=sizes["max_pieces"], **of_ranks)
    num_rows = rank_sums(pieces.rank, pieces.end - pieces.start, num_ranks)[request.held]
    largest = np.array([x.max(initial=least) for x in needs.values()], np.int32)
    rows = {"num_queries": q_capacity, "num_keys": sizes["kv_capacity"]}
    return Plan(
        q_metadata=q_metadata,
        kv_metadata=make_metadata(keys, num_slots=sizes["max_kv_transfers"], **of_ranks),
        **runs,
        cut_pieces=table,
        ranges=row_ranges(request, pieces, spans, **rows),
        num_rows=num_rows.astype(np.int32),
        pairs_before=request.pairs(home),
        pairs=request.pairs(pieces),
        largest_needs=np.tile(largest, (len(num_rows), 1)),
        fingerprint=pieces_fingerprint(request, pieces, held, in_order)[request.held],
        num_tokens=request.num_tokens,
        batch=documents.batch,
        q_capacity=q_capacity,
        kv_capacity=sizes["kv_capacity"],
        max_cut_pieces=num_cuts,
        mask=request.mask.kind,
    )


def fallback_plan(request: PlanRequest, needs: Int32[np.ndarray, " 5"], *, is_placed: bool) -> Plan:
    """Returns a plan with `fits` false, of the shapes of all plans with this config.

    It moves nothing, and nothing may follow it. Its metadata announces the rows that the batch
    needs, so if attention uses it nevertheless, the error names them: those of the best balance, as
    in `Plan.largest_needs`.
    """
    nothing, num_held = PlannedPieces(*np.zeros((6, 0), np.int64)), len(request.held)
    plan = _make_plan(request, nothing, nothing, None, is_placed=is_placed)
    needed = dict(zip(plan.capacities, needs, strict=True))

    def announce(metadata: Metadata, need: np.integer) -> Metadata:
        received = np.zeros_like(metadata.num_recv_tokens)
        received[:, [0, -1]] = need
        total = received[:, -1].copy()
        return dataclasses.replace(metadata, num_recv_tokens=received, num_total_recv_tokens=total)

    # All queries see the key in row 0, and each key has all queries.
    edges = zip(plan.ranges or (), (0, 1, 0, np.iinfo(np.int32).max), strict=False)
    ranges = [x if x is None else np.full_like(x, edge) for x, edge in edges]
    return dataclasses.replace(
        plan,
        q_metadata=None if is_placed else announce(plan.q_metadata, needed["q_capacity"]),
        kv_metadata=announce(plan.kv_metadata, needed["kv_capacity"]),
        ranges=MaskRanges(*ranges) if ranges else None,
        num_rows=np.full(num_held, -1, np.int32),
        pairs=plan.pairs_before,
        largest_needs=np.tile(needs, (num_held, 1)),
        fingerprint=fallback_fingerprint(num_held, request.mask),
    )


def _plan_on_host(request: PlanRequest, *, fallback: str | None) -> Plan:
    """Returns the plan of a batch, or its part of one rank.

    Raises:
      DoesNotFitError: a capacity of the config is too small, and there is no fallback.
    """
    config, num_ranks = request.config, request.num_ranks
    check_ranks(_OP, config, num_ranks)
    none: dict[str, Any] = dict.fromkeys(CAPACITIES)
    free = request
    if set(attrgetter(*CAPACITIES)(config)) != {None}:
        free = request._replace(config=dataclasses.replace(config, **none))
    in_order = request.mask if request.mask.has_arrays else None
    plan_of = partial(_make_plan, in_order=in_order, is_placed=False)
    best = _move_queries(free)
    try:  # first the plan with the best balance: a search under capacities gives balance up
        return plan_of(request, *best)
    except DoesNotFitError:
        pass
    try:
        check_longest_keys(_OP, request)
        num_queries = int(request.documents.lengths.sum())
        mean = -(-num_queries // num_ranks)
        if config.q_capacity is not None and config.q_capacity < mean:
            raise DoesNotFitError(
                f"{_OP}: {num_queries} queries are computed by {num_ranks} ranks, so a rank "
                f"receives at least {mean} of them, but q_capacity is {config.q_capacity}. Pass "
                f"q_capacity>={mean} or None in PlanConfig."
            )
        return plan_of(request, *_move_queries(request))
    except DoesNotFitError as error:
        needs = np.asarray(plan_of(free, *best).largest_needs)[0]
        if fallback is None:
            needed = (f"{name}={need}" for name, need in zip(CAPACITIES, needs, strict=True))
            raise DoesNotFitError(
                f"{error} The plan with the best balance needs {', '.join(needed)}."
            ) from None
        return fallback_plan(request, needs, is_placed=False)


def _move_queries(request: PlanRequest) -> tuple[PlannedPieces, PlannedPieces]:
    """Returns the pieces that each rank computes, by `csrc/planner`, and their keys."""
    documents, config = request.documents, request.config
    limits: dict[str, Any] = {
        "columns": (documents.first % documents.columns).tolist(),
        "columns_per_rank": documents.columns // request.num_ranks,
        "query_cost": config.query_cost,
        "key_cost": config.key_cost,
        "max_queries": config.q_capacity,
        "max_keys": config.kv_capacity,
        "wanted_piece": config.rows_per_block,
    }
    if config.hardware is not None:
        rows = config.query_cost * sum(request.layers)
        limits["query_time"] = config.row_times(rows, request.num_ranks)
    requests = (request, *request.beside)
    problem = native_problem(native.QueryProblem, requests, limits, request.layers)
    return lay_out(native.move_queries(problem).astype(np.int64), request)


def plan_placed(request: PlanRequest, held: PlannedPieces, in_order: Mask | None) -> Plan:
    """Returns the plan of one mask for pieces in their rows, which are the same for all masks.

    With `request.rank`, the plan is the part of that rank. `in_order` is a mask with arrays, in
    placed order; None for others.
    """
    order = np.lexsort((held.start, held.document, held.rank))
    assigned = np.stack([held.rank, held.document, held.start, held.end], axis=1)[order]
    return _make_plan(request, *lay_out(assigned, request, held), in_order, is_placed=True)


# ---- `plan_attention`: plans attention of packed documents, on the host or inside a program.


def plan_attention(
    segment_ids: Shaped[Array | np.ndarray, "..."] | None = None,
    positions: Shaped[Array | np.ndarray, "..."] | None = None,
    *,
    world_size: int,
    lengths: Iterable[Row] | Row | None = None,
    columns: int | None = None,
    mask: Mask | str | None = None,
    masks: Sequence[Mask | str] | None = None,
    layers: Sequence[int | float | np.number] | None = None,
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
      masks, layers: outside `jit`, instead of one mask, as for `place_tokens`: the work is the
        weighted sum of their pairs, as in `Plan.pairs`. The plan is for the first one; pass the one
        with the most keys first.
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
        exceeds 32 bits; a capacity is too small and there is no fallback; or the arrays of
        the mask have another shape.
    """
    given, weights = [mask], (1,)
    if masks is not None or layers is not None:
        given, weights = read_layers(_OP, mask, masks, layers)
    mask = read_mask(_OP, given[0])
    check_type(_OP, "config", config, PlanConfig, "Omit it for the default.")
    check_integer(_OP, "world_size", world_size)
    world_size = int(world_size)
    check_fallback(_OP, fallback, config, CAPACITIES)
    check_rank(_OP, rank, world_size)
    if segment_ids is not None and lengths is None:
        if columns is not None:
            raise ValueError(f"{_OP}: got columns without lengths. Omit columns.")
        check_ids(_OP, segment_ids, positions)  # refuses lists, which are rather lengths
        arrays = jax.tree.leaves((segment_ids, positions, mask))
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            if masks is not None:
                raise ValueError(
                    f"{_OP}: got masks, but the plan is made inside jit. Pass mask, or plan "
                    "outside jit."
                )
            if rank is not None:
                raise ValueError(
                    f"{_OP}: rank is {rank} but the plan is made inside jit, by all ranks. Omit "
                    "rank, or plan outside jit."
                )
            options = {"num_ranks": world_size, "mask": mask, "config": config}
            return plan_inside(segment_ids, positions, **options)
    documents = document_table(
        _OP,
        world_size=world_size,
        lengths=lengths,
        segment_ids=segment_ids,
        positions=positions,
        columns=columns,
    )
    request = PlanRequest(documents, positions, world_size, config, rank)
    requests = []
    for each in given:
        read = read_mask_on_host(_OP, each, (documents.batch, documents.columns))
        check_document_mask(_OP, read, documents)
        requests.append(request.with_mask(read))
    request = requests[0]._replace(beside=tuple(requests[1:]), layers=weights)
    return _plan_on_host(request, fallback=fallback)


def plan_read(documents: Documents, num_ranks: int, config: PlanConfig) -> Plan:
    """`plan_attention` of documents that `read_whole` has read, with their mask, on the host."""
    table = list_documents(documents.segment_ids, documents.positions)
    check_table_sizes(_OP, table, num_ranks)
    request = PlanRequest(table, documents.positions, num_ranks, config, None)
    mask = jax.tree.map(np.asarray, documents.mask)
    return _plan_on_host(request.with_mask(mask), fallback=None)
