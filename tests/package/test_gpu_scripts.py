"""The scripts that test and measure GPUs, without one: the report of one, the benchmark of several.

The benchmark runs on two CPU processes, started by its script, and as by Slurm. Stubs stand for
what else a machine with GPUs has.
"""

import collections
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
from in_ci import in_ci
from launching import free_address
from scripts import load

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
REPORT, SCRIPT = BENCHMARKS / "gpu_report.sh", BENCHMARKS / "multi_gpu.sh"
LAUNCHED = ROOT / "tests/gpu/launched.py"
STUBS = ROOT / "tests/support/eight_gpus"  # programs of a machine with eight GPUs
sys.path.insert(0, str(BENCHMARKS))

import gpu_machine  # noqa: E402  # pyright: ignore[reportMissingImports]
import multi_gpu  # noqa: E402  # pyright: ignore[reportMissingImports]
import multi_gpu_attention as attention  # noqa: E402  # pyright: ignore[reportMissingImports]
import multi_gpu_gate as gate  # noqa: E402  # pyright: ignore[reportMissingImports]
import multi_gpu_movement as movement  # noqa: E402  # pyright: ignore[reportMissingImports]
import multi_gpu_programs as programs  # noqa: E402  # pyright: ignore[reportMissingImports]


def on_cpu(*command, **more):
    return subprocess.run(
        [sys.executable, *command], env={**os.environ, "JAX_PLATFORMS": "cpu", **more},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


# ---- The report of one GPU: what it starts.


def test_the_script_names_what_its_programs_know():
    """A test for each line of the smoke table; each part of the kernels' tests."""
    script = REPORT.read_text()
    lines = " ".join(re.findall(r"^smoke \d+ (.+)$", script, re.MULTILINE)).split()
    tests = re.findall(r'^    ([\w| ]+)\) id="(\w+\.py)::(\w+)\[', script, re.MULTILINE)
    assert lines == [line for names, _, _ in tests for line in names.split(" | ")]
    for _, file, test in tests:
        assert f"def {test}(" in (ROOT / "tests/gpu" / file).read_text()
    assert "not over after" in script and "not over after" in LAUNCHED.read_text()
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


# ---- The report on a machine with eight GPUs, of stubs.

VARIABLES = ("CUDA_", "JAX_", "SLURM_", "XLA_")
INTERRUPTED = "env", "--default-signal=INT"  # also where this test was started in the background


@pytest.fixture
def machine(tmp_path):
    """A tree with the scripts and no package, and the environment of a machine of stubs."""
    root, packages = tmp_path / "root", tmp_path / "packages"
    for folder in ("benchmarks", "csrc", "tests/native", "jax_cp_dispatch", "build/gpu_report"):
        (root / folder).mkdir(parents=True)
    scripts = "gpu_report.sh", "gpu_build.sh", "gpu_machine.py", "multi_gpu.sh"
    files = [f"benchmarks/{x}" for x in scripts]
    for file in (*files, "CMakeLists.txt", "csrc/cuda_compiler.cmake"):
        shutil.copy(ROOT / file, root / file)
    for name, version in (("jax-cuda13-plugin", "0.11.2"), ("nvidia-nccl-cu13", "2.28.9")):
        place = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (packages / "nanobind.py").write_text("")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(VARIABLES)}
    given = {
        **{"PATH": f"{STUBS / 'limits'}:{STUBS}:{os.environ['PATH']}", "PYTHONPATH": str(packages)},
        **{"PYTHON": str(STUBS / "python"), "REAL": sys.executable, "STUBS": str(STUBS)},
        **{"SOURCE": str(ROOT), "TIMEOUT": str(shutil.which("timeout"))},
        **{"LOG": str(tmp_path / "log"), "DRIVER": "580.82.07", "NVCC": "13.0", "CMAKE": "3.28.3"},
        **{"CUDA_DEVICE_MAX_CONNECTIONS": "1", "LIMIT_OF_STEP": ""},
    }
    return root, kept | given


