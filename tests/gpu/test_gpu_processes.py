"""Several processes on one GPU: the same exchanges over CUDA IPC and NVSHMEM.

NVSHMEM is tested through pointers, and through puts and gets as over a network."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import pytest

WORKER = pathlib.Path(__file__).with_name("worker.py")
# Seconds for all processes, less than a test has; a waiting call ends before.
LIMIT = float(os.environ.get("JAX_CP_DISPATCH_PROCESS_LIMIT", "30"))


def run(num_processes, transport, *arguments, pointers=True):
    """Returns each process's exit status, None past the limit, and its output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda",
        "PYTHONUNBUFFERED": "1",
        "JAX_CP_DISPATCH_GPU_TRANSPORT": transport,
        "JAX_CP_DISPATCH_GPU_POINTERS": str(int(pointers)),
        "JAX_CP_DISPATCH_SYMMETRIC_BYTES": str(64 << 20),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".1",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
    }
    codes, outputs = [], []
    with contextlib.ExitStack() as stack:
        # Files, not pipes: they keep the output of a process that never ends.
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(num_processes)]
        workers = [
            subprocess.Popen(
                [sys.executable, WORKER, address, str(num_processes), str(process), *arguments],
                env=environment, stdout=file, stderr=subprocess.STDOUT,
            )
            for process, file in enumerate(files)
        ]  # fmt: skip
        end = time.monotonic() + LIMIT
        try:
            for worker in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(max(0.0, end - time.monotonic()))
            codes = [worker.poll() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        for file in files:
            file.seek(0)
            outputs.append(file.read().decode(errors="replace"))
    return codes, outputs


def printed(codes, outputs):
    return "\n".join(
        f"--- process {process}: {f'not over after {LIMIT} s' if code is None else code}\n{output}"
        for process, (code, output) in enumerate(zip(codes, outputs, strict=True))
    )


@pytest.mark.parametrize(
    "num_processes, transport", [(2, "cuda_ipc"), (4, "cuda_ipc"), (2, "nvshmem"), (4, "nvshmem")]
)
def test_exchanges_between_processes(num_processes, transport):
    codes, outputs = run(num_processes, transport)
    assert codes == [0] * num_processes, printed(codes, outputs)
    for process, output in enumerate(outputs):
        assert f"process {process} over {transport}: ok" in output


@pytest.mark.parametrize("num_processes", [2, 4])
def test_exchanges_by_put_and_get(num_processes):
    codes, outputs = run(num_processes, "nvshmem", pointers=False)
    assert codes == [0] * num_processes, printed(codes, outputs)
    for process, output in enumerate(outputs):
        assert f"process {process} over nvshmem, network: ok" in output


@pytest.mark.parametrize("algorithm", ["placed", "balanced"])
def test_attention_in_parts_of_heads(algorithm):
    codes, outputs = run(2, "cuda_ipc", "--attention", algorithm)
    assert codes == [0, 0], printed(codes, outputs)


def test_a_process_that_does_not_call_is_named_to_the_others():
    codes, outputs = run(2, "cuda_ipc", "--absent", "1")
    assert codes[0] == 0, printed(codes, outputs)
    assert "waited for rank 1 until the deadline" in outputs[0]
