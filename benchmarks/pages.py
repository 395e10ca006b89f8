"""Writes docs/benchmarks.md and the results in the README from the result files.

Run `python benchmarks/pages.py`; `./run bench` runs it at its end.
"""

import json
import pathlib
import string
from collections.abc import Iterable

from summary import highlights, other_results
from tables import VIEWS
from view import Result, machine

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIRST = ("balance",)  # in the README alone
BEGIN, END = "<!-- benchmarks:begin -->\n", "<!-- benchmarks:end -->"


def load(results: pathlib.Path) -> dict[str, Result]:
    """Returns results by name, except those without rows."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    return {name: result for name, result in found.items() if result.get("rows")}


def introduction(found: dict[str, Result], letters: dict[str, str]) -> list[str]:
    took = [result.get("took_s") for result in found.values()]
    time = f" All take {sum(filter(None, took)) / 60:.0f} minutes." if None not in took else ""
    return [
        "# Benchmarks",
        "",
        "`benchmarks/pages.py` generates this page from `benchmarks/results`; `./run bench` "
        "regenerates both. Times are medians of one run, interleaved with the alternative that a "
        "user would take. The [README](../README.md#results) has the balance of attention." + time,
        "",
        *(f"- {letter}: {name}" for name, letter in letters.items()),
    ]


def text_of(parts: Iterable[list[str]]) -> str:
    return "\n".join(line for part in parts for line in (*part, ""))


def pages(results: pathlib.Path = RESULTS) -> dict[pathlib.Path, str]:
    """Returns the text of each generated file."""
    found = load(results)
    readme, page = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    kept = [x for x in FIRST if x in found]
    first = [VIEWS[x].lines(found[x], machine(found[x]), "docs/images") for x in kept]
    shown = text_of([highlights(found), *first, other_results(found)])
    others = {x: view for x, view in VIEWS.items() if x in found and x not in FIRST}
    machines = dict.fromkeys(machine(found[x]) for x in others)
    letters = dict(zip(machines, string.ascii_uppercase, strict=False))
    sections = [view.lines(found[x], letters[machine(found[x])]) for x, view in others.items()]
    every = text_of([introduction(found, letters), *sections])
    return {readme: f"{before}{BEGIN}{shown}{END}{after}", page: every.rstrip() + "\n"}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
