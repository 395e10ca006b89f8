"""The launcher: output, exit codes, signals, and what the system lacks."""

import signal
import subprocess
import sys

import pytest
from launching import command

from jax_cp_dispatch import launch as launcher


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
