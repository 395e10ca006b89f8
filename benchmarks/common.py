"""Shared by all benchmarks: options, timing, and result files."""

import argparse
import datetime
import json
import pathlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from jax_cp_dispatch.gpu import raise_gpu_errors
from jax_cp_dispatch.tools import interleaved, machine, versions

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


def planning_seconds(run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Returns the result, and the median of the processor seconds of this thread."""
    result, times = run(), []
    for _ in range(repeats):
        start = time.thread_time()
        result = run()
        times.append(time.thread_time() - start)
    return result, statistics.median(times)


def label_log_axis(axis: Any) -> None:
    """Labels 1, 2 and 5 of each decade of a logarithmic axis, as plain numbers."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_formatter("")


class Report:
    """Result rows: printed when measured, written after each section.

    Args:
      output, title: of the file.
      packages: whose versions the file also says.
      is_silent: neither prints nor writes, as a process that is not the first.
      about: more that the file says, by name.
    """

    def __init__(
        self,
        output: pathlib.Path | None,
        title: str,
        *packages: str,
        is_silent: bool = False,
        **about: Any,
    ):
        self.output, self.title, self.about = None if is_silent else output, title, about
        self.packages, self.is_silent = packages, is_silent
        self.rows: list[dict[str, Any]] = []
        self.has_failed = False

    def section(
        self,
        what: str,
        measured: Callable[[], Iterable[dict[str, Any]]],
        *,
        unless_it_ends: dict[str, Any] | None = None,
    ) -> None:
        """Adds the rows of one section; an error becomes a row, and the next section still runs.

        The file has the row `unless_it_ends` until the section has ended.
        """
        if unless_it_ends is not None:
            self._write([*self.rows, unless_it_ends])
        try:
            for row in measured():
                self._take(row)
        except Exception as error:
            traceback.print_exc()
            row = {"what": what, "error": f"{type(error).__name__}: {error}"}
            self._take((unless_it_ends or {}) | row)
        self._write(self.rows)

    def _take(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.has_failed = self.has_failed or "error" in row
        if not self.is_silent:
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        write(self.output, self.title, rows, *self.packages, **self.about)


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
    part = output.with_name(f"{output.name}.part")  # an interruption leaves the file as it was
    part.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    part.replace(output)
