"""What the rows of a rank see: runs of rows, expanded inside the program, or ranges of each row.

A run is a piece of a document in consecutive rows of a rank. Within it, the key range of a row
depends only on its position in the document, and on the document's length unless the mask is
causal. Under a mask that data decides, a plan has the range of every row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch._arrays import running_max
from jax_cp_dispatch.masks import MaskRanges, StaticMask
from jax_cp_dispatch.planning.request import PlannedPieces, PlanRequest, QueryTable, totals_before

# More than any device holds: sums of two row numbers have 32 bits.
_MOST_ROWS = 2**30


class LocalRuns(NamedTuple):
    # The first row of each run, ascending; unused runs have the number of rows, or more
    row: Int32[Any, " P"]
    # The place in its document of that row's token; -1 in a run of padding
    position: Int32[Any, " P"]
    origin: Int32[Any, " P"]  # the received row where the document starts, or would start
    # Rows in use; all others are padding. -1: a fallback, see `key_ranges`.
    num_rows: Int32[Any, ""]
    length: Int32[Any, " P"] | None = None  # tokens of the document; None if the mask is causal


def local_runs(plan: Any, rank: Any) -> LocalRuns:
    """Returns the runs of one rank.

    `plan` has the arrays of all ranks, or is a slice for one rank, with or without the leading
    axis. NumPy arrays and a concrete rank give NumPy.
    """
    names = "run_row", "run_position", "run_origin", "num_rows", "run_length"
    return LocalRuns(*local_rows([getattr(plan, name, None) for name in names], rank))


def local_rows(arrays: Any, rank: Any) -> Any:
    """Returns the rows of one rank, of arrays of all ranks, `[W, ...]`, or of its slice.

    If the first array has no axis of ranks, the arrays are those of the rank.
    """
    leaves = jax.tree.leaves(arrays)
    if jnp.ndim(leaves[0]) < 2:
        return arrays
    at = 0 if jnp.shape(leaves[0])[0] == 1 else rank
    on_host = all(isinstance(x, np.ndarray) for x in leaves) and not isinstance(at, jax.Array)
    return jax.tree.map(lambda x: (x if on_host else jnp.asarray(x))[at], arrays)


def key_ranges(
    runs: LocalRuns, *, size: int, mask: StaticMask
) -> tuple[Int32[Any, " size"], Int32[Any, " size"], Int32[Any, " size"], Int32[Any, " size"]]:
    """Returns the first and last + 1 received key of each of `size` rows; (0, 0) for padding.

    Then the `origin` of its document, and its place there; any numbers for padding. Runs have their
    `length` unless the mask is causal. In a fallback, which nothing may follow, all rows attend to
    row 0: it is NaN if no error can be raised.
    """
    row, position, origin, num_rows, length = runs
    on_host = all(isinstance(x, np.ndarray | np.generic) for x in (row, position, origin, num_rows))
    xp: Any = np if on_host else jnp
    index = xp.arange(size, dtype=np.int32)
    if on_host:
        run = np.maximum(np.searchsorted(row, index, side="right") - 1, 0)
    else:
        # `jnp.searchsorted` cannot be traced inside a partly manual `shard_map` in JAX 0.10.
        numbers = jnp.arange(row.shape[0], dtype=jnp.int32)
        run = running_max(jnp.zeros(size, jnp.int32).at[row].max(numbers, mode="drop"))
    first = position[run]
    start = origin[run]
    end = None if length is None else start + length[run]
    place = index - row[run] + first
    here = place + start
    mask = mask.clipped(_MOST_ROWS)
    is_query = (index < num_rows) & (first >= 0)
    none = (num_rows < 0).astype(np.int32)
    k_start = xp.where(is_query, mask.k_start(here, start), 0).astype(np.int32)
    k_end = xp.where(is_query, mask.k_end(here, start, end), none).astype(np.int32)
    return k_start, k_end, start.astype(np.int32), place.astype(np.int32)


def _of_rank(parts: PlannedPieces, rank: int) -> PlannedPieces:
    """Returns the parts of documents in the rows of one rank, by document and start."""
    here = np.flatnonzero(parts.rank == rank)
    return parts.take(here[np.lexsort((parts.start[here], parts.document[here]))])


def _tokens(parts: PlannedPieces, table: QueryTable) -> tuple[np.ndarray, ...]:
    """Returns document, row and number in the table of each token."""
    size = parts.end - parts.start
    within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    of_parts = parts.document, parts.row, table.first[parts.document] + parts.start
    document, row, token = (np.repeat(x, size) for x in of_parts)
    return document, row + within, token + within


def _rows_before(parts: PlannedPieces, document: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Returns the row of the first token of the document from a position on.

    Or one past the last, if there is none. Parts of a document are adjacent rows, in order.
    """
    longest = int(max(parts.end.max(initial=0), position.max(initial=0))) + 1
    keys = parts.document * longest + parts.start
    before = np.searchsorted(keys, document * longest + position, side="right") - 1
    after = np.minimum(before + 1, len(keys) - 1)
    before = np.maximum(before, 0)
    is_before = parts.document[before] == document
    is_before &= parts.start[before] <= position
    size = parts.end[before] - parts.start[before]
    row = parts.row[before] + np.minimum(position - parts.start[before], size)
    return np.where(is_before, row, parts.row[after])


