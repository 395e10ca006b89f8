"""Rows that move between ranks, as ranges; and their metadata, with one slot per range."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning.piece_table import PieceTable, Spans


class Transfers(NamedTuple):
    """Ranges of rows that move from one rank to another, in the order of the receivers' rows.

    NumPy on the host. Inside `jit`, unused entries have source and target W, and no tokens.
    """

    source: Int[Any, " X"]
    target: Int[Any, " X"]
    source_row: Int[Any, " X"]
    target_row: Int[Any, " X"]
    tokens: Int[Any, " X"]


def list_transfers(pieces: PieceTable, spans: Spans) -> Transfers:
    """Returns the longest ranges that spans take from the rows of one rank."""
    order = np.lexsort((pieces.start, pieces.document))
    by_place = PieceTable._make(x[order] for x in pieces)
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


def num_sent(transfers: Transfers, world_size: int) -> Int[np.ndarray, " W"]:
    """Returns the number of ranges that each rank sends."""
    return np.bincount(transfers.source, minlength=world_size)


def make_metadata(
    transfers: Transfers, *, world_size: int, num_slots: int, rank: int | None = None
) -> Metadata:
    """Returns forward metadata; `num_slots` is at least `num_sent` of each rank.

    With `rank`, all arrays have a leading axis of size 1, for that rank. So there is no array of
    size W * W, or of all slots.
    """
    part = rank_slice(rank)
    counts = num_sent(transfers, world_size)
    held = counts[part].astype(np.int32)
    order = order_by_rank(transfers.source, rank)
    source = transfers.source[order] - (rank or 0)
    index = source, number_on_rank(source, held)

    def by_slot(values, fill, dtype):
        out = np.full((len(held), num_slots), fill, dtype)
        out[index] = values[order]
        return out

    totals = rank_sums(transfers.target, transfers.tokens, world_size)
    totals = totals[part].astype(np.uint32)
    received = np.zeros((len(totals), world_size + 1), np.uint32)
    is_here = slice(None) if rank is None else transfers.target == rank
    to, by = transfers.target[is_here] - (rank or 0), transfers.source[is_here]
    np.add.at(received, (to, by), transfers.tokens[is_here].astype(np.uint32))
    received[:, -1] = totals
    return Metadata(
        dst_rank=by_slot(transfers.target, -1, np.int32),
        dst_offset=by_slot(transfers.target_row, 0, np.uint32),
        seq_len=by_slot(transfers.tokens, 0, np.uint32),
        src_offset=by_slot(transfers.source_row, 0, np.uint32),
        num_recv_tokens=received,
        num_seqs=held,
        num_total_recv_tokens=totals,
        world_size=world_size,
    )


def number_on_rank(
    rank: Int[np.ndarray, " N"], counts: Int[np.ndarray, " W"]
) -> Int[np.ndarray, " N"]:
    """Returns the number of earlier entries of the same rank; entries are sorted by rank."""
    return np.arange(len(rank)) - (np.cumsum(counts) - counts)[rank]


def rank_sums(
    rank: Int[np.ndarray, " N"], values: Int[np.ndarray, " N"], world_size: int
) -> Int[np.ndarray, " W"]:
    out = np.zeros(world_size, np.int64)
    np.add.at(out, rank, values)
    return out


def num_moved(op: str, metadata: Metadata, ranks_per_node: int = 1) -> int:
    """Returns the rows that move between nodes, by default between ranks; each copy counts.

    Of stacked plans, the sum. Read outside `jit`.

    Raises:
      ValueError: this is one rank's part of a plan.
    """
    received = np.asarray(metadata.num_recv_tokens)[..., :-1]
    held, world_size = received.shape[-2:]
    check_all_ranks(op, held, world_size)
    node = np.arange(world_size) // ranks_per_node
    stays = node[:, None] == node
    return int(received.sum(dtype=np.int64) - received[..., stays].sum(dtype=np.int64))


def check_rank(op: str, rank: int | None, world_size: int) -> None:
    if rank is None:
        return
    check_integer(op, "rank", rank)
    if not 0 <= rank < world_size:
        raise ValueError(f"{op}: rank is {rank}; it needs to be in [0, {world_size}), or None.")


def check_all_ranks(op: str, held: int, world_size: int) -> None:
    """Requires what depends on all ranks."""
    if held != world_size:
        raise ValueError(
            f"{op}: this is the part of {held} of {world_size} ranks. Call it on the plan, "
            "placement or routing of all ranks."
        )


def rank_slice(rank: int | None) -> slice:
    """Returns the slice of a leading axis over ranks that keeps one rank, or all."""
    return slice(None) if rank is None else slice(rank, rank + 1)


def order_by_rank(ranks: Int[np.ndarray, " N"], rank: int | None) -> Int[np.ndarray, " M"]:
    """Returns the indices of the entries of one rank, or of all, one rank after another."""
    return np.argsort(ranks, kind="stable") if rank is None else np.flatnonzero(ranks == rank)
