"""Computes each rank's rows, received keys and their senders from the pieces it holds."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.plan import PlacedPlan


class Pieces(NamedTuple):
    """Tokens [start, end) of documents, in the order of the ranks' rows; `row` is local to a rank.

    `origin` is the received row where the document starts, or would start.
    """

    rank: Int[np.ndarray, " P"]
    document: Int[np.ndarray, " P"]
    start: Int[np.ndarray, " P"]
    end: Int[np.ndarray, " P"]
    row: Int[np.ndarray, " P"]
    origin: Int[np.ndarray, " P"]


class Spans(NamedTuple):
    """Contiguous keys [start, end) of a document on a rank, in received order."""

    rank: Int[np.ndarray, " G"]
    document: Int[np.ndarray, " G"]
    start: Int[np.ndarray, " G"]
    end: Int[np.ndarray, " G"]
    row: Int[np.ndarray, " G"]


class Transfers(NamedTuple):
    """Rows that move from one rank to another, in the order of the receivers' rows."""

    source: Int[np.ndarray, " X"]
    target: Int[np.ndarray, " X"]
    source_row: Int[np.ndarray, " X"]
    target_row: Int[np.ndarray, " X"]
    tokens: Int[np.ndarray, " X"]


def lay_out(assigned: Int[np.ndarray, "P 4"], window: int | None) -> tuple[Pieces, Spans]:
    """Lays out pieces, given as sorted rows (rank, document, start, end), in rows of ranks.

    Cut documents come first on each rank. All its whole documents and the last cut one are then one
    range of its own rows, and one range of its received rows.
    """
    rank, document, start, end = assigned.T
    earliest = np.zeros_like(start) if window is None else np.maximum(start - (window - 1), 0)
    # Adjacent keys of two pieces of a document form one span.
    new = np.ones(len(assigned), bool)
    new[1:] = (np.diff(rank) != 0) | (np.diff(document) != 0) | (earliest[1:] > end[:-1])
    first = np.flatnonzero(new)
    span = np.cumsum(new) - 1
    span_end = end[np.append(first[1:], len(new)) - 1] if len(new) else end
    size = span_end - earliest[first]
    own = np.add.reduceat(end - start, first) if len(new) else size

    order = np.lexsort((np.arange(len(first)), size == own, rank[first]))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    row = np.empty_like(size)
    row[order] = _before(size[order], rank[first][order])
    columns = (rank[first], document[first], earliest[first], span_end, row)
    spans = Spans._make(x[order] for x in columns)

    piece_order = np.argsort(place[span], kind="stable")
    rank, document, start, end = assigned[piece_order].T
    origin = (row - earliest[first])[span][piece_order]
    pieces = Pieces(rank, document, start, end, _before(end - start, rank), origin)
    return pieces, spans


