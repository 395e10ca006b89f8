"""Runs the benchmarks, each in its own process, and writes the tables: `./run bench`.

Each `bench_NAME.py` writes `results/NAME.json`; nothing else does. Pass `NAME ...` to run only
these. `--quick` tries everything in about 15 minutes on 2 cores: small sizes, one round, and
results and tables in a separate folder, so committed ones do not change. Exits with 1 if a
benchmark has failed.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import pages
from common import ROOT

HERE = ROOT / "benchmarks"
NAMES = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def last_time(name: str, results: pathlib.Path) -> float | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text()).get("took_s") if path.exists() else None


def run(name: str, results: pathlib.Path, *options: str) -> bool:
    output = results / f"{name}.json"
    program = HERE / f"bench_{name}.py"
    command = [sys.executable, program, "--output", output, *options]
    env = dict(os.environ)
    if "--quick" in options:
        env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling takes most of the time
    return subprocess.run(command, env=env).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="try everything, keep nothing")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "quick_bench",
                        help="of --quick")  # fmt: skip
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    names = arguments.names or NAMES
    results, options = pages.RESULTS, []
    if arguments.quick:
        results = arguments.folder / "results"
        options = ["--quick", "--pictures", arguments.folder]
    results.mkdir(parents=True, exist_ok=True)
    failed, began = [], time.perf_counter()
    for number, name in enumerate(names, 1):
        before = last_time(name, results)
        expected = "" if before is None else f", {minutes(before)} last time"
        passed = f"{minutes(time.perf_counter() - began)} so far"
        print(f"== {number} of {len(names)}: {name}{expected} ({passed})", flush=True)
        if not run(name, results, *map(str, options)):
            print(f"== {name} has failed", flush=True)
            failed.append(name)
    for path, text in pages.pages(results).items():
        path = arguments.folder / path.name if arguments.quick else path
        path.write_text(text)
        print(f"== wrote {path}")
    print(f"== {minutes(time.perf_counter() - began)} in all")
    if failed:
        print(f"== failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
