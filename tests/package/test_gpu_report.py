"""The report of one GPU, rehearsed without one: its steps, their limits, and the smoke table."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_report.sh"
TOOLS = ("no nvidia-smi", "no /usr/local/cuda/bin/", "no nvcc")  # of a GPU's machine


def load(path):
    spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_step_can_start_and_all_fit_nine_minutes(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    ran = subprocess.run(
        [SCRIPT, "--dry-run", tmp_path],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    steps = [line.split("\t") for line in ran.stdout.splitlines() if line.count("\t") == 3]
    assert len(steps) > 20, ran.stdout + ran.stderr
    for status, _, name, what in steps:
        assert status == "0" or what.startswith(TOOLS), f"{name}: {what}"
    (limits,) = re.findall(r"limits: (\d+) s of 530", ran.stdout)
    assert 0 < int(limits) <= 530
    assert not any(tmp_path.iterdir())


def test_the_smoke_table_has_a_line_for_each_operation():
    lines = re.findall(r"^smoke (\w+)", SCRIPT.read_text(), re.MULTILINE)
    assert lines == list(load(ROOT / "tests/gpu/smoke.py").LINES)


def test_a_line_without_a_gpu_names_the_reason():
    ran = subprocess.run(
        [sys.executable, ROOT / "tests/gpu/smoke.py", "dispatch"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 1
    assert re.match(r"dispatch: (no GPU is here|the package was built without CUDA)", ran.stderr)


def test_a_dead_gpu_is_found_by_touching_it():
    conftest = load(ROOT / "tests/gpu/conftest.py")

    def fail():
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\nand more")

    assert conftest.why_the_gpu_is_dead(fail) == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert conftest.why_the_gpu_is_dead(lambda: None) is None
