"""Reads document lengths from JSON, CSV and text files, and from folders of text."""

import csv
import json
import pathlib
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch._command import InputError
from jax_cp_dispatch.demo.documents import read_documents

_COLUMNS = ("length", "lengths", "tokens", "num_tokens")


class Lengths(NamedTuple):
    """Lengths of documents, in order; `name(i)` says where the i-th was read."""

    lengths: list[int]
    name: Callable[[int], str]


class Input(NamedTuple):
    """What was read.

    Attributes:
      rows: the documents of each batch row.
      understood: what the files were taken for, as text.
    """

    rows: list[Lengths]
    understood: str


def read_lengths(
    paths: Iterable[pathlib.Path],
    *,
    column: str | None = None,
    join: bool = False,
    row: int | None = None,
    limit: int | None = None,
) -> Input:
    """Returns the documents of each batch row.

    Args:
      paths: files and folders. A list of lists gives one batch row for each; all other lengths
        together give one batch row.
      column: of CSV files; None: the only one, or one of `_COLUMNS`.
      join: also put lists of lists into one batch row.
      row: keep only this batch row, counted from 0.
      limit: tokens after which no further text files are read; None: read all.
    Raises:
      InputError: a path or its content is unusable.
    """
    flat: list[Lengths] = []
    rows: list[Lengths] = []
    seen = []
    for path in paths:
        found, what = _read(path, column, limit)
        seen.append(f"{path}: {what}")
        if join or len(found) == 1:
            flat += found
        else:
            rows += found
    if rows and flat:
        raise InputError(
            "some files give batch rows (lists of lists) and some give one list. Pass --join to "
            "put all documents into one batch row."
        )
    rows = rows or [_joined(flat)]
    taken = "one batch row"
    if len(rows) > 1:
        taken = (
            f"{len(rows)} rows of one batch, planned together. If they are separate batches, pass "
            "--row N for one of them, or --join"
        )
    if row is not None:
        if not 0 <= row < len(rows):
            has = "only row 0" if len(rows) == 1 else f"rows 0 to {len(rows) - 1}"
            raise InputError(f"--row is {row}, but the files have {has}. Pass one of them.")
        rows, taken = [rows[row]], f"row {row} of {len(rows)}, alone"
    if not any(sum(x.lengths) for x in rows):
        raise InputError("the files have no documents with tokens. Pass lengths of at least 1.")
    return Input(rows, f"{'; '.join(seen)}. Taken as {taken}.")


def _joined(parts: Sequence[Lengths]) -> Lengths:
    if len(parts) == 1:
        return parts[0]

    def name(index: int) -> str:
        for part in parts:
            if index < len(part.lengths):
                return part.name(index)
            index -= len(part.lengths)
        raise IndexError(index)

    return Lengths([length for part in parts for length in part.lengths], name)


def _read(path: pathlib.Path, column: str | None, limit: int | None) -> tuple[list[Lengths], str]:
    """Returns the lists of a file, and what it is."""
    if path.is_dir():
        texts = _sizes_of_texts(path, limit)
        return [texts], f"{_number(texts, 'text file')}, in a random order, one token per byte"
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets add a byte order mark
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}. Pass a file of lengths or a folder of text."
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            f"{path} is not text. Pass lengths as JSON, CSV or one per line, or a folder of text."
        ) from None
    kind = path.suffix.lower()
    if kind == ".json" or (kind not in (".csv", ".tsv") and text.lstrip()[:1] in ("[", "{")):
        lists = _from_json(path, text)
        if len(lists) > 1:
            return lists, f"{len(lists)} lists of lengths"
        return lists, f"a list of {_number(lists[0], 'length')}"
    if kind in (".csv", ".tsv"):
        return _from_csv(path, text, column)
    lines = [(number, line.split("#")[0].strip()) for number, line in _numbered(text)]
    values = _from_lines(path, [(number, line) for number, line in lines if line])
    return [values], f"{_number(values, 'length')}, one per line"


