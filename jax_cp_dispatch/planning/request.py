"""What a plan on the host is made of, as a whole, also for C++; and whether it fits its config."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float32, Int, Int32

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.documents.fingerprint import (
    ID_STEP,
    POSITION_STEP,
    make_fingerprint,
    mask_checksums,
    plan_digest,
    run_checksums,
)
from jax_cp_dispatch.documents.segment_ids import Ids
from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning.config import PlanConfig
from jax_cp_dispatch.planning.seen_keys import SeenKeys, seen_keys

# ---- `Pieces`: parts of documents on ranks, at home and laid out in rows, and their keys.


class Pieces(NamedTuple):
    """Tokens [start, end) of documents, in the order of the ranks' rows; `row` is local to a rank.

    `origin` is the received row where the document starts, or would start; None if nothing asks.
    """

    rank: Int[np.ndarray, " P"]
    document: Int[np.ndarray, " P"]
    start: Int[np.ndarray, " P"]
    end: Int[np.ndarray, " P"]
    row: Int[np.ndarray, " P"]
    origin: Any = None

    def take(self, index: Any) -> "Pieces":
        """Returns these of the pieces."""
        taken: Any = (x if x is None else x[index] for x in self)
        return Pieces(*taken)


def lay_out(
    assigned: Int[np.ndarray, "P 4"], seen: SeenKeys, held: Pieces | None = None
) -> tuple[Pieces, Pieces]:
    """Lays out pieces, given as sorted rows (rank, document, start, end), in rows of ranks.

    Also returns their keys, in received order: for a static mask, those of pieces that share keys
    are one range. If a query may see keys of several ranges (`seen.table`), those of a document are
    adjacent rows; keys between them, which no query of the rank sees, are not sent, and `origin`
    has no meaning.

    Cut documents come first on each rank. All its whole documents and the last cut one are then one
    range of its own rows, and one range of its received rows. `held` are the same pieces, laid out
    for another mask: they keep their rows.
    """
    rank, document, start, end = assigned.T
    piece, key_start, key_end = seen.keys_of(document, start, end)
    new = np.ones(len(assigned), bool)  # pieces whose rows of keys need not be adjacent
    new[1:] = (np.diff(rank) != 0) | (np.diff(document) != 0)
    if seen.table is None:
        new[1:] |= key_start[1:] > key_end[:-1]
    group, first = np.cumsum(new) - 1, np.flatnonzero(new)
    rank_of, document_of = rank[first], document[first]

    of_key = group[piece]
    shift = (int(seen.lengths.max(initial=0)) + 1) * of_key
    order = np.argsort(shift + key_start, kind="stable")
    begin, stop = (shift + key_start)[order], np.maximum.accumulate((shift + key_end)[order])
    is_first = np.ones(len(begin), bool)
    is_first[1:] = begin[1:] > stop[:-1]
    at = np.flatnonzero(is_first)
    span_start, span_group = key_start[order][at], of_key[order][at]
    last = np.append(at[1:], len(stop)) - 1
    span_end = (stop - shift[order])[last] if len(at) else span_start

    size, own = np.zeros((2, len(first)), np.int64)
    np.add.at(size, span_group, span_end - span_start)
    np.add.at(own, group, end - start)
    place = np.empty(len(first), np.int64)
    place[np.lexsort((np.arange(len(first)), size == own, rank_of))] = np.arange(len(first))
    order = np.argsort(place[span_group], kind="stable")
    columns = rank_of[span_group], document_of[span_group], span_start, span_end
    ranks, documents, starts, ends = (x[order] for x in columns)
    spans = Pieces(ranks, documents, starts, ends, _before(ends - starts, ranks))

    origin = np.zeros(len(first), np.int64)
    if seen.table is None:
        origin[span_group[order]] = spans.row - spans.start
    piece_order = np.argsort(place[group], kind="stable")
    if held is not None:
        piece_order = np.argsort(np.lexsort((held.start, held.document, held.rank)))
    rank, document, start, end = assigned[piece_order].T
    row = _before(end - start, rank)
    return Pieces(rank, document, start, end, row, origin[group][piece_order]), spans


def home_pieces(documents: DocumentTable, num_ranks: int) -> Pieces:
    """Returns the pieces at home, by document; their `origin` is that of the home's own rows."""
    first, lengths = documents.first, documents.lengths
    columns = documents.columns // num_ranks
    first_cell = first // columns  # cells of one rank in one batch row, in the order of tokens
    counts = np.where(lengths > 0, (first + lengths - 1) // columns - first_cell + 1, 0)
    number = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    cell = first_cell[number] + within
    begin = cell * columns - first[number]
    start, end = np.maximum(begin, 0), np.minimum(begin + columns, lengths[number])
    batch, rank = np.divmod(cell, num_ranks)
    row = batch * columns + start - begin
    return Pieces(rank, number, start, end, row, row - start)


def _before(size: Int[np.ndarray, " N"], rank: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Returns the sum of the sizes before each entry on its rank; entries are sorted by rank."""
    before = np.cumsum(size) - size
    first = np.searchsorted(rank, rank, side="left")
    return before - before[first]


# ---- Rows that move between ranks, as ranges; and their metadata, with one slot per range.


class Transfers(NamedTuple):
    """Ranges of rows that move from one rank to another, in the order of the receivers' rows.

    NumPy on the host. Inside `jit`, unused entries have source and target W, and no tokens.
    """

    source: Int[Any, " X"]
    target: Int[Any, " X"]
    source_row: Int[Any, " X"]
    target_row: Int[Any, " X"]
    tokens: Int[Any, " X"]


def list_transfers(pieces: Pieces, spans: Pieces) -> Transfers:
    """Returns the longest ranges that spans take from the rows of one rank."""
    order = np.lexsort((pieces.start, pieces.document))
    by_place = pieces.take(order)
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


def num_sent(transfers: Transfers, num_ranks: int) -> Int[np.ndarray, " W"]:
    """Returns the number of ranges that each rank sends."""
    return np.bincount(transfers.source, minlength=num_ranks)


def make_metadata(
    transfers: Transfers, *, num_ranks: int, num_slots: int, rank: int | None = None
) -> Metadata:
    """Returns forward metadata; `num_slots` is at least `num_sent` of each rank.

    With `rank`, all arrays have a leading axis of size 1, for that rank. So there is no array of
    size W * W, or of all slots.
    """
    part = rank_slice(rank)
    counts = num_sent(transfers, num_ranks)
    held = counts[part].astype(np.int32)
    order = order_by_rank(transfers.source, rank)
    source = transfers.source[order] - (rank or 0)
    index = source, number_on_rank(source, held)

    def by_slot(values, fill, dtype):
        out = np.full((len(held), num_slots), fill, dtype)
        out[index] = values[order]
        return out

    totals = rank_sums(transfers.target, transfers.tokens, num_ranks)
    totals = totals[part].astype(np.uint32)
    received = np.zeros((len(totals), num_ranks + 1), np.uint32)
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
        world_size=num_ranks,
    )


def number_on_rank(
    rank: Int[np.ndarray, " N"], counts: Int[np.ndarray, " W"]
) -> Int[np.ndarray, " N"]:
    """Returns the number of earlier entries of the same rank; entries are sorted by rank."""
    return np.arange(len(rank)) - (np.cumsum(counts) - counts)[rank]


def rank_sums(
    rank: Int[np.ndarray, " N"], values: Int[np.ndarray, " N"], num_ranks: int
) -> Int[np.ndarray, " W"]:
    out = np.zeros(num_ranks, np.int64)
    np.add.at(out, rank, values)
    return out


def num_moved(op: str, metadata: Metadata, ranks_per_node: int = 1) -> int:
    """Returns the rows that move between nodes, by default between ranks; each copy counts.

    For stacked plans, it is the sum. Read outside `jit`.

    Raises:
      ValueError: this is one rank's part of a plan.
    """
    received = np.asarray(metadata.num_recv_tokens)[..., :-1]
    held, num_ranks = received.shape[-2:]
    check_all_ranks(op, held, num_ranks)
    node = np.arange(num_ranks) // ranks_per_node
    stays = node[:, None] == node
    return int(received.sum(dtype=np.int64) - received[..., stays].sum(dtype=np.int64))


def check_rank(op: str, rank: int | None, num_ranks: int) -> None:
    if rank is None:
        return
    check_integer(op, "rank", rank)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"{op}: rank is {rank}; it needs to be in [0, {num_ranks}), or None.")


def check_all_ranks(op: str, held: int, num_ranks: int) -> None:
    """Requires what depends on all ranks."""
    if held != num_ranks:
        raise ValueError(
            f"{op}: this is the part of {held} of {num_ranks} ranks. Call it on the plan, "
            "placement or routing of all ranks."
        )


def rank_slice(rank: int | None) -> slice:
    """Returns the slice of a leading axis over ranks that keeps one rank, or all."""
    return slice(None) if rank is None else slice(rank, rank + 1)


def order_by_rank(ranks: Int[np.ndarray, " N"], rank: int | None) -> Int[np.ndarray, " M"]:
    """Returns the indices of the entries of one rank, or of all, one rank after another."""
    return np.argsort(ranks, kind="stable") if rank is None else np.flatnonzero(ranks == rank)


Problem = TypeVar("Problem")


class PlanRequest(NamedTuple):
    """A batch, the ranks, and the choices of a plan.

    Attributes:
      documents: of the batch.
      positions: of the batch `[B, T]`; None: they count from 0 in each document.
      num_ranks: number of ranks W.
      seen: which keys of its document a query sees.
      config: the choices of the plan.
      rank: the rank whose part is made; None: all.
    """

    documents: DocumentTable
    positions: Ids | None
    num_ranks: int
    seen: SeenKeys
    config: PlanConfig
    rank: int | None

    @property
    def mask(self) -> Mask:
        return self.seen.mask

    @property
    def needs_lengths(self) -> bool:
        """Whether the keys of a query depend on the length of its document."""
        return self.seen.table is None and not self.mask.is_causal

    def with_mask(self, mask: Mask) -> "PlanRequest":
        """Returns the request of a plan for another mask."""
        return self._replace(seen=seen_keys(mask, self.documents))

    @property
    def num_tokens(self) -> int:
        """Rows of one rank."""
        return self.documents.num_tokens // self.num_ranks

    @property
    def held(self) -> slice:
        """The ranks whose parts are made, of arrays of all ranks."""
        return rank_slice(self.rank)

    def pairs(self, pieces: Pieces) -> Float32[np.ndarray, " held"]:
        """Returns the query-key pairs of each rank's pieces."""
        pairs = self.seen.pairs(pieces.document, pieces.start, pieces.end)
        return rank_sums(pieces.rank, pairs, self.num_ranks)[self.held].astype(np.float32)


def native_problem(kind: type[Problem], request: PlanRequest, limits: dict[str, Any]) -> Problem:
    """Returns a problem of `csrc/planner`, with the fields that both have.

    Args:
      kind: `PlacementProblem` or `QueryProblem`.
      request: what the plan is made of.
      limits: fields that are set unless they are None.
    """
    config = request.config
    speeds = np.array(config.rank_speeds or [1.0] * request.num_ranks)
    fields = {
        "lengths": request.documents.lengths.tolist(),
        "num_ranks": request.num_ranks,
        "tolerance_ppm": round(1e6 * config.balance_tolerance),
        # Integers; the fastest rank has 10**6.
        "speeds": np.maximum(np.round(1e6 * speeds / speeds.max()), 1).astype(int).tolist(),
        "ranks_per_node": config.ranks_per_node or 1,
        "block": config.block or 1,
    }
    problem = kind()
    for name, value in (fields | limits).items():
        if value is not None:
            setattr(problem, name, value)
    request.seen.describe_to(problem, request.documents.num_tokens)
    return problem


class DoesNotFitError(ValueError):
    """A batch does not fit its configured sizes or limits; another one may."""


def static_sizes(
    op: str,
    config: PlanConfig,
    needs: Mapping[str, Int[np.ndarray, " W"]],
    steps: Mapping[str, tuple[Any, ...]],
) -> dict[str, int]:
    """Returns the sizes in the config if sufficient; else needs, rounded up to share programs.

    Args:
      op: the public function, for error messages.
      config: has sizes, or None.
      needs: of each rank, by the names of sizes.
      steps: by name: what a rank would do, with `{}` for its need; the smallest step of rounding
        (larger needs are rounded up by at most 1/8); and what any batch of this shape needs at
        most, if that is known.
    Raises:
      DoesNotFitError: a given size is too small.
    """
    sizes = {}
    for name, (what, step, *most) in steps.items():
        need, rank = int(needs[name].max()), int(needs[name].argmax())
        given = getattr(config, name)
        if need > np.iinfo(np.int32).max:
            raise ValueError(
                f"{op}: rank {rank} {what.format(need)}, but row numbers have 32 bits. Plan for "
                "more ranks, or fewer tokens at a time."
            )
        if given is None:
            step = max(step, 1 << max(need.bit_length() - 4, 0))
            size = max(-(-need // step), 1) * step
            given = min(size, *(max(x, 1) for x in most)) if most else size
        elif given < need:
            raise DoesNotFitError(
                f"{op}: rank {rank} {what.format(need)} but {name} is {given}. Pass {name}>={need} "
                "or None in PlanConfig."
            )
        sizes[name] = given
    return sizes


def check_longest_keys(op: str, request: PlanRequest) -> None:
    """Rejects a capacity that is too small for the keys of a single query.

    Raises:
      DoesNotFitError: names the document.
    """
    documents, config, seen = request.documents, request.config, request.seen
    if not len(documents.lengths) or config.kv_capacity is None:
        return
    document, keys = seen.most_keys()
    query = "the last query" if request.mask.is_causal and seen.table is None else "a query"
    if config.kv_capacity < keys:
        raise DoesNotFitError(
            f"{op}: {query} of {documents.name(document)} attends to {keys} keys, so its "
            f"rank receives at least {keys} rows, but kv_capacity is {config.kv_capacity}. Pass "
            f"kv_capacity>={keys} or None in PlanConfig."
        )


def check_mean_queries(op: str, request: PlanRequest) -> None:
    """Rejects a capacity below the mean number of queries.

    Raises:
      DoesNotFitError: names the mean.
    """
    config, num_ranks = request.config, request.num_ranks
    num_queries = int(request.documents.lengths.sum())
    mean = -(-num_queries // num_ranks)
    if config.q_capacity is not None and config.q_capacity < mean:
        raise DoesNotFitError(
            f"{op}: {num_queries} queries are computed by {num_ranks} ranks, so a rank receives "
            f"at least {mean} of them, but q_capacity is {config.q_capacity}. Pass q_capacity>="
            f"{mean} or None in PlanConfig."
        )


# ---- The fingerprint of a plan made on the host, from the pieces of documents that ranks hold.


def pieces_fingerprint(
    request: PlanRequest, computed: Pieces, held: Pieces, in_order: Mask | None = None
) -> Int32[np.ndarray, "W F"]:
    """Returns the fingerprint of a plan of all ranks.

    Positions of padding do not count.

    Args:
      request: with the segment ids and positions of the batch.
      computed: where each piece is computed.
      held: the order of the rows that ranks pass to attention.
      in_order: a mask of arrays, in this order.
    """
    documents, positions, num_ranks = request.documents, request.positions, request.num_ranks
    rank, row, length, document, start = _by_row(held)
    ids = run_checksums(
        *_with_padding(
            (rank, row, length, documents.ids[document]),
            documents.num_tokens // num_ranks,
            num_ranks,
        ),
        step=ID_STEP,
        num_ranks=num_ranks,
    )
    runs = rank, row, length, start
    if positions is not None:
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        rank, row, token = (
            np.repeat(x, length) for x in (rank, row, documents.first[document] + start)
        )
        value = np.asarray(positions).reshape(-1)[token + within]
        runs = rank, row + within, np.ones_like(row), value
    places = run_checksums(*runs, step=POSITION_STEP, num_ranks=num_ranks)
    own: list[Any] = [ids, places]
    if in_order is not None:
        own.append(mask_checksums(jax.tree.map(np.asarray, in_order), num_ranks))
    digest = plan_digest(request.config, request.mask.kind, *computed[:4])
    return make_fingerprint(own, digest)


def _by_row(pieces: Pieces) -> tuple[Int[np.ndarray, " P"], ...]:
    """Returns rank, first row, length, document and start of each piece, by rank and row."""
    order = np.lexsort((pieces.row, pieces.rank))
    columns = pieces.rank, pieces.row, pieces.end - pieces.start, pieces.document, pieces.start
    rank, row, length, document, start = (x[order] for x in columns)
    return rank, row, length, document, start


def _with_padding(
    runs: tuple[Int[np.ndarray, " P"], ...], num_tokens: int, num_ranks: int
) -> list[Int[np.ndarray, " N"]]:
    """Returns rank, first row, length and id of these runs, and of the padding around them."""
    ends = np.arange(num_ranks), np.full(num_ranks, num_tokens), *np.zeros((2, num_ranks), int)
    rank, row, length, ids = (np.concatenate(x) for x in zip(runs, ends, strict=True))
    order = np.lexsort((row, rank))
    rank, row, length, ids = (x[order] for x in (rank, row, length, ids))
    before = np.zeros_like(row)
    before[1:] = np.where(rank[1:] == rank[:-1], (row + length)[:-1], 0)
    gaps = rank, before, row - before, np.zeros_like(ids)
    runs = rank, row, length, ids
    every = [np.stack(x, axis=1).reshape(-1) for x in zip(gaps, runs, strict=True)]
    return [x[every[2] > 0] for x in every]
