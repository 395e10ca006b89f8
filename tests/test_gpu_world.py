"""Two real processes agree on a GPU transport; their GPUs are pretended, what they tell is not."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

PROCESS = pathlib.Path(__file__).with_name("gpu_world_process.py")
SLABS = {"nvshmem": ["slabs [100, 200]"] * 2, "ipc": ["slabs [5000, 7000]", "slabs [7000, 5001]"]}


@pytest.mark.parametrize(
    "scene, chosen, reason, slabs",
    [
        ("nvshmem", "nvshmem", "2 processes, one GPU each", SLABS["nvshmem"]),
        ("nvshmem fails on one", "cuda_ipc", "process 1: initialize: NVSHMEM did", SLABS["ipc"]),
        ("no gpu on one", "xla", "process 1: no GPU is here: no driver", None),
    ],
)
def test_all_processes_choose_alike(scene, chosen, reason, slabs):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_CP_DISPATCH_SYMMETRIC_BYTES": "2097152"}
    processes = [
        subprocess.Popen(
            [sys.executable, PROCESS, address, str(process), scene],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (out, error) in enumerate(outputs):
        assert processes[number].returncode == 0, error
        assert f"chose {chosen}: " in out and reason in out, out
        if slabs is None:
            assert "slabs" not in out
        else:
            assert f"{slabs[number]} of 2097152" in out
