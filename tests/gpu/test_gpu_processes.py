"""Several processes on one GPU: the same exchanges over CUDA's IPC and over NVSHMEM."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

WORKER = pathlib.Path(__file__).with_name("worker.py")
LIMIT = 100


def run(num_processes, transport, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda",
        "JAX_CP_DISPATCH_GPU_TRANSPORT": transport,
        "JAX_CP_DISPATCH_SYMMETRIC_BYTES": str(64 << 20),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".1",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, address, str(num_processes), str(process), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for process in range(num_processes)
    ]  # fmt: skip
    outputs = []
    try:
        for worker in workers:
            outputs.append(worker.communicate(timeout=LIMIT)[0])
    finally:
        for worker in workers:
            worker.kill()
    return [worker.returncode for worker in workers], outputs


@pytest.mark.parametrize("transport", ["cuda_ipc", "nvshmem"])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_exchanges_between_processes(num_processes, transport):
    codes, outputs = run(num_processes, transport)
    assert codes == [0] * num_processes, "\n".join(outputs)
    for process, output in enumerate(outputs):
        assert f"process {process} over {transport}: ok" in output


def test_a_process_that_does_not_call_is_named_to_the_others():
    codes, outputs = run(2, "cuda_ipc", "--absent", "1")
    assert codes[0] == 0, outputs[0]
    assert "waited for rank 1 until the deadline" in outputs[0]
