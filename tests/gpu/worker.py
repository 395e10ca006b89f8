"""One process of test_gpu_processes.py: exchanges, multiplies and attends, against NumPy."""

import argparse
import pathlib
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))
import comm_gemm_oracle
from attention_oracle import attention
from comm_gemm_cases import equal, integers
from launched import num_gpus
from movement_oracle import combined, dispatched, random_plan

import jax_cp_dispatch as cpd
from jax_cp_dispatch._ranks import runtime  # inner: counts exchanges beside programs
from jax_cp_dispatch.attention.algorithms import parts_of_heads  # inner: with and without parts
from jax_cp_dispatch.gpu import connect_gpus, raise_gpu_errors

GATHER, SCATTER = cpd.all_gather_matmul, cpd.matmul_reduce_scatter
METHODS: list[tuple[Any, dict[str, Any]]] = [
    (GATHER, {"method": "none"}),
    (GATHER, {"method": "ring"}),
    (GATHER, {"method": "ring", "aggregate": True}),
    (SCATTER, {"method": "none"}),
    (SCATTER, {"method": "ring"}),
    (SCATTER, {"method": "pipeline", "num_splits": 3}),
]
# Exchanges beside a program: of each part but the last one, before and after the computation.
BESIDE = {"placed": 1 + 1, "balanced": 2 + 2}


class Ranks:
    """The processes, each with one rank on its GPU."""

    def __init__(self, num_ranks: int, rank: int, implementation: str):
        self.num_ranks, self.rank = num_ranks, rank
        self.mesh = Mesh(np.array(jax.devices()), ("cp",))
        # Each process compiles and loads kernels by itself.
        self.options: Any = {
            "axis_name": "cp", "implementation": implementation, "deadline": 8.0
        }  # fmt: skip

    def place(self, per_rank):
        """Returns [W, rows, ...] as a global array [W * rows, ...]."""
        mine = jax.device_put(per_rank[self.rank], jax.local_devices()[0])
        shape = (self.num_ranks * per_rank.shape[1], *per_rank.shape[2:])
        sharding = NamedSharding(self.mesh, P("cp"))
        return jax.make_array_from_single_device_arrays(shape, sharding, [mine])

    def run(self, fn):
        """Makes a program over the mesh from a function of local arrays."""
        return jax.jit(jax.shard_map(fn, mesh=self.mesh, in_specs=P("cp"), out_specs=P("cp")))


def own(array):
    """Returns this process's part of a global array."""
    return np.asarray(array.addressable_data(0))


def exchange(ranks: Ranks, tokens: int = 64, rounds: int = 6) -> Any:
    """Returns a dispatch of some rows, whose deadline is short."""
    plan = random_plan(np.random.default_rng(0), ranks.num_ranks, 6, tokens, 2)
    capacity = int(plan["num_total_recv_tokens"].max()) + 1
    fields = {k: v for k, v in plan.items() if k != "world_size"}
    sliced: Any = {k: ranks.place(np.asarray(v)[:, None]) for k, v in fields.items()}
    metadata = cpd.Metadata(**sliced, world_size=ranks.num_ranks)
    send = partial(cpd.dispatch, capacity=capacity)
    there = ranks.run(partial(send, **ranks.options))
    home = ranks.run(partial(cpd.combine, num_tokens=tokens, **ranks.options))
    rng, x = np.random.default_rng(1), np.zeros(0, np.float32)
    for _ in range(rounds):
        x = rng.normal(size=(ranks.num_ranks, tokens, 3, 5)).astype(np.float32)
        y = rng.normal(size=(ranks.num_ranks, capacity, 4)).astype(np.float32)
        got = own(there(ranks.place(x), metadata)), own(home(ranks.place(y), metadata))
        raise_gpu_errors()
        np.testing.assert_array_equal(got[0], dispatched(plan, x, capacity)[ranks.rank])
        np.testing.assert_array_equal(got[1], combined(plan, y, tokens, np.float32)[ranks.rank])
    short = ranks.run(partial(send, **{**ranks.options, "deadline": 0.5}))
    return lambda: short(ranks.place(x), metadata)


def multiply(ranks: Ranks) -> None:
    """Runs every method several times on the same channel, exactly, on integers."""
    for op, options in METHODS:
        rows = 8 if op is GATHER else 8 * ranks.num_ranks
        program = ranks.run(partial(op, **options, **ranks.options))
        for seed in range(3):
            x = integers(seed, ranks.num_ranks, rows, 32)
            w = integers(seed + 9, ranks.num_ranks, 32, 48)
            got = own(program(ranks.place(x), ranks.place(w)))
            raise_gpu_errors()
            want = getattr(comm_gemm_oracle, op.__name__)(x, w)
            equal(got, want[ranks.rank], (op.__name__, options))


