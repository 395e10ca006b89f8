"""Two and four processes: the same exchanges over CUDA IPC and NVSHMEM.

They share one GPU, or use several where the machine has these. NVSHMEM is tested through pointers,
and through puts and gets as over a network.
"""

import pathlib
from functools import partial

import launched
import pytest
from launched import printed

run = partial(launched.run, pathlib.Path(__file__).with_name("worker.py"))


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