def report(machine, *options, **more):
    root, environment = machine
    command = [*INTERRUPTED, root / "benchmarks/gpu_report.sh", *options, root / "out"]
    return subprocess.Popen(
        command, env=environment | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def seen(machine):
    """What each step saw: GPUs, connections, its limit, that of processes, its command."""
    lines = pathlib.Path(machine[1]["LOG"]).read_text().splitlines()
    return [tuple(line.split("|", 4)) for line in lines if line.count("|") >= 4]


def test_a_report_of_eight_gpus(machine):
    """Every step sees what it should; what ran out of time or may not run has not failed."""
    said = ends(report(machine, LATE="put and get"), code=3)
    assert said.startswith(
        "found: 8 x NVIDIA H100; links NV18 between all; driver 580.82.07; NCCL 2.28.9; "
        "CUDA_DEVICE_MAX_CONNECTIONS 1\n"
    )
    (out,) = machine[0].glob("out")
    first = (out / "report.txt").read_text().splitlines()[0]
    assert first.startswith(said.splitlines()[0]) and first.endswith(
        "transports: cuda_ipc: passed, nvshmem: passed, put and get: out of time, rates: passed, "
        "one process: passed"
    )
    assert "ran out of time: between GPUs: put and get\nfailed: nothing\n" in said
    whole = json.loads((out / "report.json").read_text())
    assert whole["found"] == first and len(whole["topology"]) == 9
    status = {step["step"]: step["status"] for step in whole["steps"]}
    assert status["between GPUs: put and get"] == "out of time"
    assert status["profile"] == status["open: L2 cache in attention"] == "not permitted"
    assert "run as root" in said and "left out of 3600 s: nothing" in said

    everything = "0,1,2,3,4,5,6,7"
    by_queues = collections.defaultdict(str)
    for gpus, queues, limit, limit_of_processes, command in seen(machine):
        is_between = "test_every_operation" in command or "--sections" in command
        assert gpus == (everything if is_between and "gate.json" not in command else "0"), command
        if limit == "600":
            assert "test_every_operation" in command and limit_of_processes == "590"
        by_queues[queues] += f"{command}\n"
    assert set(by_queues) == {"unset", "1", "32"}
    assert len(by_queues["1"].splitlines()) == 3  # a profile, two tests under MPS
    for name in ("gpu_profile", "--test test_every_method_of_the_products"):
        assert name in by_queues["1"]
    for name in ("test_one_gpu.py", "test_kernels small", "racecheck"):
        assert name in by_queues["32"]
    for name in ("gpu_profile", "test_every_operation", "--sections gate", "4-cuda", "2-cuda"):
        assert name in by_queues["unset"] and name not in by_queues["32"]


def test_steps_without_time_are_left_out_by_name(machine):
    said = ends(report(machine, "--budget", "3"))
    (names,) = re.findall(r"^left out of 3 s: (.*)$", said, re.M)
    assert names.startswith("machine, build, import, kernels, kernel times, smoke: dispatch, ")
    assert "between GPUs: rates, between GPUs: one process, bandwidth" in names
    assert "failed: nothing" in said and names.endswith("racecheck of attention")


def test_a_report_says_at_once_all_that_a_machine_lacks(machine):
    said = ends(report(machine, NVCC="12.8", CMAKE="3.22.1", DRIVER="550.54.15"), code=2)
    (line,) = [x for x in said.splitlines() if x.startswith("this machine lacks: ")]
    for part in ("nvcc 12.8.93 (needs 12.4 to 12.6, or 12.9.1", "cmake 3.22.1 (needs 3.26",
                 "driver 550.54.15, but CUDA 13 needs 580"):  # fmt: skip
        assert part in line
    assert "==" not in said and not pathlib.Path(machine[1]["LOG"]).exists()
    assert "lacks: no nvcc (needs" in ends(report(machine, CUDACXX="absent"), code=2)
    arch = ends(report(machine, "--build-only", ARCHITECTURE="100", DRIVER="none"), code=2)
    assert arch == "this machine lacks: nvcc 13.0.93 does not compile for sm_100\n"
    of = lambda *nvcc: [x for x in gpu_machine.why_no_build("nvcc", nvcc) if "nvcc" in x]
    assert not of(12, 4, 0) and not of(12, 6, 85) and not of(12, 9, 86)
    assert of(12, 3, 107) and of(12, 8, 0) and of(12, 9, 85)


def wait_for(path, number, text):
    end = time.monotonic() + 300  # only a defect takes this long
    while not path.exists() or path.read_text().count(text) < number:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_interrupted_report_is_written(machine):
    running = report(machine, BLOCKS="gpu_exchange.py")
    wait_for(pathlib.Path(machine[1]["LOG"]), 1, "blocks")
    running.send_signal(signal.SIGINT)
    said = ends(running, code=1)
    assert "failed: bandwidth" in said
    steps = json.loads((machine[0] / "out/report.json").read_text())["steps"]
    status = {step["step"]: step["status"] for step in steps}
    assert status["kernels"] == "0" and status["one GPU"] == "left out"


def test_links_of_gpus_and_what_is_unusual():
    topology = ["\x1b[4m\tGPU0\tGPU1\tGPU2\tCPU\x1b[0m", "GPU0\t X \tNV4\tSYS\t0-3",
                "GPU1\tNV4\t X \tSYS\t0-3", "GPU2\tSYS\tSYS\t X \t0-3"]  # fmt: skip
    assert gpu_machine.links(topology) == "links 2 x SYS, 1 x NV4"
    assert gpu_machine.links(["GPU0\t X \t0-3"]) == "no links"
    rest = "80 GiB, 1, 2, 3, 700 W"
    gpus = [f"0, A100, 570.1, {rest}, Disabled, Exclusive_Process",
            f"1, A100, 570.1, {rest}, Enabled, Default"]  # fmt: skip
    line = gpu_machine.describe(
        {"gpus": gpus, "topology": [], "packages": {}, "environment": {"NCCL_DEBUG": "INFO"}}
    )
    for part in ("2 x A100; links unknown", "Exclusive_Process (1 of 2)", "MIG Disabled (1 of 2)",
                 "CUDA_DEVICE_MAX_CONNECTIONS unset; NCCL_DEBUG=INFO"):  # fmt: skip
        assert part in line
    nothing = gpu_machine.describe(
        {"gpus": ["no driver"], "topology": [], "packages": {}, "environment": {}}
    )
    assert nothing.startswith("no GPU (no driver)")


# ---- The benchmark of several.


def test_one_task_of_slurm_starts_a_process_for_each_gpu(machine):
    """As in `srun --pty bash`; of several tasks, each is one process."""
    root, environment = machine
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "0"}
    run = lambda **more: subprocess.run(
        [root / "benchmarks/multi_gpu.sh", "--sizes", "tiny"], env=environment | step | more,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = run(SLURM_NTASKS="1", SECTIONS="gate").stdout
    assert sorted(re.findall(r"^start (.*)$", said, re.M)) == [f"{i} " for i in range(8)]
    assert re.findall(r"^start (.*)$", run(SLURM_NTASKS="8").stdout, re.M) == ["alone a"] * 2
    both = run(SLURM_NTASKS="8", PROCESSES="8")
    assert both.returncode == 2 and "Unset PROCESSES" in both.stderr


def test_an_interruption_reaches_every_process(machine):
    """And the limit ends a section, which then has not failed."""
    root, environment = machine
    command = [*INTERRUPTED, root / "benchmarks/multi_gpu.sh"]
    log = pathlib.Path(environment["LOG"])
    start = lambda **more: subprocess.Popen(
        command, env=environment | {"PROCESSES": "3", "BLOCKS": "gate"} | more, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        running = start()
        wait_for(log, 3, "blocks")
        running.send_signal(number)
        ends(running, code)  # only if all have closed the output
        log.unlink()
    path = environment["PATH"].partition(":")[2]  # with the system's own `timeout`
    said = ends(start(LIMIT="1", PATH=path), code=124)
    assert "gate ran out of time (LIMIT=1)" in said and "nothing is measured" in said


def test_gpus_that_no_process_uses_are_an_error():
    why = multi_gpu.why_gpus_are_idle
    assert why(8, {"a": 8, "b": 8}) is None and why(1, {"a": 8}) is None
    assert str(why(8, {"a": 8, "b": 1})).startswith("1 of 8 GPUs of b would be measured. Start")


class Passed(gate.Gate):
    """Its checks find nothing wrong."""

    _exchanges = _gemms = _attention = lambda self: None


@pytest.mark.parametrize("used, wanted", [("xla", "xla"), ("cuda_ipc", None)])
def test_a_gate_is_open_over_a_transport(used, wanted, monkeypatch):
    assert [row["path"] for row in gate_over(used, wanted, monkeypatch)] == [used] * 3


@pytest.mark.parametrize(
    "used, wanted, needs", [("xla", None, "a transport of this"), ("cuda_ipc", "xla", "xla, but")]
)
def test_a_gate_over_another_path_is_closed(used, wanted, needs, monkeypatch):
    with pytest.raises(ValueError, match=rf"needs {needs}.* {used} serves: .*--transport {used}"):
        gate_over(used, wanted, monkeypatch)


def test_a_gate_is_closed_by_a_call_that_xla_serves(monkeypatch):
    warn = lambda _: warnings.warn("jax_cp_dispatch: gemm: XLA serves this call", stacklevel=1)
    monkeypatch.setattr(Passed, "_gemms", warn)
    with pytest.raises(UserWarning, match="XLA serves"):
        gate_over("cuda_ipc", None, monkeypatch)


def gate_over(used, wanted, monkeypatch):
    monkeypatch.setattr(gate, "transport", lambda: used)
    sizes = dataclasses.replace(programs.SIZES["tiny"], transport=wanted)
    return list(Passed(movement.Ranks.of_devices(2, 1), sizes).rows())


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
    title = report["title"]
    assert title.startswith("2 processes") and "; transport shared_memory (" in title
    assert "; CUDA_DEVICE_MAX_CONNECTIONS unset" in title and report["topology"]
    assert report["environment"]["JAX_PLATFORMS"] == "cpu"
    rows = report["rows"]
    names = ["gate", "gate 1", "movement", "gemm", "causal 64", "packed 64", "maxtext"]
    assert list(dict.fromkeys(row["section"] for row in rows)) == names
    before = said.split("section=movement")[0]
    assert all(f"{name}: needs " in before for name in names[2:]) and "for exchanges: " in before
    for row in rows:
        assert "error" not in row
        if row["section"].startswith("gate"):
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


@in_ci
def test_every_start_leaves_half_of_a_gpu_for_arrays():
    """Eight H100s of 80 GB: with 128K tokens each, an algorithm has processes of its own."""
    ranks = movement.Ranks.of_devices(8, 1)
    starts = [name for name in programs.runs_of(programs.FULL) if name[0] in "cp"]
    assert len(starts) == 4 + 6 and "causal 131072 balanced" in starts
    for name in starts:
        need = attention.Attention(name, ranks, programs.FULL).symmetric_bytes
        assert 0 < need < 40 << 30, f"{name}: {need}"


def test_exchanges_say_how_much_memory_they_need():
    """Two halves of rows and tags for each channel; calls that are alike share one."""
    case = movement._Case(movement.Ranks.of_devices(4, 1), 1 << 16, True, 16)
    halves = 2 * (case.num_bytes + 8 * case.tokens)
    of = lambda *names: programs.symmetric_bytes(case.programs[name] for name in names)
    assert halves <= of("dispatch") <= halves + (1 << 17)
    assert of("dispatch", "dispatch beside a GEMM") == of("dispatch")
    assert of("dispatch", "combine") > 2 * halves
    assert of("all_to_all of equal parts", "GEMM") == 0
