"""Tests over all GPUs of this machine: the contract's cases, groups, loops, and large operands.

    python tests/gpu/several_gpus.py                                 # one process with all GPUs
    python tests/gpu/several_gpus.py ADDRESS NUM_PROCESSES PROCESS   # one of a process per GPU

test_gpu_processes.py starts it. Names of tests, after these arguments, choose some. Each process
compares the results of its own ranks with NumPy. If XLA's collectives would serve instead of a
transport of this package, a test fails.
"""

import pathlib
import sys
import time
import warnings
from functools import partial

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name)
    for name in ("processes", "contract", "oracles", "support")
)

import gemms
import jax
import jax.numpy as jnp
import numpy as np
import suite
from attention_oracle import attention, attention_gradients
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from local_cases import assert_close
from movement_oracle import combined, dispatched, random_plan
from operations import CASES
from places import AXIS, all_devices, check, mesh_of_all, on_ranks, place

import jax_cp_dispatch as cp
from jax_cp_dispatch.gpu import connect_gpus, raise_gpu_errors

ROUNDS = 8
# Rows per rank, each of 4 KB: on GPUs enough for several rounds of unpacking.
ROWS, WIDTH = {"gpu": 4096, "cpu": 32}, 1024
# Relative to the largest magnitude; probabilities and gradients are rounded to 8 bits.
TOLERANCE = 2e-2
OVER_THE_NETWORK = "over the network"  # there XLA computes GEMMs


def test_cases():
    """The contract's, in float32."""
    for case in CASES:
        if not case.is_local and not (OVER_THE_NETWORK in connect_gpus().reason and is_gemm(case)):
            suite.check_case(case, "float32")


def is_gemm(case):
    return case.op in ("all_gather_matmul", "matmul_reduce_scatter")


def test_large_exchanges():
    """Rounds of other rows over the same channels; processes come at other times."""
    mesh, W, rows = mesh_of_all(), jax.device_count(), ROWS[jax.default_backend()]
    plan = random_plan(np.random.default_rng(W), W, 2 * W, rows, 1)
    capacity = int(plan["num_total_recv_tokens"].max()) + 2

    def there_and_back(x, m):
        there = cp.dispatch(x, m, axis_name=AXIS, capacity=capacity)
        return there, cp.combine(there, m, axis_name=AXIS, num_tokens=rows)

    run = on_ranks(there_and_back, mesh)
    m = jax.tree.map(lambda a: place(a, mesh), cp.Metadata(**plan))
    late = np.random.default_rng(jax.process_index())
    for seed in range(ROUNDS):
        x = np.random.default_rng(seed).integers(0, 99, (W, rows, WIDTH)).astype(np.float32)
        operand = place(x, mesh)
        time.sleep(0.05 * late.random())
        there, back = run(operand, m)
        want = dispatched(plan, x, capacity)
        check(there, want)
        check(back, combined(plan, want, rows, np.float32))


def test_attention_in_bfloat16():
    """Heads of 128, as models have them: the kernels for GPUs, and rows between GPUs."""
    mesh, W = Mesh(all_devices(), (AXIS,), axis_types=(AxisType.Auto,)), jax.device_count()
    lengths = [150, 106] * W
    tokens = sum(lengths)
    rng = np.random.default_rng(0)
    draw = lambda heads: rng.normal(size=(1, tokens, heads, 128)).astype(jnp.bfloat16)
    operands = q, k, v, g = draw(4), draw(2), draw(2), draw(4)
    ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)[None]
    end = np.arange(tokens)[None] + 1
    out, lse = attention(q, k, v, start, end)
    want = out, *attention_gradients(q, k, v, start, end, g, np.zeros_like(lse))
    spec, placement = P(None, AXIS), cp.place_tokens(lengths, world_size=W)
    for algorithm in ("balanced", "placed", "ring", "zigzag"):
        attend = partial(cp.context_parallel_attention, mesh=mesh, axis_name=AXIS,
                         algorithm=algorithm)  # fmt: skip
        given, expected = operands, want
        if algorithm == "placed":
            attend = partial(attend, documents=placement.documents)
            given, expected = (placement.apply(list(x)) for x in (operands, want))
        else:
            attend = partial(attend, segment_ids=ids)

        def both(q, k, v, g, attend=attend):
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(g)

        program = jax.jit(both, out_shardings=NamedSharding(mesh, spec))
        results = program(*(place(x, mesh, spec) for x in given))
        for got, whole in zip(results, expected, strict=True):
            for shard in got.addressable_shards:
                part = np.asarray(shard.data).astype(np.float64)
                assert_close(part, whole[shard.index], TOLERANCE)


TESTS_OF_ALL = (
    test_cases,
    suite.test_groups_in_one_process_and_across,
    suite.test_calls_of_one_program_are_distinguished,
    suite.test_arrays_of_all_ranks,
    test_large_exchanges,
    gemms.test_every_method_of_the_products,
    gemms.test_products_in_loops_and_of_global_arrays,
    test_attention_in_bfloat16,
)


def main() -> None:
    names = {test.__name__ for test in TESTS_OF_ALL}
    chosen = names & set(sys.argv) or names
    if len(arguments := [x for x in sys.argv[1:] if x not in names]) == 3:
        address, count, process = arguments[0], *map(int, arguments[1:])
        jax.distributed.initialize(address, count, process, local_device_ids=[process])
    world = connect_gpus()
    print(world, f"{jax.device_count()} devices", flush=True)
    found = cp.available_implementations()
    over = next(name for name, row in found.items() if row.available)
    if over == "xla":
        sys.exit(f"no transport serves: {found}")
    warnings.filterwarnings("error", message="jax_cp_dispatch: .*XLA's")
    for test in (test for test in TESTS_OF_ALL if test.__name__ in chosen):
        if OVER_THE_NETWORK in world.reason and test.__module__ == "gemms":
            continue
        test()
        raise_gpu_errors()
        print(f"process {jax.process_index()}: {test.__name__} over {over}: ok", flush=True)
    print(f"process {jax.process_index()}: all over {over}: ok", flush=True)


if __name__ == "__main__":
    main()
