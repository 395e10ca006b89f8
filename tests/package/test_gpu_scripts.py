"""The scripts that test and measure GPUs, without one: the report of one, the benchmark of several.

The benchmark runs on two CPU processes, started by its script, and as by Slurm.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from in_ci import in_ci
from launching import free_address
from scripts import load

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
REPORT, SCRIPT = BENCHMARKS / "gpu_report.sh", BENCHMARKS / "multi_gpu.sh"
TOOLS = ("no nvidia-smi", "no /usr/local/cuda/bin/", "no nvcc")  # of a GPU's machine
sys.path.insert(0, str(BENCHMARKS))

import multi_gpu  # noqa: E402  # pyright: ignore[reportMissingImports]
import multi_gpu_movement as movement  # noqa: E402  # pyright: ignore[reportMissingImports]
import multi_gpu_programs as programs  # noqa: E402  # pyright: ignore[reportMissingImports]


def on_cpu(*command, **more):
    return subprocess.run(
        [sys.executable, *command], env={**os.environ, "JAX_PLATFORMS": "cpu", **more},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


# ---- The report of one GPU: its steps, their limits, and the smoke table.


def rehearse(folder, *options):
    """Returns the steps of a dry run as (status, limit, name, what), and what it leaves out."""
    ran = subprocess.run(
        [REPORT, "--dry-run", *options, folder],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    steps = [line.split("\t") for line in ran.stdout.splitlines() if line.count("\t") == 3]
    (names,) = re.findall(r"^left out of \d+ s: (.*)$", ran.stdout, re.MULTILINE)
    assert not any(folder.iterdir()), ran.stderr
    return steps, [] if names == "nothing" else names.split(", ")


@in_ci
def test_every_step_can_start_or_is_left_out_by_name(tmp_path):
    everything, left_out = rehearse(tmp_path, "--budget", "3600")
    assert len(everything) > 25 and not left_out
    for status, _, name, what in everything:
        assert status == "0" or what.startswith(TOOLS), f"{name}: {what}"
    first = ["machine", "build", "import", "warm-up", "kernels", "kernel times", "smoke: dispatch"]
    assert [name for _, _, name, _ in everything[: len(first)]] == first

    steps, left_out = rehearse(tmp_path)
    assert [step[2] for step in everything] == [step[2] for step in steps] + left_out
    limits = {name: int(limit) for _, limit, name, _ in everything}
    for _, limit, name, _ in steps:
        assert min(limits[name], 5) <= int(limit) <= limits[name]
    # What runs beside other steps is stopped after its limit, but usually takes less.
    usual = {"smoke": 5, "warm-": 10, "betwe": 60}
    assert sum(min(int(n), usual.get(name[:5], 999)) for _, n, name, _ in steps) <= 540
    assert left_out, "the steps' own limits add up to more than 9 minutes"


def test_the_script_names_what_its_programs_know():
    """A test for each line of the smoke table; each part of the kernels' tests."""
    script = REPORT.read_text()
    lines = " ".join(re.findall(r"^smoke \d+ (.+)$", script, re.MULTILINE)).split()
    tests = re.findall(r'^    ([\w| ]+)\) id="(\w+\.py)::(\w+)\[', script, re.MULTILINE)
    assert lines == [line for names, _, _ in tests for line in names.split(" | ")]
    for _, file, test in tests:
        assert f"def {test}(" in (ROOT / "tests/gpu" / file).read_text()
    parts = set(re.findall(r'"\$kernels" ([a-z-]+)', script))
    source = (ROOT / "tests/native/test_kernels.cu").read_text()
    assert {"attention", "one-launch", "time"} <= parts
    assert all(f'name == "{part}"' in source or f'name != "{part}"' in source for part in parts)


@in_ci
def test_a_line_without_a_gpu_names_the_reason():
    test = ROOT / "tests/gpu/test_one_gpu.py::test_donated_storage_and_buffers"
    ran = on_cpu("-m", "pytest", "-q", test, JAX_CP_DISPATCH_REQUIRE_GPU="1")
    reasons = (
        "no GPU is here|the package was built without CUDA|the extension '_cuda' does not load"
    )
    assert ran.returncode == 1 and re.search(reasons, ran.stdout)


@in_ci
def test_the_tests_between_gpus_run_between_cpu_devices():
    """Those of their own; the others are run by tests/processes."""
    names = "test_large_exchanges", "test_attention_by_rings"
    ran = on_cpu(ROOT / "tests/gpu/several_gpus.py", *names, JAX_NUM_CPU_DEVICES="2")
    assert ran.returncode == 0, ran.stderr
    assert "process 0: test_large_exchanges over in_process: ok" in ran.stdout
    assert "process 0: all over in_process: ok" in ran.stdout


def test_a_dead_gpu_is_found_by_touching_it():
    conftest = load("tests/gpu/conftest.py")

    def fail():
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\nand more")

    assert conftest.why_the_gpu_is_dead(fail) == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert conftest.why_the_gpu_is_dead(lambda: None) is None


# ---- The benchmark of several.


