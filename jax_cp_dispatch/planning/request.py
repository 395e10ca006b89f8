"""What a plan on the host is made of: the batch and what its queries see, pieces, what moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float32, Int, Int32, Int64

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.cost.attention import waiting_share
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
from jax_cp_dispatch.masks import Causal, Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.pairs import pairs_per_query
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning.config import PlanConfig

# ---- What the queries of a batch see under a mask without closed forms.


class QueryTable(NamedTuple):
    """Numbers of the tokens of all documents, one document after another, without padding.

    Keys and queries count from the start of their document.
    """

    ranges: MaskRanges  # the keys of each query, and the queries of each key
    first: Int64[np.ndarray, " D"]  # of each document, its first token
    pairs_before: Int64[np.ndarray, " N+1"]  # of all queries before each, and of all

    def needed(self, document: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranges of keys that at least one of the queries [start, end) may see.

        Exact, except for keys in the ranges of some queries that may be seen by others only.
        """
        first = self.first[document]
        of_queries = slice(first + start, first + end)
        k_start, k_end = self.ranges.k_start[of_queries], self.ranges.k_end[of_queries]
        has_keys = k_start < k_end
        if not has_keys.any():
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        low, high = k_start[has_keys].min(), k_end[has_keys].max()
        steps = np.bincount(k_start[has_keys] - low, minlength=high - low + 1)
        steps -= np.bincount(k_end[has_keys] - low, minlength=high - low + 1)
        is_needed = np.cumsum(steps[:-1]) > 0
        if self.ranges.q_start is not None:
            of_keys = slice(first + low, first + high)
            is_needed &= self.ranges.q_start[of_keys] < end
            is_needed &= self.ranges.q_end[of_keys] > start
        edges = np.flatnonzero(np.diff(is_needed, prepend=False, append=False))
        return low + edges[::2], low + edges[1::2]

    def running_keys(
        self, lengths: Int[np.ndarray, " D"]
    ) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Returns the first key of each query and of later ones, one past the last of earlier ones.

        They count from the start of the document. The keys of any queries [start, end) follow from
        two of these.
        """
        has_keys = self.ranges.k_start < self.ranges.k_end
        longest = int(lengths.max(initial=0)) + 1
        document = longest * np.repeat(np.arange(len(lengths)), lengths)
        none = np.repeat(lengths, lengths)
        first = np.where(has_keys, self.ranges.k_start, none) + document
        last = np.where(has_keys, self.ranges.k_end, 0) + document
        first = np.minimum.accumulate(first[::-1])[::-1]
        return first - document, np.maximum.accumulate(last) - document


def query_table(mask: Mask, documents: DocumentTable) -> QueryTable:
    """Returns the table of a mask whose arrays, if any, are known on the host."""
    lengths, shape = documents.lengths, (documents.batch, documents.columns)
    first, token = np.cumsum(lengths) - lengths, documents.tokens()
    *edges, live = documents.edges()
    start = edges[0].reshape(-1)[token]
    seen = mask.ranges(np.arange(documents.columns)[None], *edges)
    seen = MaskRanges(*(x if x is None else np.broadcast_to(x, shape) for x in seen))
    counted = seen._replace(k_end=np.where(live, seen.k_end, 0))
    pairs = pairs_per_query(counted).reshape(-1)[token]
    longest = np.repeat(lengths, lengths)
    clipped = lambda x: np.clip(x.reshape(-1)[token] - start, 0, longest).astype(np.int32)
    ranges = MaskRanges(*(x if x is None else clipped(x) for x in seen))
    return QueryTable(ranges, first, np.concatenate([[0], np.cumsum(pairs)]))


# ---- `PlanRequest`: the batch, the ranks and the choices, also for C++.


class PlanRequest(NamedTuple):
    """A batch, the ranks, and the choices of a plan; `with_mask` sets what queries see."""

    documents: DocumentTable  # of the batch
    positions: Ids | None  # of the batch `[B, T]`; None: they count from 0 in each document
    num_ranks: int  # number of ranks W
    config: PlanConfig  # the choices of the plan
    rank: int | None  # the rank whose part is made; None: all
    mask: Mask = Causal()  # which keys of its document a query sees
    # The mask, if it has closed forms; otherwise its table
    seen: StaticMask | QueryTable = Causal()
    beside: tuple[PlanRequest, ...] = ()  # the same for other masks, whose work counts, too
    layers: tuple[int, ...] = (1,)  # the weight of this mask, and of those

    def with_mask(self, mask: Mask) -> PlanRequest:
        seen = mask if isinstance(mask, StaticMask) else query_table(mask, self.documents)
        return self._replace(mask=mask, seen=seen)

    @property
    def num_tokens(self) -> int:
        """Rows of one rank."""
        return self.documents.num_tokens // self.num_ranks

    @property
    def held(self) -> range:
        """The ranks whose parts are made."""
        return range(self.num_ranks) if self.rank is None else range(self.rank, self.rank + 1)

    def pairs(self, pieces: PlannedPieces) -> Float32[np.ndarray, " held"]:
        """Returns the query-key pairs of each rank's pieces; of several masks, the weighted sum."""
        rank, document, start, end, *_ = pieces
        pairs: Any = 0
        for weight, seen in zip(
            self.layers, (self.seen, *(x.seen for x in self.beside)), strict=True
        ):
            if isinstance(seen, QueryTable):
                first, before = seen.first[document], seen.pairs_before
                pairs += weight * (before[first + end] - before[first + start])
            else:
                pairs += weight * seen.pairs(start, end, self.documents.lengths[document])
        return rank_sums(rank, pairs, self.num_ranks)[self.held].astype(np.float32)

    def keys_of(self, document: Any, start: Any, end: Any) -> tuple[Any, Any, Any]:
        """Returns the keys [start, end) that pieces [start, end) of documents need.

        First the piece of each range; by piece, then ascending. A piece may need several ranges.
        """
        piece, lengths = np.arange(len(document)), self.documents.lengths[document]
        if isinstance(self.seen, StaticMask):
            return piece, *self.seen.keys_of(start, end, lengths)
        is_cut = end - start < lengths
        whole = piece[~is_cut]
        found = [(whole, np.zeros_like(whole), lengths[whole])]
        for i in piece[is_cut].tolist():
            keys = self.seen.needed(int(document[i]), int(start[i]), int(end[i]))
            found.append((np.full(len(keys[0]), i), *keys))
        pieces, starts, ends = (np.concatenate(x) for x in zip(*found, strict=True))
        order = np.argsort(pieces, kind="stable")
        return pieces[order], starts[order], ends[order]


