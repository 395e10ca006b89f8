"""Positions of documents in a packed batch, from their lengths or from segment ids."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import numpy as np
from jaxtyping import Int, Int32, Integer

from jax_cp_dispatch._arguments import check_positive, is_on_host
from jax_cp_dispatch._arrays import run_begins
from jax_cp_dispatch.documents.segment_ids import check_ids, normalize_segment_ids

# Lengths of the documents of a batch row.
Row: TypeAlias = Iterable[int | np.integer]
_MOST_ROWS = np.iinfo(np.int32).max


class DocumentTable(NamedTuple):
    """The documents of a batch `[batch, columns]`; all other tokens are padding."""

    lengths: Int[np.ndarray, " D"]  # tokens of each document
    first: Int[np.ndarray, " D"]  # index of its first token in the batch, row by row; ascending
    # Its segment id, by `number_ids`; lengths are numbered from 1 in each batch row
    ids: Int32[np.ndarray, " D"]
    given_ids: Integer[np.ndarray, " D"]  # the same as given, for messages
    # Shape of the batch
    batch: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return self.batch * self.columns

    def name(self, document: int | np.integer) -> str:
        """Returns the name of a document for an error message."""
        row = self.first[document] // self.columns
        return f"document {document} (segment id {self.given_ids[document]} of batch row {row})"

    def numbers(self) -> Int32[np.ndarray, "B T"]:
        """Returns the number of the document of each token, counted from 1; 0 for padding."""
        ids = np.zeros(self.num_tokens, np.int32)
        ids[self.tokens()] = np.repeat(
            np.arange(1, 1 + len(self.lengths), dtype=np.int32), self.lengths
        )
        return ids.reshape(self.batch, self.columns)

    def tokens(self) -> Int[np.ndarray, " N"]:
        """Returns the index in the batch of each token of all documents."""
        shift = self.first - (np.cumsum(self.lengths) - self.lengths)
        return np.arange(self.lengths.sum()) + np.repeat(shift, self.lengths)

    def edges(self) -> tuple[Any, Any, Any]:
        """Returns the first column of each token's document, one past its last; what has one.

        `[B, T]` each.
        """
        start = np.repeat(self.first % self.columns, self.lengths)
        edges = np.zeros((3, self.num_tokens), np.int64)
        end = start + np.repeat(self.lengths, self.lengths)
        edges[:, self.tokens()] = start, end, np.ones_like(end)
        first, end, live = edges.reshape(3, self.batch, self.columns)
        return first, end, live > 0

    def padding(self) -> tuple[Int[np.ndarray, " G"], Int[np.ndarray, " G"]]:
        """Returns the first token and the length of each gap between documents."""
        ends = np.concatenate([[0], self.first + self.lengths])
        tokens = np.append(self.first, self.num_tokens) - ends
        return ends[tokens > 0], tokens[tokens > 0]


def document_table(
    op: str,
    *,
    world_size: int,
    lengths: Any = None,
    segment_ids: Any = None,
    positions: Any = None,
    columns: int | None = None,
) -> DocumentTable:
    """Returns the documents given by their lengths, or by segment ids and positions.

    Documents of lengths are consecutive in each batch row, and padding follows them. Arguments that
    do not match, and columns that the ranks cannot share, are errors.
    """
    check_positive(op, world_size=world_size)
    require_host(op, lengths=lengths)
    if (lengths is None) == (segment_ids is None):
        got = "neither lengths nor" if lengths is None else "both lengths and"
        raise ValueError(f"{op}: got {got} segment_ids. Pass one of them.")
    for name, value, partner in (
        ("positions", positions if segment_ids is None else None, "segment_ids"),
        ("columns", columns if lengths is None else None, "lengths"),
    ):
        if value is not None:
            raise ValueError(f"{op}: got {name} without {partner}. Omit {name}.")
    if lengths is None:
        documents = from_segment_ids(op, segment_ids, positions)
    else:
        rows = _rows(op, lengths)
        totals = [int(row.sum()) for row in rows]
        longest = max(totals)
        if columns is None:
            columns = max(-(-longest // world_size), 1) * world_size
        check_positive(op, columns=columns)
        columns = int(columns)
        if longest > columns:
            raise ValueError(
                f"{op}: the lengths of batch row {totals.index(longest)} sum to {longest} but "
                f"columns is {columns}. Pass columns>={longest}, or shorter rows."
            )
        first = [b * columns + np.cumsum(row) - row for b, row in enumerate(rows)]
        ids = [np.arange(1, 1 + len(row), dtype=np.int32) for row in rows]
        tokens, first, ids = map(np.concatenate, (rows, first, ids))
        documents = DocumentTable(tokens, first, ids, ids, len(rows), columns)
    check_columns(op, documents.columns, world_size)
    check_table_sizes(op, documents, world_size)
    return documents


def from_segment_ids(op: str, segment_ids: Any, positions: Any) -> DocumentTable:
    """Returns runs of one segment id, also split where positions do not increase; 0 is padding."""
    require_host(op, segment_ids=segment_ids, positions=positions)
    given = np.asarray(segment_ids)
    positions = None if positions is None else np.asarray(positions)
    check_ids(op, given, positions)
    return list_documents(*normalize_segment_ids(op, given, positions), given)


def list_documents(ids: Any, positions: Any, given: Any = None) -> DocumentTable:
    """`from_segment_ids` of NumPy arrays that were read; `given`: the ids before."""
    first = np.flatnonzero(run_begins(ids, positions))
    lengths = np.diff(np.append(first, ids.size))
    is_document = ids.reshape(-1)[first] > 0
    lengths, first = lengths[is_document], first[is_document]
    of_documents = (x.reshape(-1)[first] for x in (ids, ids if given is None else given))
    return DocumentTable(lengths, first, *of_documents, *ids.shape)


def document_lengths(
    segment_ids: Integer[np.ndarray, "B T"], positions: Integer[np.ndarray, "B T"] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns the document lengths of each batch row, in order.

    Padding is left out. So if a row has padding before its last document, later documents move up.

    Args:
      segment_ids, positions: on the host; see `context_parallel_attention`.
    Raises:
      TypeError, ValueError: ids or positions are no integers [B, T] that this process knows, an
        id is negative, or a document has separate runs.
    """
    documents = from_segment_ids("document_lengths", segment_ids, positions)
    row = documents.first // documents.columns
    return tuple(tuple(documents.lengths[row == b].tolist()) for b in range(documents.batch))


