"""Compares rows with committed results, or with an earlier run on the same machine."""

import importlib.resources
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch._command import InputError
from jax_cp_dispatch.bench_command.ranks import Row

NOTICEABLE = 0.8  # of the earlier ratio; less is reported


class Earlier(NamedTuple):
    """A row of earlier results: what `Row` says, and where it was measured."""

    section: str
    what: str
    size: str
    seconds: float
    of_limit: float | None
    speedup: float | None
    origin: str


def committed() -> list[Earlier]:
    """Returns the committed results of the package, on virtual CPU devices.

    The file is an output of `--json` with the default options.
    """
    file = importlib.resources.files("jax_cp_dispatch.bench_command") / "committed.json"
    return _rows(json.loads(file.read_text(encoding="utf-8")))


def earlier_run(path: pathlib.Path) -> list[Earlier]:
    """Returns the rows of a file that `--json` has written.

    Raises:
      InputError: it is no such file.
    """
    try:
        return _rows(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}. Pass an output of --json."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{path} is not an output of `bench --json`. Pass a file that it wrote."
        ) from None


def _rows(report: dict[str, Any]) -> list[Earlier]:
    origin = _origin(report)
    return [
        Earlier(**{name: row[name] for name in Earlier._fields[:-1]}, origin=origin)
        for row in report["rows"]
    ]


def _origin(report: dict[str, Any]) -> str:
    """Returns machine, version and date in words."""
    machine, versions = report["machine"], report["versions"]
    return f"{machine['cpu']}, {machine['cores']} cores; jax {versions['jax']}; {report['date']}"


def matching(rows: Sequence[Row], earlier: Sequence[Earlier]) -> dict[int, Earlier]:
    """Returns by index the earlier row of the same operation and size."""
    known = {row[:3]: row for row in earlier}
    keys = [(row.section, row.what, row.size) for row in rows]
    return {index: known[key] for index, key in enumerate(keys) if key in known}


def slower(row: Row, earlier: Earlier) -> float | None:
    """Returns the ratio of an earlier speed that the row reaches, if that is noticeably less.

    Compares fractions of the limit, else speedups over the alternative, else times: ratios depend
    least on the machine.
    """
    if row.of_limit and earlier.of_limit:
        ratio = row.of_limit / earlier.of_limit
    elif row.speedup and earlier.speedup:
        ratio = row.speedup / earlier.speedup
    else:
        ratio = earlier.seconds / row.seconds
    return ratio if ratio < NOTICEABLE else None
