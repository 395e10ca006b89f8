"""Reads document lengths from JSON, CSV and text files, and from folders of text."""

import csv
import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax_cp_dispatch.demo.documents import read_documents

_COLUMNS = ("length", "lengths", "tokens", "num_tokens")


class InputError(ValueError):
    """The command's arguments or files are not usable; the message says what to do."""


class Batch(NamedTuple):
    """Documents that fill the ranks.

    Attributes:
      rows: lengths of the documents of each batch row.
      tokens_per_rank: of each batch row.
      num_left_out: documents that did not fit, or were cut.
    """

    rows: tuple[tuple[int, ...], ...]
    tokens_per_rank: int
    num_left_out: int


def read_lengths(
    paths: Iterable[pathlib.Path], *, column: str | None, join: bool, limit: int | None
) -> list[list[int]]:
    """Returns the document lengths of each batch row.

    Args:
      paths: files and folders. A list of lists gives one batch row for each; all other lengths
        together give one batch row.
      column: of CSV files; None: the only one, or one of `_COLUMNS`.
      join: also put lists of lists into one batch row.
      limit: tokens after which no further text files are read; None: read all.
    Raises:
      InputError: a path or its content is unusable.
    """
    flat: list[int] = []
    rows: list[list[int]] = []
    for path in paths:
        found = _read(path, column, limit)
        if join or len(found) == 1:
            flat += [length for row in found for length in row]
        else:
            rows += found
    if rows and flat:
        raise InputError(
            "some files give batch rows (lists of lists) and some give one list. Pass --join to "
            "put all documents into one batch row."
        )
    rows = rows or [flat]
    if not any(map(sum, rows)):
        raise InputError("the files have no documents with tokens. Pass lengths of at least 1.")
    return rows


def _read(path: pathlib.Path, column: str | None, limit: int | None) -> list[list[int]]:
    if path.is_dir():
        return [_sizes_of_texts(path, limit)]
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}. Pass a file of lengths or a folder of text."
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            f"{path} is not text. Pass lengths as JSON, CSV or one per line, or a folder of text."
        ) from None
    kind = path.suffix.lower()
    if kind == ".json" or (kind != ".csv" and text.lstrip()[:1] in ("[", "{")):
        return _from_json(path, text)
    if kind == ".csv":
        return [_from_csv(path, text, column)]
    lines = ((number, line.split("#")[0].strip()) for number, line in _numbered(text))
    return [[_length(f"{path} line {number}", line) for number, line in lines if line]]


def _numbered(text: str) -> Iterable[tuple[int, str]]:
    return enumerate(text.splitlines(), start=1)


def _sizes_of_texts(folder: pathlib.Path, limit: int | None) -> list[int]:
    lengths, total = [], 0
    for document in read_documents(folder, pattern="*", seed=0):
        lengths.append(len(document.tokens))
        total += lengths[-1]
        if limit is not None and total >= limit:
            break
    if not lengths:
        raise InputError(f"{folder} has no text files. Pass a folder that holds text.")
    return lengths


def _from_json(path: pathlib.Path, text: str) -> list[list[int]]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}. Pass a list of lengths.") from None
    found = _list_in(found)
    if isinstance(found, list):
        found = [_list_in(x) for x in found]
        nested = [isinstance(x, list) for x in found]
        if found and all(nested):
            return [
                [_length(f"{path} list {b} item {i}", x) for i, x in enumerate(row)]
                for b, row in enumerate(found)
            ]
        if found and not any(nested):
            return [[_length(f"{path} item {i}", x) for i, x in enumerate(found)]]
    raise InputError(
        f"{path} needs a list of lengths, such as [700, 200], or a list of such lists, one per "
        'batch row. An object needs a key "lengths".'
    )


def _list_in(value: Any) -> Any:
    return value["lengths"] if isinstance(value, dict) and "lengths" in value else value


def _from_csv(path: pathlib.Path, text: str, column: str | None) -> list[int]:
    lines = [(n, row) for n, row in enumerate(csv.reader(text.splitlines()), start=1) if any(row)]
    if not lines:
        return []
    names = [cell.strip() for cell in lines[0][1]]
    has_header = not all(_is_number(name) for name in names)
    if column is not None:
        matching = [i for i, name in enumerate(names) if name == column]
    elif len(names) == 1:
        matching = [0]
    else:
        matching = [i for i, name in enumerate(names) if name.lower() in _COLUMNS]
    if len(matching) != 1:
        wanted = f"no single column {column!r}" if column else "several columns"
        raise InputError(
            f"{path} has {wanted}; its columns are {', '.join(names)}. Pass --column NAME."
        )
    values = []
    for number, row in lines[has_header:]:
        cell = row[matching[0]] if matching[0] < len(row) else ""
        values.append(_length(f"{path} line {number}", cell))
    return values


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).isdigit()


def _length(where: str, value: Any) -> int:
    try:
        whole = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    except ValueError:
        whole = -1
    if whole < 0:
        raise InputError(f"{where} is {value!r}; it needs a whole number of tokens.")
    return whole


def fill_ranks(rows: list[list[int]], *, num_ranks: int, tokens_per_rank: int | None) -> Batch:
    """Cuts each batch row to the tokens of the ranks.

    Args:
      rows: from `read_lengths`.
      num_ranks: that share each batch row.
      tokens_per_rank: of each batch row; None: as many as the longest row needs.
    """
    if tokens_per_rank is None:
        tokens_per_rank = -(-max(map(sum, rows)) // num_ranks)
    space = num_ranks * tokens_per_rank
    kept, left_out = [], 0
    for row in rows:
        total, used = 0, []
        for length in filter(None, row):
            part = min(length, space - total)
            left_out += part < length
            total += part
            if part:
                used.append(part)
        kept.append(tuple(used))
    return Batch(tuple(kept), tokens_per_rank, left_out)