def require_host(op: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(
                f"{op}: {name} is traced, but documents are read on the host here. Call {op} "
                "outside jit, for example in the data loader."
            )
        if isinstance(value, jax.Array) and not is_on_host(value):
            raise ValueError(
                f"{op}: {name} is spread over processes. Pass the whole array, as NumPy, on every "
                "process."
            )


def check_columns(op: str, columns: int, world_size: int) -> None:
    """Requires columns that the ranks can share equally."""
    if columns % world_size:
        raise ValueError(
            f"{op}: {columns} columns cannot be split over world_size={world_size} ranks. Pad the "
            "columns with segment 0 to a multiple of world_size."
        )


def check_table_sizes(op: str, documents: DocumentTable, world_size: int) -> None:
    """Requires that rows of a rank have 32-bit numbers, and that 64 bits count all pairs."""
    num_tokens = documents.num_tokens // world_size
    if num_tokens > _MOST_ROWS:
        raise ValueError(
            f"{op}: a rank would hold {num_tokens} tokens, but row numbers have 32 bits. Pass a "
            "larger world_size, or fewer tokens."
        )
    if np.square(documents.lengths.astype(float)).sum() >= 2.0**62:
        raise ValueError(
            f"{op}: the query-key pairs of {documents.num_tokens} tokens exceed 62 bits. Pass "
            "shorter documents, or fewer at a time."
        )


def _rows(op: str, lengths: Any) -> list[Int[np.ndarray, " D"]]:
    if getattr(lengths, "ndim", 1) > 1:
        raise TypeError(
            f"{op}: lengths is an array of shape {lengths.shape}; it needs one list of lengths per "
            "batch row. Pass segment ids as segment_ids=, or lengths.tolist()."
        )
    if not _is_list(lengths):
        raise TypeError(
            f"{op}: lengths is {lengths!r}; it needs a list of lengths, such as [700, 200], or one "
            "such list per batch row."
        )
    lengths = np.asarray(lengths) if hasattr(lengths, "ndim") else list(lengths)
    if len(lengths) and not _is_list(lengths[0]):
        lengths = [lengths]
    if not len(lengths):
        raise ValueError(f"{op}: lengths is empty. Pass one list of lengths per batch row.")
    rows = []
    for b, given in enumerate(lengths):
        try:
            row = np.asarray(list(given) if isinstance(given, Iterator) else given)
            what = f"{row.dtype} of shape {row.shape}"
        except ValueError:
            row, what = np.empty((0, 0)), "numbers and lists"
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise TypeError(
                f"{op}: lengths of batch row {b} are {what}; they need to be a list of integers. "
                "Pass one list of lengths per batch row."
            )
        if row.size and row.min() < 0:
            raise ValueError(
                f"{op}: document {int(row.argmin())} of batch row {b} has length {row.min()}. "
                "Pass lengths of at least 0 tokens."
            )
        if row.size and row.max() > _MOST_ROWS:
            raise ValueError(
                f"{op}: document {int(row.argmax())} of batch row {b} has {row.max()} tokens, but "
                f"positions have 32 bits. Pass documents of at most {_MOST_ROWS} tokens."
            )
        rows.append(row.astype(np.int64))
    return rows


def _is_list(x: Any) -> bool:
    return isinstance(x, Iterable) and getattr(x, "ndim", 1) > 0