def row_ranges(
    request: PlanRequest,
    pieces: PlannedPieces,
    spans: PlannedPieces,
    *,
    num_queries: int,
    num_keys: int,
) -> MaskRanges | None:
    """Returns what the received queries and keys of each rank see, in its rows; `[held, rows]`.

    None for a mask of numbers: its ranges follow from the runs of a plan. The pieces of a document
    need to be in order; `spans` are its keys, by `lay_out`.
    """
    table = request.seen
    if not isinstance(table, QueryTable):
        return None
    sizes = (num_queries, num_queries, num_keys, num_keys)
    ranges = MaskRanges(*(
        None if x is None else np.zeros((len(request.held), size), np.int32)
        for x, size in zip(table.ranges, sizes, strict=True)
    ))  # fmt: skip
    for held, rank in enumerate(request.held):
        queries, keys = _of_rank(pieces, rank), _of_rank(spans, rank)
        if not len(keys.row):
            continue
        document, row, token = _tokens(queries, table)
        start, end = (x[token] for x in table.ranges[:2])
        seen = [_rows_before(keys, document, x) for x in (start, end)]
        sees = (start < end) & (seen[0] < seen[1])
        for of_rank, x in zip(ranges[:2], seen, strict=True):
            of_rank[held, row] = np.where(sees, x, 0)
        if ranges.q_start is None:
            continue
        document, row, token = _tokens(keys, table)
        for of_rank, x in zip(ranges[2:], table.ranges[2:], strict=True):
            of_rank[held, row] = _rows_before(queries, document, x[token])
    return ranges


# ---- The cut pieces of a placement: which piece of a document comes before which, on which rank.
#
# Layers beside attention need them: see `jax_cp_dispatch.sequence`. A rank needs all pieces of the
# documents of which it holds a piece, and no others.

# document, tokens before it, its tokens, first row, tokens after it, rank, number among the rank's
# cut pieces, number among the document's pieces, and the row where its rank receives what the
# pieces before it send.
NUM_COLUMNS = 9


class CutPieces(NamedTuple):
    """The pieces that are not whole documents, by document and place in it."""

    columns: Int[np.ndarray, "C 9"]  # see above
    held: Int[np.ndarray, " W"]  # cut pieces of each rank
    # Pieces on other ranks of the documents of each rank's cut pieces
    linked: Int[np.ndarray, " W"]


