"""A view of a result file: one line of text, a table made by format strings, and its origin."""

import re
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Result = dict[str, Any]
Row = dict[str, Any]
NONE = "–"


class View(NamedTuple):
    """How a result is shown. All texts are format strings, so numbers come from the results.

    Attributes:
      text: one line about the table; takes the fields of the result, and all values of a field of
        its rows.
      labels: headers and texts of the first columns. Rows with the same labels share a line.
      cells: headers and texts of the other columns; a header may name fields of a row.
      rows: the rows of a result that are shown.
      picture: a file in docs/images, shown below the table.
    """

    text: str
    labels: Mapping[str, str]
    cells: Mapping[str, str]
    rows: Callable[[Result], Iterable[Row]] = lambda result: result["rows"]
    picture: str = ""

    def lines(self, result: Result, where: str, images: str = "images") -> list[str]:
        """Returns the lines of a section.

        Args:
          where: names the machine.
          images: a path relative to the page.
        """
        name = re.split(r"\*\*:?|\.", self.text)[1]
        picture = [f"![{name}]({images}/{self.picture})", ""] if self.picture else []
        text = self.text.format_map(_Values(result))
        return [text, "", *self._table(result), *picture, f"({where}; {result['date']})"]

    def _table(self, result: Result) -> list[str]:
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        headers: dict[str, None] = {}
        for row in self.rows(result):
            labels = tuple(_cell(text, row) for text in self.labels.values())
            line = lines.setdefault(labels, {})
            for header, text in self.cells.items():
                name = header.format_map(row)
                headers[name] = None
                line[name] = _cell(text, row)
        if not lines:
            return []
        values = (
            [*labels, *(x.get(name, NONE) for name in headers)] for labels, x in lines.items()
        )
        return [
            cells(*self.labels, *headers),
            "|" + "---|" * len(self.labels) + "---:|" * len(headers),
            *(cells(*line) for line in values),
            "",
        ]


class _Values(dict):
    """The fields of a result; a missing one is that of all rows, joined."""

    def __missing__(self, name: str) -> str:
        return and_join(row[name] for row in self["rows"] if name in row)


def _cell(text: str, row: Row) -> str:
    """Formats one cell; without its fields, the reason, or a dash."""
    fields = [re.split(r"\W", name)[0] for _, name, *_ in string.Formatter().parse(text) if name]
    if any(row.get(name) is None for name in fields):
        return str(row.get("why_not", NONE))
    return text.format_map(row)


def cells(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def machine(result: Result) -> str:
    of, versions = result["machine"], result["versions"]
    return f"{of['cpu']}, {of['cores']} cores; jax {versions['jax']}"


def and_join(values: Iterable[object]) -> str:
    *first, last = map(str, dict.fromkeys(values)) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def span(numbers: Iterable[float]) -> str:
    numbers = sorted(numbers)
    return " to ".join(dict.fromkeys(f"{x:.2f}" for x in (numbers[0], numbers[-1])))
