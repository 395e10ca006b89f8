"""Several processes: every operation, every failure, how jobs start and end, the launcher."""

import re
import shlex
import signal
import subprocess

import jax
import pytest
from in_ci import in_ci
from launching import PROGRAMS, command, free_address, in_shared_memory, launch, run_job

from jax_cp_dispatch import initialize, launch as launcher

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
        assert f"[{process}] all 10 ok\n" in done.stdout
    assert not (tmp_path / "cache").exists()


def test_every_failure():
    """One trial of each kind; the last two kill a process each, and the others survive."""
    before = in_shared_memory()
    # The others still have deadlines to wait for when the first process has been killed.
    done = launch(PROGRAMS / "failures.py", processes=3, grace=1000)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr[-4000:]
    assert re.search(r"launch: process 2 \(pid \d+\) ended with SIGKILL", done.stderr)
    assert in_shared_memory() <= before
    kinds = ("late", "shapes", "operation", "metadata", "constants", "batch", "stop", "gemm late")
    kinds += ("gemm shapes", "gemm stop", "ring shapes")
    survivors = {**dict.fromkeys(kinds, 3), "kill": 2, "gemm kill": 1}
    for kind, count in survivors.items():
        for process in range(count):
            assert f"[{process}] {kind}: 1 of 1" in done.stdout, done.stdout


def test_processes_join(monkeypatch):
    """As a module, too: mistakes before `initialize`, and processes that share no memory."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    done = launch("-m", "starts", "joins", devices=2)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert {"[0] joins: done", "[1] joins: done"} <= set(done.stdout.splitlines())


def test_a_job_needs_a_process_that_has_not_used_jax():
    jax.devices()
    message = (
        "^initialize: JAX has already started in this process, with the devices of this process "
        r"alone\. Call initialize before jax\.devices\(\)"
    )
    with pytest.raises(RuntimeError, match=message):
        initialize("127.0.0.1:1", 2, 0)


def test_process_0_leaves_last(tmp_path):
    """Without the launcher: it hosts JAX's service. An exchange that it misses has a deadline.

    It does not wait without end: if an exception ends it, or the others take too long, these may
    wait for it themselves.
    """
    expected = {
        "explicitly": ([0, 0], ""),
        "raises": ([1, -signal.SIGABRT], "process 0 fails"),
        "exits": ([3, 0], ""),
        "leaves": ([0, -signal.SIGABRT], "s and leaves; JAX ends processes [1]"),
    }
    program = STARTS, "ends", tmp_path, *(free_address() for _ in expected)
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    (found,), ((codes, errors),) = run_job([program], environment)
    assert found == 0, errors
    for how, (both, named) in expected.items():
        for process, code in enumerate(both):
            assert f"{how} {process}: {code}\n" in codes, codes
        said = (tmp_path / f"{how}1.out").read_text()
        if both[1] == 0:
            assert said == "missing ranks [0]\nends: done\n"
        assert ("ends: done" in said) == (both[1] == 0)
        assert named in (tmp_path / f"{how}0.err").read_text()


# ---- The launcher.


def test_the_launcher_forwards_output_and_ends_all_processes(tmp_path):
    """It prints each process's output, returns the first nonzero code, and ends stuck processes."""
    program, started = tmp_path / "program.py", tmp_path / "started"
    program.write_text(
        "import os, pathlib, sys, time\n"
        "print(os.environ['JAX_PROCESS_ID'], sys.argv[1:], os.environ['JAX_NUM_CPU_DEVICES'])\n"
        "sys.stdout.flush()\n"
        f"started = pathlib.Path({str(started)!r})\n"
        "if os.environ['JAX_PROCESS_ID'] == '0':\n"
        "    started.touch()\n"
        "    time.sleep(1000)\n"
        "while not started.exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(7)\n"
    )
    done = launch(program, "--an", "argument", devices=3, grace=0.5)
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


def test_the_launcher_names_too_few_open_files(tmp_path):
    """In one line, with exit code 2."""
    (program := tmp_path / "program.py").touch()
    job = shlex.join(command(program, processes=8))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 24; exec {job}"], stderr=subprocess.PIPE, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "launch: cannot start 8 processes: Too many open files." in done.stderr


def test_output_that_cannot_be_written_ends_no_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib\n"
        "print('x' * 100_000)\n"
        f"(pathlib.Path({str(tmp_path)!r}) / os.environ['JAX_PROCESS_ID']).touch()\n"
    )
    with open("/dev/full", "w") as full:
        done = launch(program, out=full)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "launch: cannot write the output: No space left on device." in done.stderr
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()


def test_the_launcher_forwards_signals(tmp_path):
    """Process 0 sends it one when both have started."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('stopped')))\n"
        f"folder, process = pathlib.Path({str(tmp_path)!r}), os.environ['JAX_PROCESS_ID']\n"
        "(folder / process).touch()\n"
        "while process == '0' and not (folder / '1').exists():\n"
        "    time.sleep(0.01)\n"
        "if process == '0':\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(1000)\n"
    )
    done = launch(program)
    assert sorted(done.stdout.splitlines()) == ["[0] stopped", "[1] stopped"]
    assert done.returncode == 128 + signal.SIGTERM