def free_port():
    return free_address().split(":")[1]


def start(output, **more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    given = {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "PORT": free_port()}
    return subprocess.Popen(
        [SCRIPT, "--sizes", "tiny", "--output", output], env=kept | given | more, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ends(process, code=0):
    said, _ = process.communicate(timeout=900)
    assert process.returncode == code, said
    return said


@in_ci
def test_every_section_is_measured(tmp_path):
    """The gate is run by processes of the script, all else by two tasks, as srun starts them."""
    output = tmp_path / "report.json"
    assert "2 processes on 1 hosts" in ends(start(output, PROCESSES="2", SECTIONS="gate"))
    task = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_NODES": "1", "SECTIONS": "movement", "PORT": free_port()}  # fmt: skip
    ranks = [{"SLURM_PROCID": str(p), "SLURM_LOCALID": str(p)} for p in range(2)]
    tasks = [start(output, **task, **rank) for rank in ranks]
    said, _ = [ends(task) for task in tasks]
    report = json.loads(output.read_text())
    assert report["title"].startswith("2 processes") and report["topology"]
    assert report["environment"]["JAX_PLATFORMS"] == "cpu"
    rows = report["rows"]
    names = ["gate", "movement", "gemm", "causal 64", "packed 64", "maxtext"]
    assert list(dict.fromkeys(row["section"] for row in rows)) == names
    before = said.split("section=movement")[0]
    assert all(f"{name}: needs " in before for name in names[1:]) and "for exchanges: " in before
    for row in rows:
        assert "error" not in row
        if row["section"] == "gate":
            assert row["is_right"] and row["path"] == "shared_memory"
        elif "left_out" not in row:
            assert row["us"] <= row["p99_us"] and row["samples"] == 4 and row["path"]
        if "payload_GB_per_s" in row:  # rates are those of the bytes that leave
            payload = 1e-3 * row["bytes_per_gpu"] / row["us"]
            assert row["payload_GB_per_s"] == pytest.approx(payload, rel=1e-3)
            leaving = 1 if row["what"] == "copy to the next GPU" else 1 / 2  # of two ranks
            assert row["bus_GB_per_s"] == pytest.approx(leaving * payload, rel=2e-3)
    # Rows name what moved them, or why they are left out.
    paths = {row["what"]: row.get("path", row.get("left_out")) for row in rows}
    for what, path in {
        "dispatch": "shared_memory: 1 dispatch",
        "all_to_all of equal parts": "XLA: 1 all-to-all",
        "dispatch by XLA": "XLA: ",
        "all_gather_matmul, ring": "shared_memory: 1 gemm",
        "placed, forward and backward": "shared_memory: ",
        "one GPU alone, forward": "nothing moves",
        "MaxText": "it is not installed",
    }.items():
        assert paths[what].startswith(path)


@in_ci
def test_a_closed_gate_ends_the_benchmark_and_is_in_the_file(tmp_path):
    """The processes cannot start, so no section begins; nothing is measured after the first."""
    output = tmp_path / "report.json"
    said = ends(start(output, JAX_PLATFORMS="absent", PROCESSES="1"), code=1)
    assert "nothing is measured" in said
    (row,) = json.loads(output.read_text())["rows"]
    assert row["section"] == "gate" and "absent" in row["error"]


def test_a_section_that_does_not_begin_is_in_the_file(tmp_path, monkeypatch):
    """The rows of other sections stay; only process 0 writes."""
    output, in_between = tmp_path / "report.json", []
    rows = lambda: json.loads(output.read_text())["rows"]
    kept, own = {"section": "gemm", "us": 3}, {"section": "movement"}
    output.write_text(json.dumps({"title": "two GPUs", "topology": ["NV18"], "rows": [kept, own]}))

    def make_sections(*_):
        in_between.extend(rows())
        raise RuntimeError("no GPU")

    monkeypatch.setattr(multi_gpu, "make_sections", make_sections)
    monkeypatch.setattr(sys, "argv", ["", "--sections", "movement", "--output", str(output)])
    assert multi_gpu.main() == 1
    assert in_between == [kept, {**own, "error": multi_gpu.NOT_OVER}]
    assert rows() == [kept, {**own, "error": "RuntimeError: no GPU"}]
    assert json.loads(output.read_text())["title"] == "two GPUs"
    monkeypatch.setenv("PROCESS_ID", "1")
    before = output.read_text()
    assert multi_gpu.main() == 1 and output.read_text() == before


def test_exchanges_say_how_much_memory_they_need():
    """Two halves of rows and tags for each channel; calls that are alike share one."""
    case = movement._Case(movement.Ranks.of_devices(4, 1), 1 << 16, True, 16)
    halves = 2 * (case.num_bytes + 8 * case.tokens)
    of = lambda *names: programs.symmetric_bytes(case.programs[name] for name in names)
    assert halves <= of("dispatch") <= halves + (1 << 17)
    assert of("dispatch", "dispatch beside a GEMM") == of("dispatch")
    assert of("dispatch", "combine") > 2 * halves
    assert of("all_to_all of equal parts", "GEMM") == 0
