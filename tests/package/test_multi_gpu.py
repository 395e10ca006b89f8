"""The benchmark of several GPUs on two CPU processes, started by its script, and as by Slurm."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/multi_gpu.sh"
TINY = ("--sizes", "tiny", "--output")


def environment(**more):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return kept | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "PORT": port} | more


def start(*arguments, **more):
    return subprocess.Popen(
        [SCRIPT, *arguments], env=environment(**more), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ends(process, code=0):
    said, _ = process.communicate(timeout=900)
    assert process.returncode == code, said
    return said


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The gate is run by processes of the script, all else by two tasks, as srun starts them."""
    output = tmp_path_factory.mktemp("multi") / "report.json"
    said = ends(start(*TINY, output, PROCESSES="2", SECTIONS="gate"))
    assert "2 processes on 1 hosts" in said
    task = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_NODES": "1", "SECTIONS": "movement"}  # fmt: skip
    task["PORT"] = environment()["PORT"]
    ranks = [{"SLURM_PROCID": str(p), "SLURM_LOCALID": str(p)} for p in range(2)]
    said = [ends(task) for task in [start(*TINY, output, **task, **rank) for rank in ranks]]
    return json.loads(output.read_text()), said[0]


def test_every_section_says_its_need_and_is_measured(measured):
    report, said = measured
    rows = report["rows"]
    names = ["gate", "movement", "gemm", "causal 64", "packed 64", "maxtext"]
    assert list(dict.fromkeys(row["section"] for row in rows)) == names
    assert not [row for row in rows if "error" in row]
    before = said.split("section=movement")[0]
    assert all(f"{name}: needs " in before for name in names[1:]) and "for exchanges: " in before
    assert report["title"].startswith("2 processes")
    assert report["environment"]["JAX_PLATFORMS"] == "cpu" and report["topology"]
    for row in rows:
        if row["section"] == "gate":
            assert row["is_right"] and row["path"] == "shared_memory"
        elif "left_out" not in row:
            assert row["us"] <= row["p99_us"] and row["samples"] == 4 and row["path"]


def test_rows_name_what_moved_them(measured):
    paths = {f"{row['section']}: {row['what']}": row.get("path") for row in measured[0]["rows"]}
    assert paths["movement: dispatch"] == "shared_memory: 1 dispatch"
    assert paths["movement: all_to_all of equal parts"] == "XLA: 1 all-to-all"
    assert paths["movement: copy to the next GPU"] == "XLA: 1 collective-permute"
    assert paths["movement: dispatch by XLA"].startswith("XLA: ")
    assert paths["gemm: all_gather_matmul, ring"] == "shared_memory: 1 gemm"
    assert paths["packed 64: placed, forward and backward"].startswith("shared_memory: ")
    assert paths["packed 64: one GPU alone, forward"] == "nothing moves"
    left_out = {row["what"]: row["left_out"] for row in measured[0]["rows"] if "left_out" in row}
    assert "transformer_engine" in left_out["Transformer Engine's ring"]
    assert left_out["MaxText"].startswith("it is not installed")


def test_a_failure_becomes_a_row_and_until_then_the_file_says_that_it_did_not_end(tmp_path):
    sys.path.insert(0, str(SCRIPT.parent))
    import common  # pyright: ignore[reportMissingImports]

    output = tmp_path / "report.json"
    rows_of_file = lambda: json.loads(output.read_text())["rows"]
    report = common.Report(output, "title", topology=["GPU0"])
    in_between = []

    def measured():
        in_between.extend(rows_of_file())
        yield {"what": "first"}
        raise RuntimeError("out of memory")

    report.section("movement", measured, unless_it_ends={"error": "it did not end"})
    assert in_between == [{"error": "it did not end"}]
    assert rows_of_file() == [
        {"what": "first"},
        {"error": "RuntimeError: out of memory", "what": "movement"},
    ]
    assert report.has_failed and json.loads(output.read_text())["topology"] == ["GPU0"]
