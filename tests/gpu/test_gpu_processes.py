"""Two and four processes on one GPU, and all GPUs: the same exchanges over every transport.

NVSHMEM is tested through pointers, and through puts and gets as over a network.
"""

import pathlib

import launched
import pytest
from launched import num_gpus, printed

PROGRAM = pathlib.Path(__file__).with_name("several_gpus.py")
ALL_GPUS = {  # processes for each GPU, transport, options
    "one process": (0, None, {}),
    "cuda_ipc": (1, "cuda_ipc", {}),
    "nvshmem": (1, "nvshmem", {}),
    "put and get": (1, "nvshmem", {"pointers": False}),
}
ON_ONE_GPU = "test_large_exchanges", "test_every_method_of_the_products"
ON_ONE_GPU += ("test_programs_without_collectives",)


def exchange(num_processes, transport, *names, slab=512 << 20, **options):
    """Runs tests of several_gpus.py, all if none is named; returns what the processes print."""
    codes, outputs = launched.run(PROGRAM, num_processes, transport, *names, slab=slab, **options)
    assert codes == [0] * num_processes, printed(codes, outputs)
    for process, output in enumerate(outputs):
        assert f"process {process}: all over {transport or 'cuda_peer'}: ok" in output
    return outputs


@pytest.mark.parametrize(
    "num_processes, transport", [(2, "cuda_ipc"), (4, "cuda_ipc"), (2, "nvshmem"), (4, "nvshmem")]
)
def test_exchanges_between_processes(num_processes, transport):
    exchange(num_processes, transport, *ON_ONE_GPU)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_exchanges_by_put_and_get(num_processes):
    outputs = exchange(num_processes, "nvshmem", *ON_ONE_GPU, pointers=False)
    assert all("over the network" in output for output in outputs)


def test_attention_in_parts_of_heads():
    exchange(2, "cuda_ipc", "test_attention_by_plans")


def test_a_process_that_does_not_call_is_named_to_the_others():
    outputs = exchange(2, "cuda_ipc", "test_a_rank_that_does_not_call")
    assert "waited for rank 1 until the deadline" in outputs[0]


@pytest.mark.skipif(num_gpus() == 1, reason="one GPU")
@pytest.mark.parametrize("case", ALL_GPUS)
def test_every_operation(case, monkeypatch):
    for_each, transport, options = ALL_GPUS[case]
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # else XLA uses TF32
    options = {"fraction": ".5", "slab": 1 << 30, **options}
    exchange(for_each * num_gpus() or 1, transport, **options)
