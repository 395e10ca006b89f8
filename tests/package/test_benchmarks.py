"""Benchmark tables depend on result files alone, whatever rows these have; `run_all` runs all.

`test_docs.py` compares the committed tables with the committed results.
"""

import ast
import copy
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = {path.stem: json.loads(path.read_text()) for path in BENCHMARKS.glob("results/*.json")}
sys.path.insert(0, str(BENCHMARKS))

import pages as generator  # noqa: E402  # pyright: ignore[reportMissingImports]
import shown  # noqa: E402  # pyright: ignore[reportMissingImports]
import summary  # noqa: E402  # pyright: ignore[reportMissingImports]
import tables  # noqa: E402  # pyright: ignore[reportMissingImports]
import view  # noqa: E402  # pyright: ignore[reportMissingImports]


@pytest.fixture
def pages(tmp_path):
    """Returns a function of results by name that renders the README and docs/benchmarks.md."""

    def of(results):
        for name, result in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(result))
        readme, page = generator.pages(tmp_path).values()
        return readme.split(generator.BEGIN)[1].split(generator.END)[0], page

    return of


def test_each_program_writes_one_result_file_of_its_name():
    programs = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    assert set(RESULTS) == programs
    assert set(tables.VIEWS) == programs - {"predicted_attention", "predicted_nodes"}  # pictures
    assert {of.__name__ for of in summary.LINES} | set(summary.SENTENCES) <= programs


@pytest.mark.parametrize(
    "module",
    [view, tables, shown, summary, generator],
    ids=lambda module: module.__name__,
)
def test_texts_contain_no_literal_numbers(module):
    """Except in names such as float32, every number on the pages comes from the results."""
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    specs = {spec for node in ast.walk(tree) if isinstance(node, ast.FormattedValue)
             for spec in ast.walk(node.format_spec or ast.Pass())}  # fmt: skip
    formats = {node.value for node in specs if isinstance(node, ast.Constant)}
    for text in texts:
        if isinstance(text, str) and text not in formats:
            without_names = re.sub(r"\{[^}]*\}|float(16|32|64)|MXFP8(_1D)?|H100|h100", "", text)
            assert not re.search(r"\d", without_names), text


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_results_may_lack_rows(pages, name):
    """Keeps every second row, one row, or none."""
    for rows in (slice(0, None, 2), slice(1, None, 2), slice(0, 1), slice(0, 0)):
        result = copy.deepcopy(RESULTS[name])
        result["rows"] = result["rows"][rows]
        readme, page = pages(RESULTS | {name: result})
        assert page.startswith("# Benchmarks\n") and "all tables" in readme


def test_results_may_lack_files(pages, tmp_path):
    assert "|" not in pages({})[1]
    for name in tables.VIEWS:
        for path in tmp_path.iterdir():
            path.unlink()
        _, page = pages({name: RESULTS[name]})
        assert page.count("jax ") == 1  # one section, with machine and versions


def test_a_method_that_did_not_run_states_the_reason(pages):
    """For example, if the package `ringattention` is not installed."""
    result = copy.deepcopy(RESULTS["attention"])
    del result["versions"]["ringattention"]
    for row in result["rows"]:
        if row["method"] == "ringattention":
            for key in ("ms", "GFLOP_per_s", "of_matmul"):
                del row[key]
            row["why_not"] = "not installed"
    _, page = pages({"attention": result})
    assert "| ringattention | not installed |" in page
    assert page.count("\n|") == 9


def test_the_total_time_is_shown_if_every_result_has_one(pages):
    results = {name: result | {"took_s": 60} for name, result in RESULTS.items()}
    assert f"All take {len(results)} minutes." in pages(results)[1]
    del results["latency"]["took_s"]
    assert "minutes" not in pages(results)[1]


def run_all(*arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / "run_all.py", *arguments],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip


def test_a_quick_run_writes_results_and_pages_elsewhere(tmp_path):
    committed = (BENCHMARKS / "results" / "latency.json").read_bytes()
    done = run_all("--quick", "--folder", tmp_path, "exchange", "latency")
    assert done.returncode == 0, done.stderr
    assert "== 1 of 2: exchange" in done.stdout and "== 2 of 2: latency" in done.stdout
    written = {path.name for path in (tmp_path / "results").iterdir()}
    assert written == {"latency.json", "exchange.json"}
    assert "**Latency**" in (tmp_path / "benchmarks.md").read_text()
    assert (BENCHMARKS / "results" / "latency.json").read_bytes() == committed


def test_an_unknown_name_is_rejected():
    done = run_all("latncy")
    assert done.returncode == 2 and "no benchmark is called latncy" in done.stderr


def test_a_benchmark_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    import run_all as module  # pyright: ignore[reportMissingImports]

    ran = []
    monkeypatch.setattr(module, "run", lambda name, *_: ran.append(name) or name != "latency")
    monkeypatch.setattr(sys, "argv", ["run_all", "--quick", "--folder", str(tmp_path)])
    assert module.main() == 1
    assert ran == module.NAMES
    assert "failed: latency\n" in capsys.readouterr().err