def _number(lengths: Lengths, what: str) -> str:
    count = len(lengths.lengths)
    return f"{count} {what}{'s' if count != 1 else ''}"


def _numbered(text: str) -> Iterable[tuple[int, str]]:
    return enumerate(text.splitlines(), start=1)


def _from_lines(path: pathlib.Path, lines: Sequence[tuple[int, Any]]) -> Lengths:
    name = lambda i: f"{path} line {lines[i][0]}"
    return Lengths([_length(lambda i=i: name(i), x) for i, (_, x) in enumerate(lines)], name)


def _sizes_of_texts(folder: pathlib.Path, limit: int | None) -> Lengths:
    lengths, names, total = [], [], 0
    for document in read_documents(folder, pattern="*", seed=0):
        lengths.append(len(document.tokens))
        names.append(document.name)
        total += lengths[-1]
        if limit is not None and total >= limit:
            break
    if not lengths:
        raise InputError(f"{folder} has no text files. Pass a folder that holds text.")
    return Lengths(lengths, lambda i: str(folder / names[i]))


def _from_json(path: pathlib.Path, text: str) -> list[Lengths]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise InputError(
            f"{path} has lists inside lists that are too deep to read. Pass a list of lengths, or "
            "a list of such lists."
        ) from None
    except ValueError as error:  # no JSON, or a number of thousands of digits
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            why = str(error).partition(";")[0]
            raise InputError(f"{path} is not JSON: {why}. Pass a list of lengths.") from None
    found = _lengths_in(found)
    if isinstance(found, list):
        found = [_lengths_in(x) for x in found]
        nested = [isinstance(x, list) for x in found]
        if found and all(nested):
            return [_items(f"{path} list {b} item", row) for b, row in enumerate(found)]
        if found and not any(nested):
            return [_items(f"{path} item", found)]
    raise InputError(
        f"{path} needs a list of lengths, such as [700, 200], or a list of such lists, one per "
        'batch row. An object needs a key "lengths" for its list, or "length" for one document.'
    )


def _items(where: str, values: Sequence[Any]) -> Lengths:
    name = lambda i: f"{where} {i}"
    for i, x in enumerate(values):
        if isinstance(x, str):
            raise InputError(
                f"{name(i)} is the text {reprlib.repr(x)}; it needs a whole number of tokens, "
                "without quotation marks."
            )
    return Lengths([_length(lambda i=i: name(i), x) for i, x in enumerate(values)], name)


def _lengths_in(value: Any) -> Any:
    """Returns the list of an object, or its number; other values as they are."""
    if not isinstance(value, dict):
        return value
    if "lengths" in value:
        return value["lengths"]
    numbers = [x for name in _COLUMNS if isinstance(x := value.get(name), int | float)]
    return numbers[0] if numbers else value


def _from_csv(path: pathlib.Path, text: str, column: str | None) -> tuple[list[Lengths], str]:
    separator = max(",;\t", key=text.partition("\n")[0].count)
    cells = csv.reader(text.splitlines(), delimiter=separator)
    lines = [(n, row) for n, row in enumerate(cells, start=1) if any(row)]
    if not lines:
        return [_from_lines(path, [])], "no lines"
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
    (at,) = matching
    column_at = [(number, row[at] if at < len(row) else "") for number, row in lines[has_header:]]
    values = _from_lines(path, column_at)
    of = f" of the column {names[at]!r}" if has_header else ""
    return [values], f"{_number(values, 'length')}{of}"


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).isdigit()


def _length(where: Callable[[], str], value: Any) -> int:
    try:
        number = float(value) if isinstance(value, str | int | float) else -1.0
    except (ValueError, OverflowError):
        number = -1.0
    if isinstance(value, bool) or number < 0 or not number.is_integer():
        raise InputError(f"{where()} is {reprlib.repr(value)}; it needs a whole number of tokens.")
    return int(number)