def _before(size: Int[np.ndarray, " N"], rank: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Returns the sum of the sizes before each entry on its rank; entries are sorted by rank."""
    before = np.cumsum(size) - size
    first = np.searchsorted(rank, rank, side="left")
    return before - before[first]


def list_transfers(pieces: Pieces, spans: Spans) -> Transfers:
    """Returns the longest ranges that spans take from rows of one rank."""
    order = np.lexsort((pieces.start, pieces.document))
    by_place = Pieces._make(x[order] for x in pieces)
    longest = int(pieces.end.max(initial=0)) + 1
    key = by_place.document * longest + by_place.start
    first = np.searchsorted(key, spans.document * longest + spans.start, side="right") - 1
    count = np.searchsorted(key, spans.document * longest + spans.end, side="left") - first
    span = np.repeat(np.arange(len(count)), count)
    source = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first, count)

    start = np.maximum(by_place.start[source], spans.start[span])
    end = np.minimum(by_place.end[source], spans.end[span])
    source_row = by_place.row[source] + start - by_place.start[source]
    target_row = spans.row[span] + start - spans.start[span]
    source, target, tokens = by_place.rank[source], spans.rank[span], end - start

    follows = np.zeros(len(tokens), bool)
    follows[1:] = (
        (np.diff(source) == 0)
        & (np.diff(target) == 0)
        & (np.diff(source_row) == tokens[:-1])
        & (np.diff(target_row) == tokens[:-1])
    )
    first = np.flatnonzero(~follows)
    tokens = np.add.reduceat(tokens, first) if len(first) else tokens
    source, target, source_row, target_row = (
        x[first] for x in (source, target, source_row, target_row)
    )
    return Transfers(source, target, source_row, target_row, tokens)


def build_plan(
    pieces: Pieces,
    spans: Spans,
    *,
    world_size: int,
    num_tokens: int,
    window: int | None,
    config: PlacementConfig,
) -> PlacedPlan:
    """Builds the plan: the placement as arrays of static size."""
    transfers = list_transfers(pieces, spans)
    metadata = _metadata(transfers, world_size, config)
    counts = np.bincount(pieces.rank, minlength=world_size)
    width = _bounded("max_pieces", "would hold {} pieces", counts, config.max_pieces, 8)
    index = pieces.rank, np.arange(len(pieces.rank)) - _first_of(counts)[pieces.rank]

    def by_rank(values, fill):
        out = np.full((world_size, width), fill, np.int32)
        out[index] = values
        return out

    tokens = pieces.end - pieces.start
    received = np.asarray(metadata.num_total_recv_tokens, np.int64)
    capacity = _bounded("kv_capacity", "would receive {} rows", received, config.kv_capacity, 1024)
    pairs = _pairs(pieces.end, window) - _pairs(pieces.start, window)
    return PlacedPlan(
        kv_metadata=metadata,
        run_row=by_rank(pieces.row, num_tokens),
        run_position=by_rank(pieces.start, 0),
        run_origin=by_rank(pieces.origin, 0),
        num_rows=_sums(pieces.rank, tokens, world_size).astype(np.int32),
        pairs=_sums(pieces.rank, pairs, world_size).astype(np.float32),
        num_tokens=num_tokens,
        kv_capacity=capacity,
        window=window,
    )


def _metadata(transfers: Transfers, world_size: int, config: PlacementConfig) -> Metadata:
    counts = np.bincount(transfers.source, minlength=world_size)
    what = "would send {} ranges of keys"
    width = _bounded("max_transfers", what, counts, config.max_transfers, 8)
    order = np.argsort(transfers.source, kind="stable")
    source = transfers.source[order]
    index = source, np.arange(len(source)) - _first_of(counts)[source]

    def by_slot(values, fill, dtype):
        out = np.full((world_size, width), fill, dtype)
        out[index] = values[order]
        return out

    received = np.zeros((world_size, world_size + 1), np.uint32)
    np.add.at(received, (transfers.target, transfers.source), transfers.tokens.astype(np.uint32))
    totals = _sums(transfers.target, transfers.tokens, world_size)
    received[:, -1] = totals
    return Metadata(
        dst_rank=by_slot(transfers.target, -1, np.int32),
        dst_offset=by_slot(transfers.target_row, 0, np.uint32),
        seq_len=by_slot(transfers.tokens, 0, np.uint32),
        src_offset=by_slot(transfers.source_row, 0, np.uint32),
        num_recv_tokens=received,
        num_seqs=counts.astype(np.int32),
        num_total_recv_tokens=totals.astype(np.uint32),
        world_size=world_size,
    )


def _bounded(name: str, what: str, needs: np.ndarray, given: int | None, least: int) -> int:
    """Returns the given bound if sufficient; by default the need, rounded up to share programs."""
    need, rank = int(needs.max()), int(needs.argmax())
    if given is None:
        step = max(least, 1 << max(need.bit_length() - 4, 0))
        return max(-(-need // step), 1) * step
    if given < need:
        raise ValueError(
            f"place_tokens: rank {rank} {what.format(need)} but {name} is {given}. Pass "
            f"{name}>={need} or None in PlacementConfig."
        )
    return given


def _first_of(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _sums(rank: np.ndarray, values: np.ndarray, world_size: int) -> np.ndarray:
    out = np.zeros(world_size, np.int64)
    np.add.at(out, rank, values)
    return out


def _pairs(end: Int[np.ndarray, " P"], window: int | None) -> Int[np.ndarray, " P"]:
    """Returns the query-key pairs of a document's queries before `end`."""
    full = end if window is None else np.minimum(end, window)
    return full * (full + 1) // 2 + (end - full) * (0 if window is None else window)
