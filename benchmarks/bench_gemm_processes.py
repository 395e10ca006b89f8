"""Measures tensor-parallel GEMMs between processes of one host, against gloo and XLA's GEMM.

Each process has one device. The baseline is `all_gather` then a GEMM, or a GEMM then
`psum_scatter`, through gloo. Results are checked first. The benchmark starts the processes itself.
"""

import functools
import json
from typing import Any

import common
import jax
import numpy as np
from bench_processes import is_one_of_a_job, rows_of_processes
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cp

AXIS, GLOO = "tp", "XLA with gloo"
M, K, N = 2048, 1024, 2048  # over all ranks
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "all_gather_matmul": {
        "none": {"method": "none"},
        "ring": {"method": "ring"},
        "ring direct": {"method": "ring", "use_ce": False},
    },
    "matmul_reduce_scatter": {
        "none": {"method": "none"},
        "ring": {"method": "ring"},
        "ring direct": {"method": "ring", "use_ce": False},
        "pipeline 4": {"method": "pipeline"},
    },
}


def main() -> None:
    arguments = common.options(common.parser(__doc__))
    rows = rows_of_processes(__file__, arguments)
    for row in rows:
        print(
            "{processes} processes, {op:<22} {what:<42}{ms:9.2f} ms{times_gloo:8.2f} x gloo".format(
                **row
            )
        )
    title = f"overlapped GEMMs between processes of one host, {M} × {K} × {N} in float32"
    common.write(arguments.output, title, rows)


def work() -> None:
    """Runs in each of the processes."""
    repeats = common.options(common.parser(None)).repeats
    cp.initialize()
    for op in METHODS:
        seconds = measure(op, repeats)
        if jax.process_index() == 0:
            for what, value in seconds.items():
                row = {
                    "processes": jax.process_count(),
                    "op": op,
                    "what": what,
                    "ms": round(1e3 * value, 3),
                    "times_gloo": round(seconds[GLOO] / value, 2),
                }
                print(json.dumps(row), flush=True)


def measure(op: str, repeats: int) -> dict[str, float]:
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    gathers = op == "all_gather_matmul"
    rows, columns = P(AXIS), P(None, AXIS)
    specs, out_spec = ((rows, columns), columns) if gathers else ((columns, rows), rows)
    rng = np.random.default_rng(0)

    def put(spec, *shape):
        x = rng.integers(-4, 5, shape).astype(np.float32)  # sums are exact in any order
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda i: x[i])

    def gloo(x, w):
        if gathers:
            return jax.lax.all_gather(x, AXIS, tiled=True) @ w
        return jax.lax.psum_scatter(x @ w, AXIS, tiled=True)

    x, w = put(specs[0], M, K), put(specs[1], K, N)

    def program(fn):
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out_spec, check_vma=False)
        return functools.partial(jax.jit(mapped), x, w)

    runs = {GLOO: program(gloo)} | {
        name: program(functools.partial(getattr(cp, op), axis_name=AXIS, **options))
        for name, options in METHODS[op].items()
    }
    want = runs[GLOO]().addressable_shards
    for name, run in runs.items():
        for got, expected in zip(run().addressable_shards, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got.data), np.asarray(expected.data), name)
    return common.interleaved(runs, repeats)


if __name__ == "__main__":
    if is_one_of_a_job():
        work()
    else:
        main()
