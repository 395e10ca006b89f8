"""One line of the smoke table: runs one operation on a GPU once, compares it, prints `ok`.

    python tests/gpu/smoke.py dispatch

Each operation has its own process: one that hangs or loses its GPU context costs only its line.
"""

import functools
import pathlib
import sys
from typing import Any

TESTS = pathlib.Path(__file__).parents[1]
sys.path.extend(str(TESTS / name) for name in ("gpu", "oracles", "support"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402


def movement(op):
    """All ranks on this GPU, 4 ranks of 64 rows each."""
    from movement_oracle import combined, dispatched, random_plan

    import jax_cp_dispatch as cpd

    plan = random_plan(np.random.default_rng(0), 4, 6, 64, 2)
    capacity = int(plan["num_total_recv_tokens"].max())
    metadata = cpd.Metadata(**plan)
    options: dict[str, Any] = {"axis_name": "cp", "implementation": "cuda_peer", "deadline": 3.0}
    rows = 64 if op == "dispatch" else capacity
    x = np.random.default_rng(1).normal(size=(4, rows, 16)).astype(np.float32)
    if op == "dispatch":
        wanted = dispatched(plan, x, capacity)
        run = jax.jit(lambda x, m: cpd.dispatch(x, m, capacity=capacity, **options))
    else:
        wanted = combined(plan, x, 64, np.float32)
        run = jax.jit(lambda x, m: cpd.combine(x, m, num_tokens=64, **options))
    got = None
    for _ in range(3):  # both halves of the channel
        got = run(jnp.asarray(x.reshape(-1, 16)), metadata)
    np.testing.assert_array_equal(np.asarray(got).reshape(wanted.shape), wanted)


def pair():
    """An exchange in two calls, beside a product."""
    import test_one_gpu_pairs as tests

    x, a = tests.rows(0), tests.matrix()
    got, _ = jax.jit(tests.sent)(tests.flat(x), a)
    wanted = tests.dispatched(tests.PLAN, x, tests.CAPACITY)
    np.testing.assert_array_equal(np.asarray(got).reshape(wanted.shape), wanted)


def product(dtype):
    import test_one_gpu_gemm as tests

    if dtype == "bfloat16":
        tests.test_layouts_are_exact_on_integers(((1,), (0,)))
        tests.test_epilogues_equal_those_of_xla(dtype, 48)
    else:
        tests.test_tensor_scales(True, ((1,), (1,)))
        tests.test_tensor_scales(False, ((1,), (0,)))


def overlapped(test, name):
    import test_one_gpu_gemm as tests

    getattr(tests, test)(name, (5, 5))


def attention(ranges):
    import test_gpu_attention as tests

    tests.test_equals_numpy(ranges, "bfloat16")


def processes(transport, pointers=True):
    import test_gpu_processes as tests

    codes, outputs = tests.run(2, transport, pointers=pointers)
    assert codes == [0, 0], tests.printed(codes, outputs)


LINES = {
    "dispatch": functools.partial(movement, "dispatch"),
    "combine": functools.partial(movement, "combine"),
    "pair": pair,
    "bf16": functools.partial(product, "bfloat16"),
    "fp8": functools.partial(product, "fp8"),
    "ring": functools.partial(overlapped, "test_all_gather", "ring"),
    "pipeline": functools.partial(overlapped, "test_reduce_scatter", "pipeline of 3"),
    "causal": functools.partial(attention, "causal"),
    "packed": functools.partial(attention, "packed"),
    "ipc": functools.partial(processes, "cuda_ipc"),
    "nvshmem": functools.partial(processes, "nvshmem"),
    "put": functools.partial(processes, "nvshmem", pointers=False),
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
