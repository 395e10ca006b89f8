"""One line of the smoke table: runs one operation on a GPU once, compares it, prints `ok`.

    python tests/gpu/smoke.py dispatch

Each operation has its own process: one that hangs or loses its GPU context costs only its line.
"""

import pathlib
import sys
from functools import partial

TESTS = pathlib.Path(__file__).parents[1]
sys.path.extend(str(TESTS / name) for name in ("gpu", "contract", "oracles", "support"))


def movement(name):
    """All ranks on this GPU."""
    import test_one_gpu as tests

    (case,) = (case for case in tests.CASES if case.name == name)
    tests.test_cases_of_all_ranks(case, 4)


def product(dtype):
    import test_one_gpu_gemm as tests

    if dtype == "bfloat16":
        tests.test_layouts_are_exact_on_integers(((1,), (0,)))
        tests.test_epilogues_equal_those_of_xla(dtype, 48)
    else:
        tests.test_tensor_scales(True, ((1,), (1,)))
        tests.test_tensor_scales(False, ((1,), (0,)))


def attention(ranges):
    import test_gpu_attention as tests

    tests.test_equals_numpy(ranges, "bfloat16")


def processes(transport, **options):
    import test_gpu_processes as tests

    tests.exchange(2, transport, *tests.ON_ONE_GPU, **options)


LINES = {
    "dispatch": partial(movement, "dispatch"),
    "combine": partial(movement, "combine"),
    "pair": partial(movement, "dispatch_start"),
    "bf16": partial(product, "bfloat16"),
    "fp8": partial(product, "fp8"),
    "causal": partial(attention, "causal"),
    "packed": partial(attention, "packed"),
    "ipc": partial(processes, "cuda_ipc"),
    "nvshmem": partial(processes, "nvshmem"),
    "put": partial(processes, "nvshmem", pointers=False),
}


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in LINES:
        sys.exit(f"usage: smoke.py {' | '.join(LINES)}")
    from conftest import why_no_gpu

    reason = why_no_gpu()
    if reason is not None:
        sys.exit(f"{sys.argv[1]}: {reason}")
    LINES[sys.argv[1]]()
    from jax_cp_dispatch.gpu import raise_gpu_errors

    raise_gpu_errors()
    print(f"{sys.argv[1]}: ok")


if __name__ == "__main__":
    main()
