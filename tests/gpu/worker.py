"""One process of test_gpu_processes.py: exchanges and multiplies with others, against NumPy."""

import argparse
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))
from attention_in_parts import attend
from launched import num_gpus
from movement_oracle import combined, dispatched, random_plan
from products import multiply

from jax_cp_dispatch import Metadata, combine, dispatch
from jax_cp_dispatch.gpu import connect_gpus, raise_gpu_errors

S, T, ROUNDS = 6, 64, 6


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
    jax.distributed.initialize(
        options.address, num_ranks, rank, local_device_ids=[rank % num_gpus()]
    )
    world = connect_gpus()
    if world.implementation == "xla":
        sys.exit(f"not connected: {world.reason}")
    mesh = Mesh(np.array(jax.devices()), ("cp",))
    plan = random_plan(np.random.default_rng(0), num_ranks, S, T, 2)
    capacity = int(plan["num_total_recv_tokens"].max()) + 1
    rng = np.random.default_rng(1)

    def global_array(per_rank):
        """Returns [W, rows, ...] with each process's slice on its GPU."""
        mine = jax.device_put(per_rank[rank], jax.local_devices()[0])
        shape = (num_ranks * per_rank.shape[1], *per_rank.shape[2:])
        sharding = NamedSharding(mesh, P("cp"))
        return jax.make_array_from_single_device_arrays(shape, sharding, [mine])

    def local(array):
        return np.asarray(array.addressable_data(0))

    def on_ranks(fn):
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))

    fields = {k: v for k, v in plan.items() if k != "world_size"}
    sliced: dict[str, Any] = {k: global_array(np.asarray(v)[:, None]) for k, v in fields.items()}
    metadata = Metadata(**sliced, world_size=num_ranks)
    name: dict[str, Any] = {
        "axis_name": "cp",
        "implementation": world.implementation,
        "deadline": 8.0,  # each process compiles and loads kernels by itself
    }
    if options.attention:
        attend(options.attention, num_ranks, rank, global_array, local, on_ranks, name)
        print(f"process {rank} attends: ok", flush=True)
        return
    send = on_ranks(lambda x, m: dispatch(x, m, capacity=capacity, **name))
    combine_rows = on_ranks(lambda y, m: combine(y, m, num_tokens=T, **name))
    x = np.zeros((num_ranks, T, 3, 5), np.float32)
    for _ in range(ROUNDS):
        x = rng.normal(size=(num_ranks, T, 3, 5)).astype(np.float32)
        y = rng.normal(size=(num_ranks, capacity, 4)).astype(np.float32)
        there = local(send(global_array(x), metadata))
        home = local(combine_rows(global_array(y), metadata))
        raise_gpu_errors()
        np.testing.assert_array_equal(there, dispatched(plan, x, capacity)[rank])
        np.testing.assert_array_equal(home, combined(plan, y, T, np.float32)[rank])
    over = world.implementation
    if "over the network" in world.reason:
        over += ", network"  # where XLA computes the GEMMs
    else:
        multiply(num_ranks, rank, global_array, local, on_ranks, name)
    print(f"process {rank} over {over}: ok", flush=True)
    if options.absent < 0:
        return
    if rank == options.absent:
        return
    short = {**name, "deadline": 0.5}
    jax.block_until_ready(
        on_ranks(lambda x, m: dispatch(x, m, capacity=capacity, **short))(global_array(x), metadata)
    )
    try:
        raise_gpu_errors()
        sys.exit("no error was raised")
    except RuntimeError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
