"""Several processes: every operation, every failure, and how jobs end."""

import os
import re
import resource
import signal
import subprocess
import sys

import pytest
from launching import PROGRAMS, command, free_address, in_shared_memory, launch

from jax_cp_dispatch._ranks.processes import coordination


def test_every_operation(tmp_path, monkeypatch):
    """Cached programs would not meet."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    length = [] if os.environ.get("TESTS") == "all" else ["--short"]
    done = launch(PROGRAMS / "suite.py", *length, devices=2)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    for process in range(2):
        assert f"[{process}] all 13 ok\n" in done.stdout
    assert not (tmp_path / "cache").exists()


def test_every_failure():
    """One trial of each kind; the last ones kill a process each, and the others survive."""
    before = in_shared_memory()
    # The others still have many deadlines to wait for when the first process has been killed.
    done = launch(PROGRAMS / "failures.py", processes=4, grace=1000)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr[-4000:]
    for process in range(4):
        kinds = "late", "shapes", "operation", "metadata", "constants", "batch", "stop"
        for kind in kinds:
            assert f"[{process}] {kind}: 1 of 1" in done.stdout, done.stdout
    for process in range(3):
        for kind in "kill", "gemm late", "gemm shapes", "gemm stop":
            assert f"[{process}] {kind}: 1 of 1" in done.stdout, done.stdout
    for process in range(2):
        for kind in "gemm kill", "ring shapes":
            assert f"[{process}] {kind}: 1 of 1" in done.stdout, done.stdout
    assert in_shared_memory() <= before


def test_training_ends_when_a_process_is_killed_and_resumes_bit_by_bit(tmp_path):
    """The others get an error that names the process; the launcher names it too."""
    lost, steps = 1, 4
    program = PROGRAMS / "lost_in_training.py", str(tmp_path), str(steps)
    killed = launch(*program, str(lost), grace=60)
    assert killed.returncode == 128 + signal.SIGKILL, killed.stdout + killed.stderr[-4000:]
    (pid,) = re.findall(rf"launch: process {lost} \(pid (\d+)\) ended with SIGKILL", killed.stderr)
    ended = rf"expected ranks \[\d\] of process {lost} \(pid {pid}\), seen: it has ended"
    assert re.search(rf"\[0\] .*{ended}", killed.stderr), killed.stderr[-4000:]
    resumed = launch(*program)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr[-4000:]
    losses = [re.findall(r"step (\d+): (\S+)", done.stdout) for done in (killed, resumed)]
    assert [[step for step, _ in found] for found in losses] == [["1", "2", "3"], ["3", "4"]]
    assert losses[0][-1] == losses[1][0]  # step 3, before and after


@pytest.mark.parametrize("wrong", ["host", "version"])
def test_processes_that_cannot_share_memory(wrong):
    done = launch(PROGRAMS / "choices.py", wrong)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"[0] {wrong} ok\n" in done.stdout
    assert f"[1] {wrong} ok\n" in done.stdout


def test_mistakes_before_initialize_are_reported(monkeypatch):
    """Without these errors, every process would silently compute alone, or on more devices."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    done = launch("-m", "mistakes")
    assert done.returncode == 0, done.stderr
    said = [
        f"[{n}] {what} is reported" for n in range(2) for what in ("devices", "forgotten", "late")
    ]
    assert sorted(done.stdout.splitlines()) == said


@pytest.mark.parametrize("how, code", [("explicitly", 0), ("exits", 3)])
def test_process_0_leaves_last(tmp_path, how, code):
    """Without the launcher: it hosts JAX's service. An exchange that it misses has a deadline."""
    codes, said = run_job(tmp_path, how)
    assert codes == [code, 0], said
    assert said[1][0] == "missing ranks [0]\ndone\n"


@pytest.mark.parametrize(
    "how, code, named",
    [("raises", 1, "process 0 fails"), ("leaves", 0, "s and leaves; JAX ends processes [1]")],
)
def test_process_0_does_not_wait_without_end(tmp_path, how, code, named):
    """If an exception ends it, or the others take too long: they may wait for it themselves."""
    codes, said = run_job(tmp_path, how)
    assert codes == [code, -signal.SIGABRT], said
    assert "done" not in said[1][0]
    assert named in said[0][1]


def run_job(tmp_path, how):
    """Runs ends.py in two processes without the launcher; returns exit codes and outputs."""
    address = free_address()
    job = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / "ends.py", address, "2", str(process), tmp_path, how],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    said = [process.communicate(timeout=1200) for process in job]
    return [process.returncode for process in job], said


def test_too_few_open_files_are_refused_before_gloo_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import jax, jax_cp_dispatch\njax_cp_dispatch.initialize()\njax.devices()\n")
    limit = resource.RLIMIT_NOFILE, (18, 18)
    done = subprocess.run(
        command(program, processes=2, grace=5),
        preexec_fn=lambda: resource.setrlimit(*limit),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    said = "RuntimeError: initialize: this process may open 18 files; with 2 processes it needs"
    assert done.returncode == 1 and said in done.stderr and "epoll" not in done.stderr


def test_open_files_of_collectives_are_counted(monkeypatch):
    """Between all devices: 8 devices connect to 15 others each."""
    monkeypatch.setattr(coordination.resource, "getrlimit", lambda what: (100, 4096))
    warned = "may open 100 files. XLA's collectives over all devices of 2 processes need about"
    with pytest.warns(RuntimeWarning, match=warned):
        coordination.check_open_files(2, 8)
    with pytest.raises(RuntimeError, match=r"with 64 processes it needs \d+ or more. Raise the"):
        coordination.check_open_files(64, 1)
    unlimited = coordination.resource.RLIM_INFINITY
    monkeypatch.setattr(coordination.resource, "getrlimit", lambda what: (unlimited, unlimited))
    coordination.check_open_files(64, 64)
