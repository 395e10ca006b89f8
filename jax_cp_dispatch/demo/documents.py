"""Reads the text files of a folder and packs their bytes into equal rows of the ranks."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Document:
    """A text file; its bytes are the tokens."""

    name: str
    tokens: np.ndarray  # uint8 [length]


@dataclasses.dataclass(frozen=True)
class PackedDocuments:
    """Documents in the global sequence, and the arrays that a data pipeline would produce.

    Attributes:
      tokens, segment_ids, positions: int32 `[1, num_ranks * tokens_per_rank]`; segment 0 pads.
      spans: name, first row and end row (exclusive) of each document.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    spans: tuple[tuple[str, int, int], ...]


def read_documents(folder: pathlib.Path, *, pattern: str, seed: int) -> Iterator[Document]:
    """Yields the text files below `folder` in a seeded random order.

    Skips empty and binary files, and installed packages, which the standard library's folder may
    contain.
    """
    paths = sorted(
        path
        for path in folder.rglob(pattern)
        if path.is_file() and "site-packages" not in path.relative_to(folder).parts
    )
    for index in np.random.default_rng(seed).permutation(len(paths)):
        try:
            data = paths[index].read_bytes()
            data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if data and b"\0" not in data:
            name = str(paths[index].relative_to(folder))
            yield Document(name, np.frombuffer(data, np.uint8))


def pack_documents(
    documents: Iterator[Document],
    *,
    num_ranks: int,
    tokens_per_rank: int,
    long_documents: str,
    longest: int | None = None,
) -> PackedDocuments:
    """Fills all ranks with documents.

    Args:
      documents: read until the ranks are full or no document is left.
      num_ranks, tokens_per_rank: the size of the global sequence.
      long_documents: "span": documents follow each other and may span several ranks. "cut": each is
        cut to `tokens_per_rank` tokens and goes to the first rank with enough space.
      longest: maximum tokens of a document; longer ones are cut. None: no such limit.
    Raises:
      ValueError: `long_documents` has another value.
    """
    if longest is not None:
        documents = (Document(d.name, d.tokens[:longest]) for d in documents)
    if long_documents == "span":
        placed = _follow_each_other(documents, num_ranks * tokens_per_rank)
    elif long_documents == "cut":
        placed = _first_fit(documents, num_ranks, tokens_per_rank)
    else:
        raise ValueError(
            f"pack_documents: long_documents is {long_documents!r}; needs span or cut."
        )
    return _lay_out(placed, num_ranks * tokens_per_rank)


_Placed = list[tuple[int, Document]]  # first row in the global sequence


def _follow_each_other(documents: Iterator[Document], num_tokens: int) -> _Placed:
    placed: _Placed = []
    row = 0
    for document in documents:
        document = Document(document.name, document.tokens[: num_tokens - row])
        placed.append((row, document))
        row += len(document.tokens)
        if row == num_tokens:
            break
    return placed


def _first_fit(documents: Iterator[Document], num_ranks: int, tokens_per_rank: int) -> _Placed:
    placed: _Placed = []
    used = [0] * num_ranks
    for document in documents:
        document = Document(document.name, document.tokens[:tokens_per_rank])
        for rank in range(num_ranks):
            if used[rank] + len(document.tokens) <= tokens_per_rank:
                placed.append((rank * tokens_per_rank + used[rank], document))
                used[rank] += len(document.tokens)
                break
        if sum(used) >= 0.98 * num_ranks * tokens_per_rank:
            break
    return sorted(placed, key=lambda item: item[0])


def _lay_out(placed: Sequence[tuple[int, Document]], num_tokens: int) -> PackedDocuments:
    tokens, segment_ids, positions = np.zeros((3, 1, num_tokens), np.int32)
    spans = []
    for segment, (row, document) in enumerate(placed, start=1):
        rows = slice(row, row + len(document.tokens))
        tokens[0, rows] = document.tokens
        segment_ids[0, rows] = segment
        positions[0, rows] = np.arange(len(document.tokens))
        spans.append((document.name, rows.start, rows.stop))
    return PackedDocuments(tokens, segment_ids, positions, tuple(spans))
