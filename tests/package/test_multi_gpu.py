"""The benchmark of several GPUs on two CPU processes, started by its script, and as by Slurm."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from in_ci import in_ci

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


@in_ci
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


@in_ci
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


@in_ci
def test_rates_are_those_of_the_bytes_that_leave(measured):
    rows = [row for row in measured[0]["rows"] if row["section"] == "movement"]
    assert {row["bytes_per_gpu"] for row in rows} == {1 << 16}
    for row in (row for row in rows if "payload_GB_per_s" in row):
        assert row["payload_GB_per_s"] == pytest.approx(
            1e-3 * row["bytes_per_gpu"] / row["us"], 1e-3
        )
        leaving = 1 if row["what"] == "copy to the next GPU" else 1 / 2  # of two ranks
        assert row["bus_GB_per_s"] == pytest.approx(leaving * row["payload_GB_per_s"], rel=1e-3)


def test_a_closed_gate_ends_the_benchmark_and_is_in_the_file(tmp_path):
    """The processes cannot start, so no section begins; nothing is measured after the first."""
    output = tmp_path / "report.json"
    said = ends(start(*TINY, output, JAX_PLATFORMS="absent", PROCESSES="1"), code=1)
    assert "nothing is measured" in said
    (row,) = json.loads(output.read_text())["rows"]
    assert row["section"] == "gate" and "absent" in row["error"]


def test_a_section_that_does_not_begin_is_in_the_file(tmp_path, monkeypatch):
    sys.path.insert(0, str(SCRIPT.parent))
    import multi_gpu  # pyright: ignore[reportMissingImports]

    output, in_between = tmp_path / "report.json", []
    read = lambda: json.loads(output.read_text())
    kept = {"section": "gemm", "us": 3}
    earlier = {"title": "two GPUs", "topology": ["NV18"], "rows": [kept, {"section": "movement"}]}
    output.write_text(json.dumps(earlier))

    def make_sections(*_):
        in_between.extend(read()["rows"])
        raise RuntimeError("no GPU")

    monkeypatch.setattr(multi_gpu, "make_sections", make_sections)
    arguments = ["", "--sections", "movement", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert multi_gpu.main() == 1
    assert in_between == [kept, {"section": "movement", "error": multi_gpu.NOT_OVER}]
    assert read()["rows"] == [kept, {"section": "movement", "error": "RuntimeError: no GPU"}]
    assert (read()["title"], read()["topology"]) == ("two GPUs", ["NV18"])
    monkeypatch.setenv("PROCESS_ID", "1")
    before = output.read_text()
    assert multi_gpu.main() == 1 and output.read_text() == before  # process 0 writes


def test_exchanges_say_how_much_memory_they_need():
    """Two halves of rows and tags for each channel; calls that are alike share one."""
    sys.path.insert(0, str(SCRIPT.parent))
    import multi_gpu_movement as movement  # pyright: ignore[reportMissingImports]
    import multi_gpu_programs as programs  # pyright: ignore[reportMissingImports]

    from jax_cp_dispatch.bench_command.ranks import Ranks

    case = movement._Case(Ranks.of_devices(4, 1), 1 << 16, True, 16)
    halves = 2 * (case.num_bytes + 8 * case.tokens)
    of = lambda *names: programs.symmetric_bytes(case.programs[name] for name in names)
    assert halves <= of("dispatch") <= halves + (1 << 17)
    assert of("dispatch", "dispatch beside a GEMM") == of("dispatch")
    assert of("dispatch", "combine") > 2 * halves
    assert of("all_to_all of equal parts", "GEMM") == 0
