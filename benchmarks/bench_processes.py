"""Measures dispatch and combine between processes of one host, against memcpy and gloo.

Each process has one device and sends one segment of random length to every other. All methods must
give the same result, which is checked first. The benchmark starts the processes itself.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from bench_dispatch import row_maps
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cp

AXIS, FEATURES = "cp", 2048  # rows of 8 kB
ALL_BYTES = (128 << 20, 2 << 20)


def rows_of_processes(program: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows that the first process of each job of `program` prints, one per line."""
    rows = []
    for processes in (2, 4):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "jax_cp_dispatch.launch", f"--processes={processes}"),
                *(program, f"--repeats={arguments.repeats}"),
                *(["--quick"] if arguments.quick else []),
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=pathlib.Path(__file__).parents[1],
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("[0] {")]
        rows += [json.loads(line.removeprefix("[0] ")) for line in lines]
    return rows


def is_one_of_a_job() -> bool:
    return "JAX_CP_DISPATCH_HOSTED_COORDINATION" in os.environ


def main() -> None:
    arguments = common.options(common.parser(__doc__))
    rows = rows_of_processes(__file__, arguments)
    for row in rows:
        print(
            "{processes} processes, {MB:4d} MB: {what:<46}{ms:9.2f} ms{of_memcpy:8.3f} of memcpy"
            "{times_gloo:8.1f} x gloo's faster way".format(**row)
        )
    row_kB = 4 * FEATURES // 1024
    title = f"dispatch between processes of one host, rows of {row_kB} kB in random segments"
    common.write(arguments.output, title, rows)


def work() -> None:
    """Runs in each of the processes."""
    arguments = common.options(common.parser(None))
    cp.initialize()
    for num_bytes in ALL_BYTES[arguments.quick :]:
        seconds = measure(num_bytes, arguments.repeats)
        if jax.process_index() == 0:
            memcpy = seconds["memcpy, one thread"]
            gloo = min(value for name, value in seconds.items() if name.startswith("gloo"))
            for what, value in seconds.items():
                row = {
                    "processes": jax.process_count(),
                    "MB": num_bytes >> 20,
                    "what": what,
                    "ms": round(1e3 * value, 3),
                    "of_memcpy": round(memcpy / value, 3),
                    "times_gloo": round(gloo / value, 2),
                }
                print(json.dumps(row), flush=True)


def measure(num_bytes: int, repeats: int) -> dict[str, float]:
    W = jax.process_count()
    tokens = num_bytes // (W * FEATURES * 4)
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, tokens + 1, (W, W - 1)), axis=1)
    seq_len = np.diff(cuts, axis=1, prepend=0, append=tokens).astype(np.int32)
    metadata, _ = cp.compute_metadata(seq_len, np.tile(np.arange(W, dtype=np.int32), (W, 1)))
    capacity = int(np.max(metadata.num_total_recv_tokens))
    source, padded, exists = row_maps(seq_len, capacity, tokens)
    pad = int(seq_len.max())
    mesh = Mesh(np.array(jax.devices()), (AXIS,))

    def put(x):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(AXIS)), lambda i: x[i])

    def on_ranks(fn, **options):
        return jax.jit(
            jax.shard_map(fn, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False),
            **options,
        )

    def fill(rows, indices, mask):
        return jnp.where(mask[0][:, None], rows[indices[0]], 0)

    def all_to_all(x, first_rows, indices, mask):
        x = jnp.pad(x, ((0, pad), (0, 0)))
        sent = jnp.stack([jax.lax.dynamic_slice_in_dim(x, first_rows[0, d], pad) for d in range(W)])
        return fill(jax.lax.all_to_all(sent, AXIS, 0, 0).reshape(-1, FEATURES), indices, mask)

    def all_gather(x, indices, mask):
        return fill(jax.lax.all_gather(x, AXIS, tiled=True), indices, mask)

    x = put(rng.integers(0, 99, (W * tokens, FEATURES)).astype(np.float32))
    metadata = jax.tree.map(put, metadata)
    first_rows = put((np.cumsum(seq_len, axis=1) - seq_len).astype(np.int32))
    source, padded, exists = map(put, (source, padded, exists))
    fresh = on_ranks(lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity))
    reuse = on_ranks(
        lambda x, m, out: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity, out=out),
        donate_argnums=2,
    )
    home = on_ranks(lambda y, m: cp.combine(y, m, axis_name=AXIS, num_tokens=tokens))
    by_all_to_all, by_all_gather = on_ranks(all_to_all), on_ranks(all_gather)
    received = fresh(x, metadata)
    window = jnp.copy(received)

    def into_donated_window():
        nonlocal window
        window = reuse(x, metadata, window)
        return window

    destination, origin = np.zeros(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    runs = {
        "memcpy, one thread": lambda: np.copyto(destination, origin),
        "dispatch into a donated window": into_donated_window,
        "dispatch into a fresh window": lambda: fresh(x, metadata),
        "combine": lambda: home(received, metadata),
        "gloo: all_to_all with padding, then unpacking": lambda: by_all_to_all(
            x, first_rows, padded, exists
        ),
        "gloo: all_gather, then a gather": lambda: by_all_gather(x, source, exists),
    }
    for name, run in runs.items():
        if not name.startswith(("memcpy", "combine")):
            for got, want in zip(
                run().addressable_shards, received.addressable_shards, strict=True
            ):
                np.testing.assert_array_equal(np.asarray(got.data), np.asarray(want.data), name)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if name.startswith("memcpy") and jax.process_index() > 0:
                continue  # the others wait in the next exchange
            jax.block_until_ready(run())
            start = time.perf_counter()  # of the second run, as in a separate loop
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items() if values}


if __name__ == "__main__":
    if is_one_of_a_job():
        work()
    else:
        main()
