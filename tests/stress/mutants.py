"""Mutants: which tests notice that one branch, comparison or sum of the package is wrong.

Edits the files of its checkout, one mutant at a time, and restores them: use a clone of its own.
Needs pytest-cov. Three steps, whose files go to `build/mutants`:

    python tests/stress/mutants.py map              # the suite once: which test runs which line
    python tests/stress/mutants.py run --percent 10 # mutants that no earlier run has tried
    python tests/stress/mutants.py report           # survivors, and what each test file kills

A mutant meets the tests that run its line, the quickest first, until some fail or their measured
time exceeds a limit. Mutants that change nothing a user could see are listed, with the reason, in
`mutants_equivalent.txt`.
"""

import argparse
import ast
import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.txt")
# Rooms whose branches users meet; tools, pictures and predictions have tests of their own.
ROOMS = (
    *("_arguments", "_arrays", "_dispatch", "_door", "_ranks", "adapters", "attention", "buffers"),
    *("comm_gemm", "cycles", "documents", "experts", "global_call", "masks", "metadata"),
    *("planning", "scaling", "sequence"),
)
SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+"}
SWAPPED |= {"maximum": "minimum", "minimum": "maximum", "argmax": "argmin", "argmin": "argmax"}
OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Add: "+", ast.Sub: "-"}
# Programs that a test starts are counted as the test.
COVERAGE = """[run]
patch = subprocess
parallel = true
context = ${PYTEST_CURRENT_TEST-}
"""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
      name: file, function, what is changed, and its number among equal ones: the same after edits
        of other functions.
      lines: that hold the changed expression.
      start, end: the changed bytes.
      text: what takes their place.
    """

    name: str
    file: str
    lines: range
    start: int
    end: int
    text: bytes


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields the mutants of a file, in the order of its functions."""
    source = path.read_bytes()
    file = str(path.relative_to(ROOT))
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: collections.Counter[str] = collections.Counter()

    def span(node: Any) -> tuple[int, int]:
        first = starts[node.lineno - 1] + node.col_offset
        return first, starts[node.end_lineno - 1] + node.end_col_offset

    def swapped(left: Any, right: Any, old: str) -> tuple[int, int, bytes] | None:
        first, end = span(left)[1], span(right)[0]
        place = source.find(old.encode(), first, end)
        return None if place < 0 else (place, place + len(old), SWAPPED[old].encode())

    def changes(node: Any) -> Iterator[tuple[str, tuple[int, int, bytes] | None]]:
        match node:
            case ast.If() if isinstance(node.body[-1], ast.Raise) and not node.orelse:
                yield "refusal", (*span(node.test), b"False")
            case ast.If() | ast.IfExp():
                start, end = span(node.test)
                yield "condition", (start, end, b"not (" + source[start:end] + b")")
            case ast.BoolOp():
                yield "operand", (span(node.values[-2])[1], span(node)[1], b"")
            case ast.Compare(ops=[op]) if type(op) in OPERATORS:
                old = OPERATORS[type(op)]
                yield old, swapped(node.left, node.comparators[0], old)
            case ast.BinOp() if type(node.op) in OPERATORS:
                old = OPERATORS[type(node.op)]
                yield old, swapped(node.left, node.right, old)
            case ast.Call(func=ast.Attribute(attr="where"), args=[_, yes, no]):
                (start, middle), (last, end) = span(yes), span(no)
                text = source[last:end] + source[middle:last] + source[start:middle]
                yield "where", (start, end, text)
            case ast.Attribute(attr=old) if old in SWAPPED:
                end = span(node)[1]
                yield old, (end - len(old), end, SWAPPED[old].encode())

    def visit(node: Any, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr):
            return  # the words of an error
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if function:  # changes of a module's own statements fail at its import
            for kind, change in changes(node):
                if change is None:
                    continue
                seen[f"{function} {kind}"] += 1
                name = f"{file}:{function} {kind} {seen[f'{function} {kind}']}"
                yield Mutant(
                    name, file, range(node.lineno, (node.end_lineno or node.lineno) + 1), *change
                )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    for mutant in visit(ast.parse(source), ""):
        changed = source[: mutant.start] + mutant.text + source[mutant.end :]
        try:
            ast.parse(changed)
        except SyntaxError:  # a comparison within an operator of higher precedence
            continue
        yield mutant


def all_mutants(rooms: list[str], percent: float) -> Iterator[Mutant]:
    """Yields this part of the mutants of the rooms: the same ones in each run."""
    package = ROOT / "jax_cp_dispatch"
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0].removesuffix(".py") in rooms:
            for mutant in mutants_of(path):
                if zlib.crc32(mutant.name.encode()) % 10_000 < 100 * percent:
                    yield mutant


def pytest_runtest_logreport(report) -> None:
    """Adds a line for each phase of a test to the file of this run: this file is a plugin, too."""
    if "MUTANTS_REPORT" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["MUTANTS_REPORT"], "a") as f:
            print(json.dumps([report.nodeid, report.outcome, report.duration]), file=f)


