"""Tests between GPUs, or between processes of one GPU: the contract's cases, and what they lack.

    python tests/gpu/several_gpus.py                                 # one process with all GPUs
    python tests/gpu/several_gpus.py ADDRESS NUM_PROCESSES PROCESS   # one of several processes

test_gpu_processes.py starts it. Names of tests, after these arguments, choose some. Each process
compares the results of its own ranks with NumPy. If XLA's collectives would serve instead of a
transport of this package, a test fails. NCCL rejects processes that share a GPU: the tests of
`ON_ONE_GPU` need no collectives.
"""

import pathlib
import sys
import time
import warnings
from functools import partial
from typing import Any

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
from inner import gpus_here, heads_in_parts, num_exchanges_beside_programs
from jax.sharding import PartitionSpec as P
from local_cases import assert_close
from movement_oracle import named_rows, random_plan
from operations import CASES
from places import AXIS, draw, mesh_of_all, on_ranks, place_all, plan_of
from program_sets import Structure

import jax_cp_dispatch as cp
from jax_cp_dispatch.gpu import connect_gpus, raise_gpu_errors, waiting_calls

# Rounds; megabytes of rows of each rank, enough for several rounds of unpacking; whether a fault is
# planted. stress_processes.py has others.
SIZES = [x.removeprefix("--sizes=") for x in sys.argv if x.startswith("--sizes=")]
ROUNDS, MEGABYTES, IS_FAULTY = map(int, (*SIZES, "8,16,0")[0].split(","))
NUM_PLANS, COLUMNS = 4, 1024
CHECKED_AT_ONCE = 25  # rounds that the host enqueues before it waits
MOST_SPINS, LONGEST_SLEEP = 200, 0.4 / ROUNDS  # of a loop on the GPU; seconds of the host
# Relative to the largest magnitude; probabilities and gradients are rounded to 8 bits.
TOLERANCE = 2e-2
OVER_THE_NETWORK = "over the network"  # there XLA computes GEMMs
# Exchanges beside a program: of each part but the last one, before and after the computation.
BESIDE = {"placed": 1 + 1, "balanced": 2 + 2}


def test_cases():
    """The contract's, in float32."""
    for case in CASES:
        is_gemm = case.functions[0] in (cp.all_gather_matmul, cp.matmul_reduce_scatter)
        if not case.is_local and not (is_gemm and OVER_THE_NETWORK in connect_gpus().reason):
            suite.check_case(case, "float32")


def calls():
    far = OVER_THE_NETWORK in connect_gpus().reason
    return suite.MOVES if far else (*suite.MOVES, *suite.PRODUCTS)


def test_programs():
    suite.test_programs(calls())


def test_programs_without_collectives():
    """Of XLA: loops of calls, and several of them."""
    order = tuple(range(jax.device_count()))
    suite.check_program(Structure(1, order, "float32", False, calls()), is_delayed=False)


