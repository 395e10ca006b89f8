"""Reads the text files of a folder and packs their bytes into one sequence."""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Document(NamedTuple):
    """A text file; its bytes are the tokens."""

    name: str
    tokens: np.ndarray  # uint8 [length]


class PackedDocuments(NamedTuple):
    """Documents in the global sequence, and the arrays that a data pipeline would produce.

    Attributes:
      tokens, segment_ids, positions: int32 `[1, num_tokens]`; segment 0 is padding.
      spans: name, first row and end row (exclusive) of each document.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    spans: tuple[tuple[str, int, int], ...]


def read_documents(folder: pathlib.Path, *, pattern: str) -> Iterator[Document]:
    """Yields the text files below `folder` in a random order, always the same.

    Skips empty and binary files, and installed packages, which the standard library's folder may
    contain.
    """
    paths = sorted(
        path
        for path in folder.rglob(pattern)
        if path.is_file() and "site-packages" not in path.relative_to(folder).parts
    )
    for index in np.random.default_rng(0).permutation(len(paths)):
        try:
            data = paths[index].read_bytes()
            data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if data and b"\0" not in data:
            name = str(paths[index].relative_to(folder))
            yield Document(name, np.frombuffer(data, np.uint8))


def pack_documents(
    documents: Iterator[Document], *, num_tokens: int, longest: int
) -> PackedDocuments:
    """Fills a sequence with documents that follow each other; the last one is cut.

    Args:
      documents: read until the sequence is full or no document is left.
      num_tokens: of the sequence.
      longest: maximum tokens of a document; longer ones are cut.
    """
    tokens, segment_ids, positions = np.zeros((3, 1, num_tokens), np.int32)
    spans, end = [], 0
    for segment, document in enumerate(documents, start=1):
        length = min(len(document.tokens), longest, num_tokens - end)
        rows = slice(end, end + length)
        tokens[0, rows] = document.tokens[:length]
        segment_ids[0, rows] = segment
        positions[0, rows] = np.arange(length)
        spans.append((document.name, end, end := end + length))
        if end == num_tokens:
            break
    return PackedDocuments(tokens, segment_ids, positions, tuple(spans))
