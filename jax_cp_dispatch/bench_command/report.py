"""Output of the command: a table per section for people, or JSON."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax_cp_dispatch._text import byte_count, duration, paragraph, short_count, table
from jax_cp_dispatch.bench_command.compare import Earlier, slower
from jax_cp_dispatch.bench_command.ranks import Row

_NONE = "–"


def section_table(rows: Sequence[Row], earlier: Mapping[int, Earlier]) -> str:
    """Returns the tables of one section, one for each size; `earlier` is by index of the row."""
    numbered = enumerate(rows)
    parts = []
    for size, group in itertools.groupby(numbered, key=lambda item: item[1].size):
        items = list(group)
        first = items[0][1]
        more = list(first.more)
        header = ["", "time", "rate", *more]
        limited, compared = (any(getattr(row, name) for _, row in items) for name in _RATIOS)
        header += ["of limit", "earlier"] * limited + ["speedup", "earlier"] * compared
        if not (limited or compared):
            header += ["earlier"]
        lines = [
            [f"  {row.what}", duration(row.seconds), _rate(row)]
            + [f"{row.more[name]:.3g}" for name in more]
            + (_pair(row.of_limit, old and old.of_limit) if limited else [])
            + (_pair(row.speedup, old and old.speedup) if compared else [])
            + ([] if limited or compared else [duration(old.seconds) if old else _NONE])
            for row, old in ((row, earlier.get(index)) for index, row in items)
        ]
        details = [f"limit: {first.limit}"] * limited
        details += [f"speedup over {first.alternative}"] * compared
        title = f"{first.section}: {size}" + (f" ({'; '.join(details)})" if details else "")
        parts.append(f"{paragraph(title, indent=0)}\n{table(header, lines)}")
    return "\n".join(parts)


_RATIOS = ("of_limit", "speedup")


def _pair(value: float | None, old: float | None) -> list[str]:
    return [_NONE if x is None else f"{x:.2f}" for x in (value, old)]


def _rate(row: Row) -> str:
    if row.rate is None:
        return _NONE
    if row.unit == "B/s":
        return f"{byte_count(row.rate)}/s"
    return f"{short_count(row.rate)} {row.unit}"


def conclusion(rows: Sequence[Row], earlier: Mapping[int, Earlier]) -> str:
    """Says where this machine stays behind the earlier results, and where these are from."""
    if not earlier:
        return "No earlier results have these operations and sizes."
    behind = [
        f"  {rows[index].section}: {rows[index].what}: {ratio:.2f} of the earlier speed"
        for index, old in earlier.items()
        if (ratio := slower(rows[index], old)) is not None
    ]
    origins = "; ".join(dict.fromkeys(f"[{old.origin}]" for old in earlier.values()))
    lines = [
        paragraph(
            f"{len(earlier)} of {len(rows)} rows have earlier results, from {origins}. Compare "
            "ratios: they depend less on the machine than times. A busy machine lowers both.",
            indent=0,
        )
    ]
    if behind:
        lines += [f"{len(behind)} noticeably slower, relative to the limit measured here:", *behind]
    else:
        lines.append("None is noticeably slower, relative to the limit measured here.")
    return "\n".join(lines)


def as_json(
    rows: Sequence[Row],
    earlier: Mapping[int, Earlier],
    errors: Mapping[str, str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns all numbers; times in seconds, rates per second."""
    return {
        **about,
        "errors": dict(errors),
        "rows": [
            dataclasses.asdict(row)
            | {"earlier": earlier[index]._asdict() if index in earlier else None}
            for index, row in enumerate(rows)
        ],
    }
