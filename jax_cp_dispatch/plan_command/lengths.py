"""Reads the documents of a batch: lengths from JSON, or segment ids from NumPy files."""

import json
import pathlib
import reprlib
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jax_cp_dispatch._command import InputError
from jax_cp_dispatch.documents.table import document_lengths

_IDS, _POSITIONS = "segment_ids", "positions"
_MOST = 2**63  # tokens


class Lengths(NamedTuple):
    """Lengths of documents, in order; `name(i)` says where the i-th was read."""

    lengths: list[int]
    name: Callable[[int], str]


class Input(NamedTuple):
    """What was read.

    Attributes:
      rows: the documents of each batch row.
      understood: what the file was taken for, as text.
    """

    rows: list[Lengths]
    understood: str


def read_lengths(path: pathlib.Path, *, join: bool = False, row: int | None = None) -> Input:
    """Returns the documents of each batch row.

    Args:
      path: a .json file with a list of lengths, or with a list of such lists, one per batch row; or
        a .npy file with segment ids [T] or [B, T], or a .npz file with `segment_ids` and, if
        wanted, `positions`.
      join: put all documents into one batch row.
      row: keep only this batch row, counted from 0.
    Raises:
      InputError: the file or its content is unusable.
    """
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise InputError(
            f"cannot read {path}: its suffix is {kind!r}. Pass lengths in a .json file, or segment "
            "ids in a .npy or .npz file."
        )
    try:
        rows, what = _READERS[kind](path)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}. Pass a .json, .npy or .npz file."
        ) from None
    taken = "one batch row"
    if join:
        rows = [_joined(rows)]
    elif len(rows) > 1:
        taken = (
            f"{len(rows)} rows of one batch, planned together. If they are separate batches, pass "
            "--row N for one of them, or --join"
        )
    if row is not None:
        if not 0 <= row < len(rows):
            has = "only row 0" if len(rows) == 1 else f"rows 0 to {len(rows) - 1}"
            raise InputError(f"--row is {row}, but the file has {has}. Pass one of them.")
        rows, taken = [rows[row]], f"row {row} of {len(rows)}, alone"
    if not any(sum(x.lengths) for x in rows):
        raise InputError(f"{path} has no documents with tokens. Pass lengths of at least 1.")
    return Input(rows, f"{path}: {what}. Read as {taken}.")


def _joined(rows: list[Lengths]) -> Lengths:
    names = [(row, i) for row in rows for i in range(len(row.lengths))]

    def name(index: int) -> str:
        row, i = names[index]
        return row.name(i)

    return Lengths([length for row in rows for length in row.lengths], name)


def _from_json(path: pathlib.Path) -> tuple[list[Lengths], str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))  # editors add a byte order mark
    except RecursionError:
        raise InputError(
            f"{path} has lists that are nested too deeply. Pass a list of lengths, or "
            "a list of such lists."
        ) from None
    except ValueError as error:  # no text, no JSON, or a number of thousands of digits
        why = str(error).partition(";")[0]
        raise InputError(f"{path} is not JSON: {why}. Pass a list of lengths.") from None
    if isinstance(found, list):
        nested = [isinstance(x, list) for x in found]
        if found and all(nested):
            rows = [_items(f"{path} list {b} item", row) for b, row in enumerate(found)]
            return rows, f"{len(rows)} list{'s' if len(rows) > 1 else ''} of lengths"
        if found and not any(nested):
            return [_items(f"{path} item", found)], f"a list of {_count(len(found), 'length')}"
    raise InputError(
        f"{path} needs a list of lengths, such as [700, 200], or a list of such lists, one per "
        "batch row."
    )


def _items(where: str, values: list[Any]) -> Lengths:
    for i, x in enumerate(values):
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        if not is_number or not 0 <= x < _MOST or x != int(x):
            raise InputError(
                f"{where} {i} is {reprlib.repr(x)}; it needs a whole number of tokens."
            )
    return Lengths([int(x) for x in values], lambda i: f"{where} {i}")


def _from_numpy(path: pathlib.Path) -> tuple[list[Lengths], str]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return _from_ids(path, found, None)
        with found:
            if _IDS not in found:
                raise InputError(
                    f"{path} has no array {_IDS!r}; it has {', '.join(found) or 'none'}. Save the "
                    f"segment ids as {_IDS!r}."
                )
            return _from_ids(path, found[_IDS], found.get(_POSITIONS))
    except (EOFError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} holds no arrays of NumPy: {error}. Save segment ids with numpy.save or "
            "numpy.savez."
        ) from None


def _from_ids(
    path: pathlib.Path, ids: np.ndarray, positions: np.ndarray | None
) -> tuple[list[Lengths], str]:
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            f"{path} holds {ids.dtype} of shape {ids.shape}; it needs integer segment ids [T] or "
            "[B, T]."
        )
    try:
        places = None if positions is None else np.atleast_2d(positions)
        lengths = document_lengths(np.atleast_2d(ids), places)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None
    rows = [
        Lengths(list(row), lambda i, b=b: f"{path} row {b} document {i}")
        for b, row in enumerate(lengths)
    ]
    return rows, f"segment ids of {_count(sum(map(len, lengths)), 'document')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


_READERS = {".json": _from_json, ".npy": _from_numpy, ".npz": _from_numpy}