def cut_pieces(pieces: PlannedPieces, lengths: Int[np.ndarray, " D"], num_ranks: int) -> CutPieces:
    """Finds the cut pieces and counts what each rank has to know of them."""
    cut = np.flatnonzero(pieces.end - pieces.start < lengths[pieces.document])
    held = np.bincount(pieces.rank[cut], minlength=num_ranks)
    slot = totals_before(pieces.rank[cut], np.ones_like(cut))  # pieces are sorted by rank
    by_document = np.lexsort((pieces.start[cut], pieces.document[cut]))
    cut, slot = cut[by_document], slot[by_document]
    start, end, document, rank = (
        x[cut] for x in (pieces.start, pieces.end, pieces.document, pieces.rank)
    )
    order = np.arange(len(cut)) - np.searchsorted(document, document)
    # Of each document on each rank: the pieces before its last one there, and on other ranks.
    longest = int(document.max(initial=0)) + 1
    shared, index, here = np.unique(
        rank * longest + document, return_inverse=True, return_counts=True
    )
    maps = np.zeros(len(shared), np.int64)
    np.maximum.at(maps, index, order)
    holder = shared // longest
    first = np.cumsum(maps) - maps
    base = first - first[np.searchsorted(holder, holder)]
    documents, counts = np.unique(document, return_counts=True)
    total = counts[np.searchsorted(documents, shared % longest)]
    linked = np.zeros(num_ranks, np.int64)
    np.add.at(linked, holder, total - here)
    rest = lengths[document] - end
    columns = document, start, end - start, pieces.row[cut], rest, rank, slot, order, base[index]
    return CutPieces(np.stack(columns, 1), held, linked)


def cut_table(
    cut: CutPieces, held: range, *, num_slots: int, num_linked: int
) -> Int32[np.ndarray, "held X 9"]:
    """Returns what each of these ranks has to know; -1 in unused entries.

    First its own cut pieces, then those on other ranks of the same documents.
    """
    columns = cut.columns
    table = np.full((len(held), num_slots + num_linked, NUM_COLUMNS), -1, np.int32)
    document, holder = columns[:, 0], columns[:, 5]
    first = np.searchsorted(document, document)
    last = np.searchsorted(document, document, side="right")
    for own, rows in zip(held, table, strict=True):
        mine = np.flatnonzero(holder == own)
        rows[columns[mine, 6]] = columns[mine]
        spans = {(int(first[i]), int(last[i])) for i in mine}
        others = [i for a, b in sorted(spans) for i in range(a, b) if holder[i] != own]
        rows[num_slots : num_slots + len(others)] = columns[others]
    return table


def describe_cuts(table: Int32[np.ndarray, "W X 9"], num_tokens: int) -> list[str]:
    """Returns lines on what layers beside attention move and compute; `num_tokens` of a rank."""
    rank = np.arange(len(table))[:, None]
    own = table[(table[..., 5] == rank) & (table[..., 0] >= 0)]
    own = own[np.lexsort((own[:, 7], own[:, 0]))]
    document, start, length, rest, holder = own[:, [0, 1, 2, 4, 5]].T
    follows = np.zeros(len(own), bool)
    follows[1:] = (document[1:] == document[:-1]) & (holder[1:] != holder[:-1])
    states = maps = 0
    for i in np.flatnonzero(rest > 0):
        later = (document == document[i]) & (start > start[i]) & (holder != holder[i])
        receivers = len(np.unique(holder[later]))
        states, maps = states + receivers * (start[i] == 0), maps + receivers * (start[i] > 0)
    middle = int(length[(start > 0) & (rest > 0)].sum())
    share = 100 * middle / max(len(table) * num_tokens, 1)
    documents = len(np.unique(document))
    return [
        f"  cuts      {documents} documents in {len(own)} pieces; a convolution of W taps moves "
        f"{int(follows.sum())} x (W - 1) rows",
        f"            a recurrence moves {states} states and {maps} maps; {share:.1f} % of the "
        "tokens are in middle pieces",
    ]