def attend(ranks: Ranks, algorithm: str) -> None:
    """Compares outputs and gradients of two parts of heads with those of one, bit for bit."""
    num_ranks, tokens, heads = ranks.num_ranks, 256 * ranks.num_ranks, (8, 4, 4, 8)
    lengths = [tokens - 3 * 100, 37, 100, 163]
    ids = np.repeat(np.arange(1, 5), lengths)[None]
    if algorithm == "placed":
        placement = cpd.place_tokens([lengths], world_size=num_ranks)
        documents, order = placement.documents, lambda x: np.asarray(placement.apply(x))
    else:
        plan = cpd.plan_attention(ids, world_size=num_ranks)
        documents, order = cpd.Documents(ids).with_plan(plan), np.asarray
    run: Any = partial(cpd.context_parallel_attention, algorithm=algorithm)
    static: dict[str, Any] = {"order": documents.order, "columns": tokens}
    random = np.random.default_rng(0)

    def with_gradients(planned, *arrays):
        plans, ids, positions = planned  # arrays of a rank have no batch dimension
        mine = cpd.Documents.in_order(ids[None], positions[None], plans, **static)
        q, k, v, dout = (x[None] for x in arrays)
        call = lambda q, k, v: run(q, k, v, documents=mine, **ranks.options)
        out, transpose = jax.vjp(call, q, k, v)
        return [x[0] for x in (out, *transpose(dout))]

    def draw():
        """Returns q, k and v in document order, and the operands as global arrays."""
        arrays = [random.normal(size=(1, tokens, n, 64)).astype(jnp.bfloat16) for n in heads]
        split = lambda x: ranks.place(order(x).reshape(num_ranks, 256, *x.shape[2:]))
        return [x.astype(np.float32) for x in arrays[:3]], [split(x) for x in arrays]

    by_rank = lambda x: ranks.place(np.asarray(x).reshape(num_ranks, -1))
    plans = jax.tree.map(lambda x: ranks.place(np.asarray(x)[:, None]), documents.plans)
    planned = plans, by_rank(documents.segment_ids), by_rank(documents.positions)
    programs = []
    for is_cut in (False, True):
        parts_of_heads.moves_beside_work = lambda _, is_cut=is_cut: is_cut
        program = ranks.run(lambda planned, *arrays: with_gradients(planned, *arrays))
        programs.append(program.lower(planned, *draw()[1]).compile())
    for _ in range(4):
        (q, k, v), arrays = draw()
        before = runtime.cuda.num_exchanges_beside_programs()
        one, two = ([own(x) for x in program(planned, *arrays)] for program in programs)
        raise_gpu_errors()
        assert runtime.cuda.num_exchanges_beside_programs() - before == BESIDE[algorithm]
        for whole, parts in zip(one, two, strict=True):
            np.testing.assert_array_equal(whole, parts)
        start = np.cumsum([0, *lengths])[ids - 1]
        exact, _ = attention(q, k, v, start, np.arange(tokens)[None] + 1)
        mine = order(exact.astype(np.float32)).reshape(num_ranks, 256, *exact.shape[2:])
        got = two[0].astype(np.float32)
        np.testing.assert_allclose(got, mine[ranks.rank], atol=0.02, rtol=0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("num_processes", type=int)
    parser.add_argument("process", type=int)
    parser.add_argument("--absent", type=int, default=-1)
    parser.add_argument("--attention", default="", help="placed or balanced, and nothing else")
    options = parser.parse_args()
    num_ranks, rank = options.num_processes, options.process
    # Where processes share a GPU, NCCL rejects them: only calls of this package may run.
    devices = [rank % num_gpus()]
    jax.distributed.initialize(options.address, num_ranks, rank, local_device_ids=devices)
    world = connect_gpus()
    if world.implementation == "xla":
        sys.exit(f"not connected: {world.reason}")
    ranks = Ranks(num_ranks, rank, world.implementation)
    if options.attention:
        attend(ranks, options.attention)
        print(f"process {rank} attends: ok", flush=True)
        return
    send_once_more = exchange(ranks)
    over = world.implementation
    if "over the network" in world.reason:
        over += ", network"  # where XLA computes the GEMMs
    else:
        multiply(ranks)
    print(f"process {rank} over {over}: ok", flush=True)
    if options.absent in (-1, rank):
        return
    jax.block_until_ready(send_once_more())
    try:
        raise_gpu_errors()
        sys.exit("no error was raised")
    except RuntimeError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
