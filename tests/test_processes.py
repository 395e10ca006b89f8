"""Several processes: the suite of every operation, in the processes of a launcher."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent
SUITE = TESTS / "processes" / "suite.py"


def launch(program, *arguments, processes=2, devices=1, grace=30.0, environment=None):
    options = [f"--processes={processes}", f"--devices={devices}", f"--grace={grace}"]
    return subprocess.run(
        [sys.executable, "-m", "jax_cp_dispatch.launch", *options, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=TESTS.parent,
        env={**os.environ, **(environment or {})},
    )


@pytest.mark.parametrize("processes, devices", [(2, 2), (4, 1)])
def test_every_operation(processes, devices):
    done = launch(SUITE, processes=processes, devices=devices)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    for process in range(processes):
        assert f"[{process}] 10 ok\n" in done.stdout
