"""Reads the documents of a batch, and fills the ranks with them."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_cp_dispatch._command import InputError
from jax_cp_dispatch.documents.table import document_lengths

_MOST_ROWS = 2**31 - 1
_MOST_TOKENS = 2**63


class Batch(NamedTuple):
    """Documents that fill the ranks.

    Attributes:
      rows: lengths of the documents of each batch row, without empty ones.
      tokens_per_rank: of each batch row.
      num_cut: documents of which only the beginning fits.
      num_left_out: documents of which nothing fits.
    """

    rows: tuple[tuple[int, ...], ...]
    tokens_per_rank: int
    num_cut: int
    num_left_out: int


def read_lengths(path: pathlib.Path, row: int | None = None) -> list[list[int]]:
    """Returns the lengths of the documents of each batch row, or of the batch row `row` alone.

    Args:
      path: a .json file with a list of lengths, or with a list of such lists, one per batch row; or
        a .npy file with segment ids [T] or [B, T].
      row: counted from 0.
    Raises:
      InputError: the file or its content is unusable.
    """
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise InputError(
            f"cannot read {path}: its suffix is {kind!r}. Pass lengths in a .json file, or segment "
            "ids in a .npy file."
        )
    try:
        rows = _READERS[kind](path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}. Pass another file.") from None
    except (EOFError, RecursionError, TypeError, ValueError) as error:
        what = "a list of lengths, such as [700, 200], or a list of such lists, one per batch row"
        needed = what if kind == ".json" else "integer segment ids [T] or [B, T]"
        raise InputError(f"{path} needs {needed}: {str(error)[:200]}.") from None
    if row is not None:
        if not 0 <= row < len(rows):
            raise InputError(f"--row is {row}; pass a batch row of the file, 0 to {len(rows) - 1}.")
        rows = [rows[row]]
    if not any(map(sum, rows)):
        raise InputError(f"{path} has no documents with tokens. Pass lengths of at least 1.")
    return rows


def _from_json(path: pathlib.Path) -> list[list[int]]:
    found = json.loads(path.read_text(encoding="utf-8-sig"))  # editors add a byte order mark
    if not isinstance(found, list) or not found:
        raise ValueError("it holds something else")
    rows = found if isinstance(found[0], list) else [found]
    return [[_length(x) for x in row] for row in rows]


def _length(x: Any) -> int:
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    if not is_number or not 0 <= x < _MOST_TOKENS or x != int(x):
        raise ValueError(f"{x!r} is no whole number of tokens")
    return int(x)


def _from_numpy(path: pathlib.Path) -> list[list[int]]:
    ids = np.atleast_2d(np.load(path, allow_pickle=False))
    return [list(row) for row in document_lengths(ids)]


_READERS = {".json": _from_json, ".npy": _from_numpy}


def fill_ranks(
    rows: Sequence[Sequence[int]], *, num_ranks: int, tokens_per_rank: int | None
) -> Batch:
    """Cuts each batch row to the tokens of the ranks.

    Args:
      rows: lengths of the documents of each batch row.
      num_ranks: that share each batch row.
      tokens_per_rank: of each batch row; None: as many as the longest row needs.
    Raises:
      InputError: plans cannot number the tokens of a rank, or count the pairs.
    """
    if tokens_per_rank is None:
        tokens_per_rank = -(-max(map(sum, rows)) // num_ranks)
    space = num_ranks * tokens_per_rank
    if len(rows) * tokens_per_rank > _MOST_ROWS:
        raise InputError(
            f"a rank would hold {len(rows) * tokens_per_rank} tokens, but plans number rows with "
            "32 bits. Pass more --ranks, or a smaller --tokens-per-rank."
        )
    kept, num_cut, num_left_out = [], 0, 0
    for row in rows:
        total, used = 0, []
        for length in filter(None, row):
            part = min(length, space - total)
            num_cut += 0 < part < length
            num_left_out += part == 0
            total += part
            if part:
                used.append(part)
        kept.append(tuple(used))
    if sum(x**2 for used in kept for x in used) >= 2**62:
        raise InputError(
            "the documents have more than 2**61 query-key pairs, the most that a plan counts. Pass "
            "shorter documents, or fewer of them."
        )
    return Batch(tuple(kept), tokens_per_rank, num_cut, num_left_out)
