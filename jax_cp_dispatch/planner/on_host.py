"""Plans attention on the host, from the documents of a batch; NumPy and C++, without JAX."""

import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch._ranks.runtime import native
from jax_cp_dispatch.planner.attention_plan import AttentionPlan
from jax_cp_dispatch.planner.capacities import PlanConfig
from jax_cp_dispatch.planner.documents import Documents
from jax_cp_dispatch.planner.pieces import Pieces, Spans, lay_out, num_pairs
from jax_cp_dispatch.planner.runs import runs_of_pieces
from jax_cp_dispatch.planner.sizes import static_size
from jax_cp_dispatch.planner.stamp import ID_STEP, checksums_of_runs
from jax_cp_dispatch.planner.transfers import (
    list_transfers,
    metadata_of,
    num_sent,
    sums_of_ranks,
)


def plan_on_host(
    documents: Documents,
    stamp: Int32[np.ndarray, "W 3"],
    *,
    world_size: int,
    window: int | None,
    config: PlanConfig,
) -> AttentionPlan:
    """Returns the plan of a batch; costs time and memory in proportion to its pieces.

    Raises:
      ValueError: a capacity of the config is too small.
    """
    num_tokens = documents.num_tokens // world_size
    assigned = native.move_queries(
        np.ascontiguousarray(documents.lengths, np.int64),
        np.ascontiguousarray(documents.first % documents.columns, np.int64),
        num_ranks=world_size,
        columns_per_rank=documents.columns // world_size,
        window=min(window or 0, documents.columns),
        tolerance_ppm=round(1e6 * config.balance_tolerance),
        query_cost=2 * config.num_heads,
        key_cost=2 * config.num_kv_heads,
        min_queries=config.block,
    )
    pieces, spans = lay_out(assigned.astype(np.int64), window)  # nanobind says "long long"
    home = home_pieces(documents, world_size)
    computed = Spans(pieces.rank, pieces.document, pieces.start, pieces.end, pieces.row)
    queries, keys = (list_transfers(home, x) for x in (computed, spans))
    num_pieces = np.bincount(pieces.rank, minlength=world_size)
    rows = [sums_of_ranks(x.target, x.tokens, world_size) for x in (queries, keys)]
    sent = [num_sent(x, world_size) for x in (queries, keys)]

    def size(name: str, what: str, needs: Int[np.ndarray, " W"], least: int = 8) -> int:
        given = getattr(config, name)
        return static_size("plan_attention", "PlanConfig", name, what, needs, given, least)

    least = 8 * min(config.block, documents.columns // world_size)
    q_capacity = size("q_capacity", "would receive {} rows of queries", rows[0], least)
    kv_capacity = size("kv_capacity", "would receive {} rows of keys", rows[1], least)
    q_slots = size("max_q_transfers", "would send {} ranges of queries", sent[0])
    kv_slots = size("max_kv_transfers", "would send {} ranges of keys", sent[1])
    num_runs = size("max_pieces", "would compute {} pieces", num_pieces)
    needs = np.array([x.max() for x in (*rows, *sent, num_pieces)], np.int32)
    return AttentionPlan(
        q_metadata=metadata_of(queries, world_size=world_size, num_slots=q_slots),
        kv_metadata=metadata_of(keys, world_size=world_size, num_slots=kv_slots),
        **runs_of_pieces(pieces, num_pieces, num_runs=num_runs, num_rows=q_capacity),
        num_rows=rows[0].astype(np.int32),
        pairs_before=_pairs(home, window, world_size),
        pairs_after=_pairs(pieces, window, world_size),
        needs=np.tile(needs, (world_size, 1)),
        stamp=stamp,
        num_tokens=num_tokens,
        q_capacity=q_capacity,
        kv_capacity=kv_capacity,
        window=window,
    )


def home_pieces(documents: Documents, world_size: int) -> Pieces:
    """Returns the pieces at home, by document; their `origin` is that of the home's own rows."""
    number, start, end, rank, row = _at_home(
        documents.first, documents.lengths, documents, world_size
    )
    return Pieces(rank, number, start, end, row, row - start)


def checksums_of_lengths(documents: Documents, world_size: int) -> Int32[np.ndarray, " W"]:
    """Returns the checksums of the segment ids, from the runs of each id and of padding."""
    ids = documents.ids
    gaps, gap_lengths = documents.padding()
    first = np.concatenate([documents.first, gaps])
    lengths = np.concatenate([documents.lengths, gap_lengths])
    ids = np.concatenate([ids, np.zeros(len(gaps), np.int32)])
    number, _, _, rank, row = _at_home(first, lengths, documents, world_size)
    order = np.lexsort((row, rank))
    return checksums_of_runs(
        rank[order], row[order], ids[number[order]], step=ID_STEP, num_ranks=world_size
    )


def _at_home(
    first: Int[np.ndarray, " N"],
    lengths: Int[np.ndarray, " N"],
    documents: Documents,
    world_size: int,
) -> tuple[Int[np.ndarray, " P"], ...]:
    """Cuts ranges of tokens of the batch where a rank's columns end.

    Returns:
      Of each part: the number of its range, its start and end there, its rank, its row.
    """
    columns = documents.columns // world_size
    first_cell = first // columns  # cells of one rank in one batch row, in the order of tokens
    counts = np.where(lengths > 0, (first + lengths - 1) // columns - first_cell + 1, 0)
    number = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    cell = first_cell[number] + within
    begin = cell * columns - first[number]
    start, end = np.maximum(begin, 0), np.minimum(begin + columns, lengths[number])
    batch, rank = np.divmod(cell, world_size)
    return number, start, end, rank, batch * columns + start - begin


def _pairs(pieces: Pieces, window: int | None, world_size: int) -> np.ndarray:
    pairs = num_pairs(pieces.end, window) - num_pairs(pieces.start, window)
    return sums_of_ranks(pieces.rank, pairs, world_size).astype(np.float32)