def run_tests(report: Path, *arguments: str, timeout: float | None = None) -> list[list]:
    """Runs pytest, and returns (test, outcome, seconds) of each phase of each test."""
    report.unlink(missing_ok=True)
    report.touch()
    environment = {**os.environ, "MUTANTS_REPORT": str(report)}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    # Programs that a mutant does not change are compiled once for all mutants.
    environment["JAX_COMPILATION_CACHE_DIR"] = str(OUT / "compiled")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants", "-p", "no:cacheprovider"]
    try:
        with open(report.with_suffix(".log"), "w") as log:
            code = subprocess.run(
                [*command, *arguments], cwd=ROOT, env=environment, timeout=timeout,
                stdout=log, stderr=subprocess.STDOUT, check=False,
            ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        code = -1
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    if code not in (0, 1):  # the mutant breaks an import, or waits
        lines.append(["collection" if code > 0 else "timeout", "failed", 0.0])
    return lines


def make_map(arguments) -> None:
    """Runs the suite once, and writes which tests run each line, and how long they take."""
    from coverage import CoverageData

    OUT.mkdir(parents=True, exist_ok=True)
    os.environ["COVERAGE_FILE"] = str(OUT / "coverage")
    (OUT / "coveragerc").write_text(COVERAGE)
    found = run_tests(
        OUT / "map.jsonl", "--cov=jax_cp_dispatch", "--cov-context=test", "--cov-report=",
        f"--cov-config={OUT / 'coveragerc'}", f"-n{arguments.jobs}", "--dist=loadfile",
        "--no-loadscope-reorder", *arguments.tests,
    )  # fmt: skip
    seconds: collections.Counter[str] = collections.Counter()
    for test, outcome, duration in found:
        seconds[test] += duration
        if outcome == "failed":
            print("fails without a mutant:", test)
    failed = {test for test, outcome, _ in found if outcome == "failed"}
    data = CoverageData(str(OUT / "coverage"))
    data.read()
    lines = {}
    for file in data.measured_files():
        tests = data.contexts_by_lineno(file)
        name = str(Path(file).relative_to(ROOT))
        lines[name] = {
            line: sorted({re.split(r"\|| \(", x)[0] for x in contexts} - {""} - failed)
            for line, contexts in tests.items()
        }
    (OUT / "map.json").write_text(json.dumps({"seconds": seconds, "lines": lines}))


def try_mutants(arguments) -> None:
    """Tries each mutant that has no result yet, and appends its result."""
    known = json.loads((OUT / "map.json").read_text())
    results = OUT / "results.jsonl"
    done = {x["mutant"] for x in _results()}
    todo = [x for x in all_mutants(arguments.rooms, arguments.percent) if x.name not in done]
    part, parts = map(int, arguments.part.split("/"))
    for number, mutant in enumerate(todo[part - 1 :: parts]):
        lines = known["lines"].get(mutant.file, {})
        tests = {test for line in mutant.lines for test in lines.get(str(line), ())}
        chosen, total = [], 0.0
        for test in sorted(tests, key=lambda x: known["seconds"].get(x, 0.0)):
            total += known["seconds"].get(test, 0.0)
            if chosen and total > arguments.limit:
                break
            chosen.append(test)
        path = ROOT / mutant.file
        source = path.read_bytes()
        killers = []
        if chosen:
            names = OUT / f"tests_{part}.txt"
            names.write_text("\n".join(chosen))
            try:
                path.write_bytes(source[: mutant.start] + mutant.text + source[mutant.end :])
                found = run_tests(
                    OUT / f"run_{part}.jsonl", f"@{names}", f"--maxfail={arguments.killers}",
                    timeout=10 * arguments.limit,
                )  # fmt: skip
            finally:
                path.write_bytes(source)
            killers = sorted({test for test, outcome, _ in found if outcome == "failed"})
        was = source[mutant.start : mutant.end].decode()
        row = {"mutant": mutant.name, "was": was, "is": mutant.text.decode()}
        row |= {"killers": killers, "tried": len(chosen), "of": len(tests)}
        with results.open("a") as f:
            print(json.dumps(row), file=f)
        state = "killed" if killers else "SURVIVED" if tests else "runs in no test"
        print(f"{number + 1}/{len(todo[part - 1 :: parts])} {state}: {mutant.name}", flush=True)


def _results() -> list[dict]:
    path = OUT / "results.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def report(arguments) -> None:
    """Prints the survivors, and of each test file how many mutants it kills, and kills alone."""
    equivalent = EQUIVALENT.read_text() if EQUIVALENT.exists() else ""
    rows = [x for x in _results() if x["mutant"] not in equivalent]
    killed, alone, seconds = (collections.Counter() for _ in range(3))
    for row in rows:
        files = {x.split("::")[0] for x in row["killers"]}
        killed.update(files)
        if len(files) == 1:
            alone.update(files)
    known = json.loads((OUT / "map.json").read_text())
    for test, duration in known["seconds"].items():
        seconds[test.split("::")[0]] += duration
    survivors = [x for x in rows if not x["killers"]]
    print(f"{len(rows)} mutants, {len(rows) - len(survivors)} killed. Survivors:")
    for row in survivors:
        met = f"{row['tried']} of {row['of']} tests"
        print(f"  {row['mutant']}   {row['was']!r} -> {row['is']!r}   ({met})")
    print("\nseconds  kills  alone  file")
    for file, duration in seconds.most_common():
        print(f"{duration:7.1f} {killed[file]:6} {alone[file]:6}  {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    steps = parser.add_subparsers(required=True)
    step = steps.add_parser("map")
    step.add_argument("--jobs", type=int, default=3)
    step.add_argument("tests", nargs="*")
    step.set_defaults(run=make_map)
    step = steps.add_parser("run")
    step.add_argument("--rooms", nargs="*", default=ROOMS)
    step.add_argument("--percent", type=float, default=10.0)
    step.add_argument("--limit", type=float, default=60.0, help="seconds of tests a mutant meets")
    step.add_argument("--killers", type=int, default=3, help="failures after which a mutant ends")
    step.add_argument("--part", default="1/1", help="2/3: the second of three clones that share")
    step.set_defaults(run=try_mutants)
    steps.add_parser("report").set_defaults(run=report)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
