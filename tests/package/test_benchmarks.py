"""The tables of the README and docs/benchmarks.md are those of the result files, each of a program.

`.ci/run` runs two of the programs; `./run bench` runs all.
"""

import importlib
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = {path.stem: json.loads(path.read_text()) for path in BENCHMARKS.glob("results/*.json")}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_each_program_writes_one_result_file_of_its_name(module):
    programs = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    assert set(RESULTS) == programs
    of_pictures_and_rates = {"predicted_attention", "predicted_nodes", "exchange"}
    assert set(module("tables").VIEWS) == programs - of_pictures_and_rates


def test_tables_match_the_result_files(module):
    pages = module("pages").pages()
    assert [path.name for path in pages] == ["README.md", "benchmarks.md"]
    for path, text in pages.items():
        assert path.read_text() == text, f"{path.name}: run python benchmarks/pages.py"


def test_results_may_lack_rows(module, tmp_path):
    """A program may have been interrupted, or a method not be installed."""
    views = module("tables").VIEWS
    for name, result in RESULTS.items():
        kept = result | {"rows": result["rows"][1:2]}
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    readme, page = module("pages").pages(tmp_path).values()
    assert len(re.findall(r"^\([A-Z]; ", page, re.M)) == len(views) - len(module("pages").FIRST)
    assert "all tables" in readme
