"""The report of one GPU, rehearsed without one: its steps, their limits, and the smoke table."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from in_ci import in_ci

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_report.sh"
TOOLS = ("no nvidia-smi", "no /usr/local/cuda/bin/", "no nvcc")  # of a GPU's machine


def load(path):
    spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rehearse(folder, *options):
    """Returns the steps of a dry run as (status, limit, name, what), and what it leaves out."""
    ran = subprocess.run(
        [SCRIPT, "--dry-run", *options, folder],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    steps = [line.split("\t") for line in ran.stdout.splitlines() if line.count("\t") == 3]
    (names,) = re.findall(r"^left out of \d+ s: (.*)$", ran.stdout, re.MULTILINE)
    assert not any(folder.iterdir()), ran.stderr
    return steps, [] if names == "nothing" else names.split(", ")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All steps, under a budget that leaves out none."""
    return rehearse(tmp_path_factory.mktemp("report"), "--budget", "3600")


@in_ci
def test_every_step_can_start(everything):
    steps, left_out = everything
    assert len(steps) > 25 and not left_out
    for status, _, name, what in steps:
        assert status == "0" or what.startswith(TOOLS), f"{name}: {what}"
    first = ["machine", "build", "import", "warm-up", "kernels", "kernel times", "smoke: dispatch"]
    assert [name for _, _, name, _ in steps[: len(first)]] == first


@in_ci
def test_what_does_not_fit_the_budget_is_left_out_by_name(tmp_path, everything):
    everything, _ = everything
    steps, left_out = rehearse(tmp_path)
    assert [step[2] for step in everything] == [step[2] for step in steps] + left_out
    limits = {name: int(limit) for _, limit, name, _ in everything}
    for _, limit, name, _ in steps:
        assert min(limits[name], 5) <= int(limit) <= limits[name]
    # What runs beside other steps is stopped after its limit, but usually takes less.
    usual = {"smoke": 5, "warm-": 10, "betwe": 60}
    assert sum(min(int(n), usual.get(name[:5], 999)) for _, n, name, _ in steps) <= 540
    assert left_out, "the steps' own limits add up to more than 9 minutes"


def test_the_smoke_table_has_a_line_for_each_operation():
    groups = re.findall(r"^smoke \d+ (.+)$", SCRIPT.read_text(), re.MULTILINE)
    assert " ".join(groups).split() == list(load(ROOT / "tests/gpu/smoke.py").LINES)


def test_every_part_of_the_kernels_tests_is_known_to_them():
    parts = set(re.findall(r'"\$kernels" ([a-z-]+)', SCRIPT.read_text()))
    source = (ROOT / "tests/native/test_kernels.cu").read_text()
    assert {"attention", "one-launch", "time"} <= parts
    assert all(f'name == "{part}"' in source or f'name != "{part}"' in source for part in parts)


@in_ci
def test_a_line_without_a_gpu_names_the_reason():
    ran = subprocess.run(
        [sys.executable, ROOT / "tests/gpu/smoke.py", "dispatch"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 1
    reasons = (
        "no GPU is here|the package was built without CUDA|the extension '_cuda' does not load"
    )
    assert re.match(f"dispatch: ({reasons})", ran.stderr)


@in_ci
def test_the_tests_between_gpus_run_between_cpu_devices():
    """Those of their own; the others are run by tests/processes."""
    ran = subprocess.run(
        [sys.executable, ROOT / "tests/gpu/several_gpus.py", "test_large_exchanges",
         "test_products_in_loops_and_of_global_arrays"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "process 0: test_large_exchanges over in_process: ok" in ran.stdout
    assert "process 0: all over in_process: ok" in ran.stdout


def test_a_dead_gpu_is_found_by_touching_it():
    conftest = load(ROOT / "tests/gpu/conftest.py")

    def fail():
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\nand more")

    assert conftest.why_the_gpu_is_dead(fail) == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert conftest.why_the_gpu_is_dead(lambda: None) is None