_MOST_LAYERS = 2**15  # so that sums of pairs keep 64 bits


def read_layers(
    op: str, mask: Any, masks: Sequence[Any] | None, layers: Sequence[Any] | None
) -> tuple[list[Any], tuple[int, ...]]:
    """Reads `mask=`, `masks=` and `layers=`; these become integers without a common factor."""
    if masks is None:
        if layers is not None:
            raise ValueError(f"{op}: got layers without masks. Pass masks, one for each number.")
        return [mask], (1,)
    if mask is not None:
        raise ValueError(f"{op}: got both mask and masks. Pass masks alone.")
    if not isinstance(masks, list | tuple) or not masks:
        raise ValueError(f"{op}: masks is {masks!r}; pass a tuple of at least one mask.")
    layers = (1,) * len(masks) if layers is None else layers
    if not isinstance(layers, list | tuple) or len(layers) != len(masks):
        raise ValueError(
            f"{op}: layers is {layers!r} for {len(masks)} masks. Pass one number for each mask."
        )
    try:
        exact = [Fraction(x.item() if isinstance(x, np.generic) else x) for x in layers]
    except (TypeError, ValueError, OverflowError):
        exact = []
    if not exact or min(exact) <= 0:
        raise ValueError(
            f"{op}: layers is {layers!r}; it needs positive numbers: how many layers use each "
            "mask, or what a pair of each costs."
        )
    unit = math.lcm(*(x.denominator for x in exact))
    counts = [int(x * unit) for x in exact]
    counts = [x // math.gcd(*counts) for x in counts]
    if max(counts) > _MOST_LAYERS:
        counts = [max(1, round(x * _MOST_LAYERS / max(exact))) for x in exact]
    return list(masks), tuple(counts)


Problem = TypeVar("Problem")


def native_problem(
    kind: type[Problem],
    requests: Sequence[PlanRequest],
    limits: dict[str, Any],
    layers: Sequence[int] = (1,),
) -> Problem:
    """Returns a `PlacementProblem` or a `QueryProblem` of `csrc/planner`, with fields of both.

    Each mask has a request, and a weight in `layers`. Fields in `limits` that are None are not set.
    """
    request, config, documents = requests[0], requests[0].config, requests[0].documents
    speeds = np.array(config.rank_speeds or [1.0] * request.num_ranks)
    fields = {
        "lengths": documents.lengths.tolist(),
        "num_ranks": request.num_ranks,
        "tolerance_ppm": round(1e6 * config.balance_tolerance),
        # Integers; the fastest rank has 10**6.
        "speeds": np.maximum(np.round(1e6 * speeds / speeds.max()), 1).astype(int).tolist(),
        "ranks_per_node": config.ranks_per_node or 1,
        "block": config.block or 1,
    }
    if config.hardware is not None:
        rows = config.key_cost * sum(layers)
        fields["ranks_per_node"] = config.node_size(request.num_ranks) or 1
        fields["key_time"] = config.row_times(rows, request.num_ranks)
    problem: Any = kind()
    if config.hardware is not None:
        exchanges = config.exchanges(moves_queries=hasattr(problem, "query_time"))
        problem.set_exchanges(waiting_share(config.num_kv_heads), exchanges)
    for name, value in (fields | limits).items():
        if value is not None:
            setattr(problem, name, value)
    static = [x.seen for x in requests if isinstance(x.seen, StaticMask)]
    if len(static) == len(requests):
        # No number of a mask needs to be larger than the batch.
        counts = [x.clipped(documents.num_tokens).pair_count for x in static]
        if len(counts) == 1:
            problem.pairs = counts[0]
        else:
            problem.set_layers(list(zip(counts, layers, strict=True)))
        return problem
    tables = [
        x.seen if isinstance(x.seen, QueryTable) else query_table(x.seen, documents)
        for x in requests
    ]
    pairs = sum(n * x.pairs_before for n, x in zip(layers, tables, strict=True))
    first, last = zip(*(x.running_keys(documents.lengths) for x in tables), strict=True)
    problem.set_table(pairs, np.min(first, axis=0), np.max(last, axis=0))
    return problem


# ---- `Pieces`: parts of documents on ranks, at home and laid out in rows, and their keys.


class PlannedPieces(NamedTuple):
    """Tokens [start, end) of documents, in the order of the ranks' rows; `row` is local to a rank.

    `origin` is the received row where the document starts, or would start; None if nothing asks.
    """

    rank: Int[np.ndarray, " P"]
    document: Int[np.ndarray, " P"]
    start: Int[np.ndarray, " P"]
    end: Int[np.ndarray, " P"]
    row: Int[np.ndarray, " P"]
    origin: Any = None

    def take(self, index: Any) -> PlannedPieces:
        taken: Any = (x if x is None else x[index] for x in self)
        return PlannedPieces(*taken)


def lay_out(
    assigned: Int[np.ndarray, "P 4"], request: PlanRequest, held: PlannedPieces | None = None
) -> tuple[PlannedPieces, PlannedPieces]:
    """Lays out pieces, given as sorted rows (rank, document, start, end), in rows of ranks.

    Also returns their keys, in received order: for a static mask, those of pieces that share keys
    are one range. If a query may see keys of several ranges (a `QueryTable`), those of a document
    are adjacent rows; keys between them, which no query of the rank sees, are not sent, and
    `origin` has no meaning.

    Cut documents come first on each rank. All its whole documents and the last cut one are then one
    range of its own rows, and one range of its received rows. `held` are the same pieces, laid out
    for another mask: they keep their rows.
    """
    is_static = isinstance(request.seen, StaticMask)
    rank, document, start, end = assigned.T
    piece, key_start, key_end = request.keys_of(document, start, end)
    new = np.ones(len(assigned), bool)  # pieces whose rows of keys need not be adjacent
    new[1:] = (np.diff(rank) != 0) | (np.diff(document) != 0)
    if is_static:
        new[1:] |= key_start[1:] > key_end[:-1]
    group, first = np.cumsum(new) - 1, np.flatnonzero(new)
    rank_of, document_of = rank[first], document[first]

    of_key = group[piece]
    shift = (int(request.documents.lengths.max(initial=0)) + 1) * of_key
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
    spans = PlannedPieces(ranks, documents, starts, ends, totals_before(ranks, ends - starts))

    origin = np.zeros(len(first), np.int64)
    if is_static:
        origin[span_group[order]] = spans.row - spans.start
    piece_order = np.argsort(place[group], kind="stable")
    if held is not None:
        piece_order = np.argsort(np.lexsort((held.start, held.document, held.rank)))
    rank, document, start, end = assigned[piece_order].T
    row = totals_before(rank, end - start)
    return PlannedPieces(rank, document, start, end, row, origin[group][piece_order]), spans


def home_pieces(documents: DocumentTable, num_ranks: int) -> PlannedPieces:
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
    return PlannedPieces(rank, number, start, end, row, row - start)


def totals_before(
    rank: Int[np.ndarray, " N"], size: Int[np.ndarray, " N"]
) -> Int[np.ndarray, " N"]:
    """Returns the sum of the sizes before each entry on its rank; entries are sorted by rank."""
    before = np.cumsum(size) - size
    return before - before[np.searchsorted(rank, rank, side="left")]


def rank_sums(
    rank: Int[np.ndarray, " N"], values: Int[np.ndarray, " N"], num_ranks: int
) -> Int[np.ndarray, " W"]:
    """Returns exact sums, which `np.bincount` of weights are not."""
    out = np.zeros(num_ranks, np.int64)
    np.add.at(out, rank, values)
    return out


def by_slot(
    ranks: Int[np.ndarray, " N"],
    columns: Mapping[str, tuple[Int[np.ndarray, " N"], np.integer]],
    *,
    num_ranks: int,
    num_slots: int,
    rank: int | None = None,
) -> dict[str, Int[np.ndarray, "held slots"]]:
    """Returns tables with the entries of each rank in a row, in their order.

    Columns have the value of each entry, and that of unused slots. No rank has more entries than
    `num_slots`. With `rank`, only its row is made.
    """
    order = np.argsort(ranks, kind="stable") if rank is None else np.flatnonzero(ranks == rank)
    row = ranks[order] - (rank or 0)
    index = row, totals_before(row, np.ones_like(row))
    tables = {}
    for name, (values, unused) in columns.items():
        tables[name] = np.full((num_ranks if rank is None else 1, num_slots), unused)
        tables[name][index] = values[order]
    return tables


# ---- Rows that move between ranks, as ranges; and their metadata, with one slot per range.


class Transfers(NamedTuple):
    """Ranges of rows that move from one rank to another, in the order of the receivers' rows.

    NumPy on the host. Inside `jit`, ranges of queries come first, then those of keys, whose sources
    are W + rank. Unused entries have source 2 W, target W and no tokens.
    """

    source: Int[Any, " X"]
    target: Int[Any, " X"]
    source_row: Int[Any, " X"]
    target_row: Int[Any, " X"]
    tokens: Int[Any, " X"]


def list_transfers(pieces: PlannedPieces, spans: PlannedPieces) -> Transfers:
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


def make_metadata(
    transfers: Transfers, *, num_ranks: int, num_slots: int | None = None, rank: int | None = None
) -> Metadata:
    """Returns forward metadata; `num_slots` is at least the ranges that any rank sends.

    With `rank`, all arrays have a leading axis of size 1, for that rank. So there is no array of
    size W * W, or of all slots.
    """
    source, target, source_row, target_row, tokens = transfers
    sent, zero = np.bincount(source, minlength=num_ranks), np.uint32(0)
    slots = {
        "dst_rank": (target, np.int32(-1)),
        "dst_offset": (target_row, zero),
        "seq_len": (tokens, zero),
        "src_offset": (source_row, zero),
    }
    num_slots = int(sent.max()) if num_slots is None else num_slots
    tables: Any = by_slot(source, slots, num_ranks=num_ranks, num_slots=num_slots, rank=rank)
    held, is_here = slice(None), slice(None)
    if rank is not None:
        held, is_here = slice(rank, rank + 1), target == rank
    received = np.zeros((len(sent[held]), num_ranks + 1), np.uint32)
    index = target[is_here] - (rank or 0), source[is_here]
    np.add.at(received, index, tokens[is_here].astype(np.uint32))
    totals = received.sum(1, dtype=np.uint32)
    received[:, -1] = totals
    return Metadata(
        **tables,
        num_recv_tokens=received,
        num_seqs=sent[held].astype(np.int32),
        num_total_recv_tokens=totals,
        world_size=num_ranks,
    )


def num_moved(op: str, metadata: Metadata, ranks_per_node: int = 1) -> int:
    """Returns the rows that move between nodes, by default between ranks; each copy counts.

    For stacked plans, it is the sum. One rank's part of a plan is an error. Read outside `jit`.
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


# ---- Whether a plan fits its config.


class DoesNotFitError(ValueError):
    """A batch does not fit its configured sizes or limits; another one may."""


def static_sizes(
    op: str,
    request: PlanRequest,
    needs: Mapping[str, Int[np.ndarray, " W"]],
    actions: Mapping[str, str],
    steps: Mapping[str, int],
) -> dict[str, int]:
    """Returns the sizes in the config if sufficient; else needs, rounded up to share programs.

    `actions` say what a rank would do, with `{}` for its need, in the order of their checks.
    `steps` are the smallest steps of rounding, if not 8; larger needs are rounded up by at most
    1/8. A given size that is too small raises DoesNotFitError.
    """
    sizes = {}
    for name, action in actions.items():
        need, rank = int(needs[name].max()), int(needs[name].argmax())
        given = getattr(request.config, name)
        if need > np.iinfo(np.int32).max:
            raise ValueError(
                f"{op}: rank {rank} {action.format(need)}, but row numbers have 32 bits. Plan for "
                "more ranks, or fewer tokens at a time."
            )
        if given is None:
            step = max(steps.get(name, 8), 1 << max(need.bit_length() - 4, 0))
            given = max(-(-need // step), 1) * step
            if name.endswith("_capacity"):  # no batch of this shape needs more
                given = min(given, max(request.documents.num_tokens, 1))
        elif given < need:
            raise DoesNotFitError(
                f"{op}: rank {rank} {action.format(need)} but {name} is {given}. Pass {name}>="
                f"{need} or None in PlanConfig."
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
    if isinstance(seen, StaticMask):
        document = int(documents.lengths.argmax())
        keys = int(seen.num_keys(int(documents.lengths[document])))
        query = "the last query" if seen.is_causal else "a query"
    else:
        of_queries, query = np.diff(seen.pairs_before), "a query"
        most = int(of_queries.argmax())
        document, keys = int(np.searchsorted(seen.first, most, side="right")) - 1, of_queries[most]
    if config.kv_capacity < keys:
        raise DoesNotFitError(
            f"{op}: {query} of {documents.name(document)} attends to {keys} keys, so its "
            f"rank receives at least {keys} rows, but kv_capacity is {config.kv_capacity}. Pass "
            f"kv_capacity>={keys} or None in PlanConfig."
        )


# ---- The fingerprint of a plan made on the host, from the pieces of documents that ranks hold.


def pieces_fingerprint(
    request: PlanRequest, computed: PlannedPieces, held: PlannedPieces, in_order: Mask | None = None
) -> Int32[np.ndarray, "W F"]:
    """Returns the fingerprint of a plan of all ranks; positions of padding do not count.

    Pieces are `computed` on a rank, and `held` in the order of the rows that ranks pass to
    attention, which is the order of the mask `in_order`, too.
    """
    documents, num_ranks = request.documents, request.num_ranks
    rank, document, start, end, row, _ = held.take(np.lexsort((held.row, held.rank)))
    length, ids = end - start, documents.ids[document]

    # Runs of ids: those of the pieces, and of the padding before each and at the end of a rank.
    ends = np.arange(num_ranks), np.full(num_ranks, request.num_tokens)
    ends = *ends, *np.zeros((2, num_ranks), int)
    runs = [np.concatenate(x) for x in zip((rank, row, length, ids), ends, strict=True)]
    order = np.lexsort((runs[1], runs[0]))
    to, first, size, _ = runs = [x[order] for x in runs]
    before = np.zeros_like(first)
    before[1:] = np.where(to[1:] == to[:-1], (first + size)[:-1], 0)
    gaps = to, before, first - before, np.zeros_like(to)
    runs = [np.stack(x, axis=1).reshape(-1) for x in zip(gaps, runs, strict=True)]
    runs = [x[runs[2] > 0] for x in runs]
    own: list[Any] = [run_checksums(*runs, step=ID_STEP, num_ranks=num_ranks)]

    places = rank, row, length, start
    if request.positions is not None:
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        of_pieces = rank, row, documents.first[document] + start
        rank, row, token = (np.repeat(x, length) for x in of_pieces)
        value = np.asarray(request.positions).reshape(-1)[token + within]
        places = rank, row + within, np.ones_like(row), value
    own.append(run_checksums(*places, step=POSITION_STEP, num_ranks=num_ranks))
    if in_order is not None:
        own.append(mask_checksums(jax.tree.map(np.asarray, in_order), num_ranks))
    digest = plan_digest(request.config, request.mask.kind, *computed[:4])
    return make_fingerprint(own, digest)
