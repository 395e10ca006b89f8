"""Measures attention over two levels beside a ring over all ranks, in 4 processes of 2 devices.

Heads are shared inside a process, by its memory, and keys move between processes, by shared memory:
one causal document in zigzag order, forward, and forward and backward, interleaved. All outputs are
compared. This file is also the program that the processes run.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import common
import jax
import numpy as np
from bench_models import BOTH, FORWARD, both_passes
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import (
    Documents,
    Hamilton,
    Ulysses,
    Zigzag,
    context_parallel_attention,
    initialize,
)
from jax_cp_dispatch.cost import HARDWARE, Workload

PROCESSES, DEVICES, AXES = 4, 2, ("process", "device")
NUM_HEADS, HEAD_SIZE = 8, 64
RING = "ring over all"
WAYS: dict[str, Any] = {
    RING: Zigzag(),
    "ulysses inside, ring between": Ulysses(outer=Zigzag()),
    "ulysses inside, hamilton between": Ulysses(outer=Hamilton()),
    "ulysses over all": Ulysses(),
}
_LIMIT = 900  # seconds


def programs(tokens: int) -> dict[str, Callable[[], Any]]:
    """Returns the programs of all ways, whose outputs are equal."""
    mesh = Mesh(np.array(jax.devices()).reshape(PROCESSES, DEVICES), AXES)
    assert all(len({x.process_index for x in row}) == 1 for row in mesh.devices)
    shape, rows = (1, PROCESSES * DEVICES * tokens, NUM_HEADS, HEAD_SIZE), P(None, AXES)

    def put(seed: int) -> jax.Array:
        x = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, rows), lambda i: x[i])

    arrays = [put(seed) for seed in range(4)]
    stored = Documents(np.ones(shape[:2], np.int32)).zigzag(mesh.size)
    options = {"mesh": mesh, "axis_name": AXES, "documents": stored, "batch_axis": ()}
    call = partial(context_parallel_attention, head_axis=(), **options)
    runs, outs = {}, []
    for way, algorithm in WAYS.items():
        runs |= both_passes(f"{way} ", partial(call, algorithm=algorithm), *arrays)
        outs.append(runs[f"{way} {FORWARD}"]())
    for out in outs[1:]:
        for shard, expected in zip(out.addressable_shards, outs[0].addressable_shards, strict=True):
            np.testing.assert_allclose(shard.data, expected.data, atol=1e-5)
    return runs


def measure(tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Starts the processes, and yields a row for each way and its passes."""
    launch = ["-m", "jax_cp_dispatch.launch", f"--processes={PROCESSES}", f"--devices={DEVICES}"]
    program = [sys.executable, *launch, "--grace=5", __file__, json.dumps([tokens, repeats])]
    done = subprocess.run(program, capture_output=True, text=True, timeout=_LIMIT)
    found = [x for x in done.stdout.splitlines() if x.startswith("[0] {")]
    if done.returncode or not found:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise RuntimeError(f"the processes ended with {done.returncode}: {said}")
    seconds = json.loads(found[-1].removeprefix("[0] "))
    sizes: Any = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_HEADS, "head_size": HEAD_SIZE}
    workload = Workload(PROCESSES * DEVICES, tokens, itemsize=4, **sizes)
    for way, algorithm in WAYS.items():
        for passes in (FORWARD, BOTH):
            predicted = algorithm.predict(workload, hardware=nodes(), with_backward=passes == BOTH)
            time, ring = (seconds[f"{x} {passes}"] for x in (way, RING))
            yield {
                "way": way,
                "passes": passes,
                "ms": round(1e3 * time, 1),
                "of_ring": round(time / ring, 3),
                "MB": round(predicted.bytes_per_rank / 1e6, 2),
                "MB_between": round(predicted.bytes_between_nodes / 1e6, 2),
            }


def nodes() -> Any:
    """Returns hardware with a node for each process; only its bytes are read."""
    return dataclasses.replace(HARDWARE["h100"], ranks_per_node=DEVICES)


def main() -> None:
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--tokens", type=int, default=1024, help="of a device")
    arguments = common.options(parser, tokens=64)
    rows = []
    for row in measure(arguments.tokens, arguments.repeats):
        rows.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    title = (
        f"{PROCESSES} processes of {DEVICES} devices, {arguments.tokens} tokens of each, "
        f"{NUM_HEADS} heads of {HEAD_SIZE}, float32"
    )
    common.write(arguments.output, title, rows)


def on_each_process(tokens: int, repeats: int) -> None:
    initialize()
    seconds = common.interleaved(programs(tokens), repeats, longest=None)
    if jax.process_index() == 0:
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        on_each_process(*json.loads(sys.argv[1]))
    else:
        main()
