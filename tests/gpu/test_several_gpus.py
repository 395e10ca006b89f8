"""All GPUs of this machine, in one process and in one process each, over every transport."""

import pathlib

import pytest
from launched import num_gpus, printed, run

PROGRAM = pathlib.Path(__file__).with_name("several_gpus.py")
CASES = {  # processes for each GPU, transport, options
    "one process": (0, None, {}),
    "cuda_ipc": (1, "cuda_ipc", {}),
    "nvshmem": (1, "nvshmem", {}),
    "put and get": (1, "nvshmem", {"pointers": False}),
}


@pytest.mark.skipif(num_gpus() == 1, reason="one GPU")
@pytest.mark.parametrize("case", CASES)
def test_every_operation(case, monkeypatch):
    for_each, transport, options = CASES[case]
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # else XLA uses TF32
    count = for_each * num_gpus() or 1
    codes, outputs = run(PROGRAM, count, transport, fraction=".5", slab=1 << 30, **options)
    assert codes == [0] * count, printed(codes, outputs)
    for process, output in enumerate(outputs):
        assert f"process {process}: all over {transport or 'cuda_peer'}: ok" in output
