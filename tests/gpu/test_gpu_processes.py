"""Two and four processes on one GPU, and all GPUs: the same exchanges over every transport.

NVSHMEM is tested through pointers, and through puts and gets as over a network.
"""

import pathlib
from functools import partial

import launched
import pytest
from launched import num_gpus, printed

run = partial(launched.run, pathlib.Path(__file__).with_name("worker.py"))
ALL_GPUS = {  # processes for each GPU, transport, options
    "one process": (0, None, {}),
    "cuda_ipc": (1, "cuda_ipc", {}),
    "nvshmem": (1, "nvshmem", {}),
    "put and get": (1, "nvshmem", {"pointers": False}),
}


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


@pytest.mark.skipif(num_gpus() == 1, reason="one GPU")
@pytest.mark.parametrize("case", ALL_GPUS)
def test_every_operation(case, monkeypatch):
    for_each, transport, options = ALL_GPUS[case]
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # else XLA uses TF32
    count = for_each * num_gpus() or 1
    program = pathlib.Path(__file__).with_name("several_gpus.py")
    options = {"fraction": ".5", "slab": 1 << 30, **options}
    codes, outputs = launched.run(program, count, transport, **options)
    assert codes == [0] * count, printed(codes, outputs)
    for process, output in enumerate(outputs):
        assert f"process {process}: all over {transport or 'cuda_peer'}: ok" in output
