"""The self-test of `ragged_all_to_all` in a job: two real processes, CPU devices as their GPUs.

XLA's CPU backend lacks the operation; a stand-in made from an all-gather moves rows between the
processes. What NCCL does is not tested here.
"""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

PROCESS = pathlib.Path(__file__).with_name("ragged_process.py")


@pytest.mark.parametrize(
    "scene, may, reason",
    [
        ("right", True, None),
        ("wrong on one", False, "ragged_all_to_all failed its self-test"),
        ("not implemented", False, "ragged_all_to_all cannot run here: UNIMPLEMENTED"),
        ("late", False, "ragged_all_to_all: not all processes came within 3 s"),
    ],
)
def test_all_processes_choose_alike(scene, may, reason):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, PROCESS, address, str(process), scene],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error
        assert f"chose {may}: " in out, out + error
        assert ("chose True: []" in out) if reason is None else (reason in out), out
