"""Text for people: numbers with units, and aligned tables."""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Num

WIDTH = 100

Number: TypeAlias = int | float | np.integer | np.floating


def outline(self: Any) -> str:
    """A `__repr__` for a dataclass or a NamedTuple: arrays are dtype and shape, int32[4,8]."""
    is_dataclass = dataclasses.is_dataclass(self)
    names = [f.name for f in dataclasses.fields(self)] if is_dataclass else self._fields
    fields = (f"{name}={_outlined(getattr(self, name))}" for name in names)
    return f"{type(self).__name__}({', '.join(fields)})"


def _outlined(value: Any) -> str:
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        return outline(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)


def count(number: Number) -> str:
    """Returns 65536 as "65,536"."""
    return f"{round(number):,}"


def short_count(number: Number) -> str:
    """Returns a count in at most five characters: 65536 as "65.5K"."""
    return str(round(number)) if number < 9999.5 else _scaled(number, " KMGTP").replace(" ", "")


def byte_count(number: Number) -> str:
    """Returns 65536 as "65.5 KB"."""
    return _scaled(number, " KMGTP") + "B"


def duration(seconds: float | np.floating) -> str:
    """Returns 0.0016 as "1.60 ms"."""
    scale, unit = next(((x, y) for x, y in _UNITS if seconds * x >= 0.9995), _UNITS[-1])
    value = seconds * scale
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


_UNITS = ((1, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns"))


def _scaled(number: Number, units: str) -> str:
    """Returns a number with the largest of the decimal units (the first is 1) below it."""
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    digits = 0 if number >= 99.95 or not power else 1
    return f"{number:.{digits}f} {units[power].strip()}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, indent: int = 2) -> str:
    """Aligns columns: the first to the left, all others to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        " " * indent
        + "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def table_of_ranks(
    values: Mapping[str, Num[np.ndarray, " W"]], *, digits: int = 0
) -> list[list[str]]:
    """Returns a row for each quantity of the ranks: least, median, most, and the rank with most."""
    return [
        [name, *(f"{f(x):,.{digits}f}" for f in (np.min, np.median, np.max)), str(np.argmax(x))]
        for name, x in values.items()
    ]


RANKS_HEADER = ("", "least", "median", "most", "on rank")


def paragraph(text: str, *, indent: int = 2) -> str:
    """Wraps a text to the width of a page."""
    margin = " " * indent
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(margin + line for line in lines)
