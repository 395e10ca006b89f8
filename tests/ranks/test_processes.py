"""Several processes: every operation, every failure, how jobs start and end, the launcher."""

import re
import resource
import signal
import subprocess
import sys

import pytest
from in_ci import in_ci
from launching import PROGRAMS, command, free_address, in_shared_memory, launch, run_job

from jax_cp_dispatch import launch as launcher
from jax_cp_dispatch._ranks.processes import coordination  # inner: limits of the system

STARTS = PROGRAMS / "starts.py"


@pytest.mark.parametrize(
    "length", [["--short"], pytest.param([], marks=in_ci)], ids=["short", "all"]
)
def test_every_operation(tmp_path, monkeypatch, length):
    """Cached programs would not meet."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
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
    lost = 1
    program = STARTS, "train", str(tmp_path), "4"
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


@pytest.mark.parametrize("program", ["mistakes", "other_host", "other_version"])
def test_starts(program, monkeypatch):
    """As a module, too: mistakes before `initialize`, and processes that share no memory."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    done = launch("-m", "starts", program)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert {f"[{n}] {program}: done" for n in range(2)} <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    "how, codes, named",
    [
        ("explicitly", [0, 0], ""),
        ("exits", [3, 0], ""),
        ("raises", [1, -signal.SIGABRT], "process 0 fails"),
        ("leaves", [0, -signal.SIGABRT], "s and leaves; JAX ends processes [1]"),
    ],
)
def test_process_0_leaves_last(tmp_path, how, codes, named):
    """Without the launcher: it hosts JAX's service. An exchange that it misses has a deadline.

    It does not wait without end: if an exception ends it, or the others take too long, these may
    wait for it themselves.
    """
    address = free_address()
    places = [(address, "2", str(process), str(tmp_path), how) for process in range(2)]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    found, said = run_job([(STARTS, "end", *place) for place in places], environment)
    assert found == codes, said
    if codes[1] == 0:
        assert said[1][0] == "missing ranks [0]\nend: done\n"
    assert "end: done" not in said[1][0] or codes[1] == 0
    assert named in said[0][1]


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


# ---- The launcher.


def test_the_launcher_forwards_output_and_ends_all_processes(tmp_path):
    """It prints each process's output, returns the first nonzero code, and ends stuck processes."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys, time\n"
        "print(os.environ['JAX_PROCESS_ID'], sys.argv[1:], os.environ['JAX_NUM_CPU_DEVICES'])\n"
        "sys.stdout.flush()\n"
        f"started = pathlib.Path({str(tmp_path / 'started')!r})\n"
        "if os.environ['JAX_PROCESS_ID'] == '0':\n"
        "    started.touch()\n"
        "    time.sleep(1000)\n"
        "while not started.exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(7)\n"
    )
    job = command(program, "--an", "argument", devices=3, grace=0.5)
    done = subprocess.run(job, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 7
    assert "[0] 0 ['--an', 'argument'] 3\n" in done.stdout
    assert "[1] 1 ['--an', 'argument'] 3\n" in done.stdout


@pytest.mark.parametrize("grace", ["nan", "inf", "-inf", "-1"])
def test_a_grace_that_is_no_time_is_refused(capsys, grace):
    with pytest.raises(SystemExit) as end:
        launcher.main([f"--grace={grace}", "missing.py"])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    message = f"error: --grace is {grace}; it needs to be a number of seconds from 0"
    assert message in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    "limits, output, processes, message",
    [
        ("ulimit -n 24", "/dev/null", 8, "cannot start 8 processes: Too many open files."),
        ("true", "/dev/full", 2, "cannot write the output: No space left on device."),
    ],
)
def test_the_launcher_says_what_the_system_lacks(tmp_path, limits, output, processes, message):
    """In one line, with exit code 2; a full output ends no process."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib\n"
        "print('x' * 100_000)\n"
        f"(pathlib.Path({str(tmp_path)!r}) / os.environ['JAX_PROCESS_ID']).touch()\n"
    )
    command = f"{limits}; exec {sys.executable} -m jax_cp_dispatch.launch --processes={processes}"
    done = subprocess.run(
        ["bash", "-c", f"{command} {program} > {output}"],
        stderr=subprocess.PIPE, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"launch: {message}" in done.stderr
    if output == "/dev/full":
        assert all((tmp_path / str(process)).exists() for process in range(processes))


def test_the_launcher_forwards_signals(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('stopped')))\n"
        "print('up')\ntime.sleep(1000)\n"
    )
    job = subprocess.Popen(command(program), stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
    job.send_signal(signal.SIGTERM)
    assert sorted(job.communicate(timeout=1200)[0].splitlines()) == ["[0] stopped", "[1] stopped"]
    assert job.returncode == 128 + signal.SIGTERM