def test_large_exchanges():
    """Rounds of other plans and rows over the same channels, after delays of the host and the GPU.

    What a row has to be follows from its sender and the round, so the GPU checks all of them.
    """
    mesh, W = mesh_of_all(), jax.device_count()
    tokens, common = (MEGABYTES << 20) // (4 * COLUMNS), np.random.default_rng(W)
    plans = [random_plan(common, W, 2 * W, tokens) for _ in range(NUM_PLANS)]
    capacity = max(int(plan["num_total_recv_tokens"].max()) for plan in plans) + 2
    mine = np.arange(W * tokens, dtype=np.int32).reshape(W, tokens)

    def case_of(plan):
        sources, returned = np.full((W, capacity), -1, np.int32), np.full_like(mine, -1)
        for sender, row, receiver, at in named_rows(plan):
            sources[receiver, at] = returned[sender, row] = mine[sender, row]
        return place_all((mine, cp.Metadata(**plan), sources, returned), mesh)

    def step(mine, metadata, sources, returned, number, spins):
        x = rows_of(mine, number)
        delay = jax.lax.fori_loop(0, spins, lambda _, y: jnp.sin(y), x[:1, 0].astype(jnp.float32))
        x, _ = jax.lax.optimization_barrier((x, delay))
        where: Any = {"axis_name": AXIS, "deadline": 3.0 if IS_FAULTY else 20.0}
        came = cp.dispatch(x, metadata, capacity=capacity, **where)
        wrong = jnp.any(came != rows_of(sources, number), axis=1).sum()
        if not IS_FAULTY:  # after an error, a program ends before its next exchange
            home = cp.combine(came, metadata, num_tokens=tokens, **where)
            wrong += jnp.any(home != rows_of(returned, number), axis=1).sum()
        return wrong

    run, cases = on_ranks(step, mesh), [case_of(plan) for plan in plans]
    delays, wrong, num_errors = np.random.default_rng(jax.process_index()), [], 0
    for number in range(ROUNDS):
        time.sleep(delays.uniform(0, LONGEST_SLEEP))
        # A process places its own part of the delays.
        scalars = np.full(W, number, np.int32), np.full(W, delays.integers(MOST_SPINS), np.int32)
        try:
            found = run(*cases[common.integers(NUM_PLANS)], *place_all(scalars, mesh))
            if IS_FAULTY or number % CHECKED_AT_ONCE == 0:
                jax.block_until_ready(found)
            wrong.append(found)
        except Exception as error:  # the exchange was enqueued all the same
            if not IS_FAULTY:
                raise
            num_errors += 1
            print(str(error).splitlines()[0][:200], flush=True)
    total = sum(int(own(x).sum()) for x in wrong)
    print(f"{ROUNDS} rounds, {total} wrong rows, {num_errors} errors", flush=True)
    assert IS_FAULTY or total == 0


def rows_of(ids, number):
    """Returns rows [..., COLUMNS] that differ by sender's row and round; zero for id -1."""
    mixed = (ids.astype(jnp.uint32) * np.uint32(2654435761)) ^ (
        number.astype(jnp.uint32) * np.uint32(0x9E3779B9)
    )
    columns = jnp.arange(COLUMNS, dtype=jnp.uint32) * np.uint32(0x85EBCA6B)
    return jnp.where(ids[..., None] >= 0, (mixed[..., None] ^ columns) | 1, 0)


def test_attention_by_plans():
    """In parts of heads, whose rows move beside work of the GPU: the bits of one part."""
    for algorithm, num_beside in BESIDE.items():
        found = []
        for is_cut in (False, True):
            with heads_in_parts(is_cut):
                run = attend(algorithm)
            before = num_exchanges_beside_programs()
            found = [*found, run()]
            if jax.default_backend() == "gpu":
                beside = num_exchanges_beside_programs() - before
                assert beside == (num_beside if is_cut else 0), (algorithm, beside)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(own(x), own(y)), *found)


def test_attention_by_rings():
    for algorithm in ("ring", "zigzag"):
        attend(algorithm)()


def own(x):
    """Returns the parts of this process's ranks."""
    return np.stack([shard.data for shard in x.addressable_shards])


