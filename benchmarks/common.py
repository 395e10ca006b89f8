"""Shared by all benchmarks: options, timing, and result files."""

import argparse
import datetime
import json
import pathlib
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from jax_cp_dispatch._measuring import interleaved, machine, versions
from jax_cp_dispatch.gpu import raise_gpu_errors

__all__ = ["ROOT", "Report", "interleaved", "options", "parser", "seconds_in_a_row", "write"]

ROOT = pathlib.Path(__file__).parents[1]
BEGAN = time.perf_counter()


def parser(description: str | None, *, repeats: int = 11) -> argparse.ArgumentParser:
    """Returns a parser with the common options of benchmarks."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    result.add_argument("--repeats", type=int, default=repeats, help="rounds of interleaved runs")
    return result


def options(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parses the command line; `--quick` means one round, and the defaults in `quick`."""
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    pictures = ROOT / "docs" / "images"
    parser.add_argument(
        "--pictures", type=pathlib.Path, default=pictures, help="folder for pictures"
    )
    if parser.parse_args().quick:
        parser.set_defaults(repeats=1, **quick)
    return parser.parse_args()


def seconds_in_a_row(run: Callable[[], Any], repeats: int) -> float:
    """Returns the median seconds of a call on a GPU, in batches of ten to hide host overhead."""
    seconds = interleaved({"run": run}, repeats, longest=None, calls=10)["run"]
    raise_gpu_errors()
    return seconds


class Report:
    """Result rows: printed when measured, written after each section."""

    def __init__(self, output: pathlib.Path | None, title: str, *packages: str):
        self.output, self.title, self.packages = output, title, packages
        self.rows: list[dict[str, Any]] = []
        self.has_failed = False

    def section(self, what: str, measured: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Adds the rows of one section; an error becomes a row, and the next section still runs."""
        try:
            for row in measured():
                self._take(row)
        except Exception as error:
            traceback.print_exc()
            self.has_failed = True
            self._take({"what": what, "error": f"{type(error).__name__}: {error}"})
        write(self.output, self.title, self.rows, *self.packages)

    def _take(self, row: dict[str, Any]) -> None:
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
        self.rows.append(row)


def write(
    output: pathlib.Path | None,
    title: str,
    rows: list[dict[str, Any]],
    *packages: str,
    **more: Any,
) -> None:
    """Writes the rows with date, machine, versions and run time of the program.

    `packages` are other packages whose versions are recorded if they are installed.
    """
    if output is None:
        return
    result = {
        "title": title,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(*packages),
        "took_s": round(time.perf_counter() - BEGAN),
        **more,
        "rows": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
