"""Benchmark tables depend on result files alone, whatever rows these have; `run_all` runs all.

`test_docs.py` compares the committed tables with the committed results; `.ci/run` runs all.
"""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = {path.stem: json.loads(path.read_text()) for path in BENCHMARKS.glob("results/*.json")}
sys.path.insert(0, str(BENCHMARKS))

import pages as generator  # noqa: E402  # pyright: ignore[reportMissingImports]
import summary  # noqa: E402  # pyright: ignore[reportMissingImports]
import tables  # noqa: E402  # pyright: ignore[reportMissingImports]


@pytest.fixture
def pages(tmp_path):
    """Returns a function of results by name that renders the README and docs/benchmarks.md."""

    def of(results):
        for earlier in tmp_path.glob("*.json"):
            earlier.unlink()
        for name, result in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(result))
        readme, page = generator.pages(tmp_path).values()
        return readme.split(generator.BEGIN)[1].split(generator.END)[0], page

    return of


def test_each_program_writes_one_result_file_of_its_name():
    programs = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    assert set(RESULTS) == programs
    assert set(tables.VIEWS) == programs - {"predicted_attention", "exchange"}  # a picture, rates
    assert {of.__name__ for of in summary.LINES} | set(summary.SENTENCES) <= programs


def test_results_may_lack_rows(pages):
    """Keeps every second row, or none."""
    for rows in (slice(0, None, 2), slice(0, 0)):
        results = {x: {**result, "rows": result["rows"][rows]} for x, result in RESULTS.items()}
        for name, result in results.items():
            readme, page = pages({name: result})
            assert page.startswith("# Benchmarks\n") and "all tables" in readme


def test_a_benchmark_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    import run_all as module  # pyright: ignore[reportMissingImports]

    ran = []
    monkeypatch.setattr(module, "run", lambda name, *_: ran.append(name) or name != "latency")
    monkeypatch.setattr(sys, "argv", ["run_all", "--quick", "--folder", str(tmp_path)])
    assert module.main() == 1
    assert ran == module.NAMES
    assert "failed: latency\n" in capsys.readouterr().err