def attend(algorithm):
    """Compiles attention in bfloat16, with gradients; returns a function that runs and checks it.

    Heads of 128, as models have them: the kernels for GPUs, and rows between GPUs.
    """
    mesh, W, spec = mesh_of_all(), jax.device_count(), P(None, AXIS)
    lengths = [150, 106] * W
    tokens, rng = sum(lengths), np.random.default_rng(0)
    ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]
    placement, order = cp.place_tokens(lengths, world_size=W), lambda x: x
    documents: Any = cp.Documents(ids)
    if algorithm == "placed":
        documents, order = placement.documents, placement.apply
    if algorithm == "balanced":
        documents = documents.with_plan(cp.plan_attention(ids, world_size=W))
    draw = lambda heads: rng.normal(size=(1, tokens, heads, 128)).astype(jnp.bfloat16)
    operands = q, k, v, g = draw(8), draw(4), draw(4), draw(8)
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)[None]
    end = np.arange(tokens)[None] + 1
    out, lse = attention(q, k, v, start, end)
    want = out, *attention_gradients(q, k, v, start, end, g, np.zeros_like(lse))

    def both(documents, q, k, v, g):
        call: Any = partial(cp.context_parallel_attention, algorithm=algorithm, axis_name=AXIS)
        out, pull = jax.vjp(partial(call, documents=documents), q, k, v)
        return out, *pull(g)

    specs = documents.specs(AXIS), *[spec] * 4
    given = place_all((documents, *map(order, operands)), mesh, specs)
    program = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=spec))
    program = program.lower(*given).compile()

    def run():
        results = program(*given)
        for got, whole in zip(results, map(order, want), strict=True):
            for shard in got.addressable_shards:
                part = np.asarray(shard.data).astype(np.float64)
                assert_close(part, np.asarray(whole)[shard.index], TOLERANCE)
        return results

    return run


def test_a_rank_that_does_not_call():
    """The last one; the others name it while they wait and at their deadline, and print that."""
    mesh, W = mesh_of_all(), jax.device_count()
    plan, capacity = plan_of(0, W)
    operands = place_all((draw(0, W, 8), cp.Metadata(**plan)), mesh)
    # Each process compiles and loads kernels by itself.
    for deadline in (8.0, 2.0):
        options: Any = {"axis_name": AXIS, "capacity": capacity, "deadline": deadline}
        move = on_ranks(lambda x, m, options=options: cp.dispatch(x, m, **options), mesh)
        if deadline == 2.0 and jax.process_index() == jax.process_count() - 1:
            return
        moved, waiting = move(*operands), []
        while not moved.is_ready() and not waiting:
            waiting = waiting_calls()
        jax.block_until_ready(moved)
    assert [call.missing for call in waiting] == [(W - 1,)], waiting
    try:
        raise_gpu_errors()
        sys.exit("no error was raised")
    except RuntimeError as error:
        print(error, flush=True)


TESTS_OF_ALL = (
    test_cases,
    test_programs,
    test_large_exchanges,
    gemms.test_every_method_of_the_products,
    test_attention_by_plans,
    test_attention_by_rings,
)
ON_ONE_GPU = (
    test_large_exchanges,
    gemms.test_every_method_of_the_products,
    test_programs_without_collectives,
    test_attention_by_plans,
    test_a_rank_that_does_not_call,
)


def main() -> None:
    named = {test.__name__: test for test in (*TESTS_OF_ALL, *ON_ONE_GPU)}
    chosen = [named[x] for x in sys.argv[1:] if x in named] or TESTS_OF_ALL
    arguments = [x for x in sys.argv[1:] if x not in named and not x.startswith("--")]
    if len(arguments) == 3:
        address, count, process = arguments[0], *map(int, arguments[1:])
        devices = [process % gpus_here()[0]] if gpus_here()[0] else None
        jax.distributed.initialize(address, count, process, local_device_ids=devices)
    world = connect_gpus()
    print(world, f"{jax.device_count()} devices", flush=True)
    found = cp.available_implementations()
    over = next(name for name, row in found.items() if row.available)
    if over == "xla":
        sys.exit(f"no transport serves: {found}")
    warnings.filterwarnings("error", message="jax_cp_dispatch: .*XLA's")
    for test in chosen:
        if OVER_THE_NETWORK in world.reason and test.__module__ == "gemms":
            continue
        test()
        raise_gpu_errors()
        print(f"process {jax.process_index()}: {test.__name__} over {over}: ok", flush=True)
    print(f"process {jax.process_index()}: all over {over}: ok", flush=True)


if __name__ == "__main__":
    main()
