"""Text for people: tables, progress of commands, warnings at the line of the user's program."""

import contextlib
import dataclasses
import functools
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def rank_table(values: Mapping[str, Num[np.ndarray, " W"]], *, digits: int = 0) -> list[list[str]]:
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


class Progress:
    """Prints numbered steps with their time on standard error, and the progress of long ones."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._step = 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Callable[[float], None]]:
        self._step += 1
        label = f"[{self._step}/{self._num_steps}] {what} "
        start = time.perf_counter()

        def show(fraction: float) -> None:
            if sys.stderr.isatty():
                bar = "#" * round(20 * fraction)
                print(f"\r{label:<60}|{bar:<20}|", end="", file=sys.stderr, flush=True)

        show(0.0)
        yield show
        again = "\r" if sys.stderr.isatty() else ""
        seconds = time.perf_counter() - start
        print(f"{again}{label:<60}{seconds:6.1f} s{'':<14}", file=sys.stderr, flush=True)


# Modules between the user's line and a warning: a traced or lowered call passes through JAX.
_SKIPPED = {"jax_cp_dispatch", "jax", "jaxlib", "contextlib", "functools", "jaxtyping", "beartype"}


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside this package and JAX."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_skipped(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@functools.lru_cache(maxsize=16)
def say_once(message: str) -> None:
    """Warns of something that this package chose, once per process."""
    warn_caller(f"jax_cp_dispatch: {message}")


def _is_skipped(module: str) -> bool:
    return module.partition(".")[0] in _SKIPPED
