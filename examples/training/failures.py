"""Kills a run, or one of its processes; resumes it, and compares with a run that was not killed.

Losses and gradient norms have to be equal bit by bit.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from .report import read_history

STEPS, SAVE_EVERY, LAST = 10, 4, 6  # killed after the step LAST, or soon after
LIMIT, LIMIT_AFTER_LOSS = 1800, 600  # seconds; for a busy machine
PROCESSES, LOST = 4, 2  # the process LOST of PROCESSES is killed


def kill_and_resume(options: argparse.Namespace) -> None:
    """Kills the whole run."""
    program = [sys.executable, *_program(options), "--mesh", *map(str, options.mesh)]

    def kill(process: subprocess.Popen) -> None:
        process.kill()
        process.wait()

    last = _compare(program, kill)
    print(f"killed after step {last}, resumed: the same curve: verified")


def lose_a_process(options: argparse.Namespace) -> None:
    """Kills one process of a run in several, whose ranks share every document.

    The others get an error at once, and the launcher names the process and ends.
    """
    launch = [f"--processes={PROCESSES}", "--devices=1", "--grace=10", *_program(options)]
    program = [sys.executable, "-m", "jax_cp_dispatch.launch", *launch, "--mesh"]
    program += ["1", str(PROCESSES), "1"]

    def kill(launcher: subprocess.Popen) -> None:
        children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        processes = [int(pid) for pid in children.read_text().split()]
        os.kill(processes[LOST], signal.SIGKILL)
        _, said = launcher.communicate(timeout=LIMIT_AFTER_LOSS)
        assert launcher.returncode == 128 + signal.SIGKILL, launcher.returncode
        assert f"launch: process {LOST} (pid {processes[LOST]}) ended with SIGKILL" in said, said
        # By the package's exchange, or by XLA's all-reduce of gradients, where the others were.
        assert f"[{LOST}] of process {LOST}" in said or "Connection closed by peer" in said, said

    last = _compare(program, kill)
    print(f"lost a process after step {last}, resumed: the same curve: verified")


def _program(options: argparse.Namespace) -> list[str]:
    names = ("algorithm", "pattern", "batch", "columns", "layers", "dtype", "rate", "seed")
    program = [str(pathlib.Path(__file__).parents[1] / "07_train.py")]
    program += [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--workers={options.workers}"]
    program += [f"--{name}={getattr(options, name)}" for name in names]
    return program + ([f"--folder={options.folder}"] if options.folder else [])


def _compare(program: list[str], kill: Any) -> int:
    """Returns the last step of the run that was killed."""
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = (pathlib.Path(folder, name) for name in ("whole", "killed"))
        complete: Any = {"check": True, "timeout": LIMIT}
        subprocess.run([*program, f"--out={whole}"], **complete)
        process = subprocess.Popen([*program, f"--out={killed}"], stderr=subprocess.PIPE, text=True)
        try:
            _wait_for_step(process, killed / "history.jsonl", LAST)
            kill(process)
        finally:
            process.kill()
            process.wait()
        last = len(read_history(killed / "history.jsonl"))
        subprocess.run([*program, f"--out={killed}", "--resume"], **complete)
        curves = [
            [(line["loss"], line["gradient_norm"]) for line in read_history(path / "history.jsonl")]
            for path in (whole, killed)
        ]
    if len(curves[0]) != STEPS or curves[0] != curves[1]:
        raise AssertionError(f"the resumed run differs from the whole one: {curves}")
    return last


def _wait_for_step(process: subprocess.Popen, history: pathlib.Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT
    while len(read_history(history)) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended or hung before step {step}")
        time.sleep(0.05)
