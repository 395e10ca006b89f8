"""Measures the latency of tiny payloads, [16, 8] float32 per rank, against `jax.lax.ppermute`.

For each number of devices and operation, measures one operation inside `lax.scan`, the tracing of a
new function with one operation, and a call of a compiled program with one operation: until it
returns and until its result is ready. A program that moves nothing shows JAX's own overhead.
"""

import functools
import statistics
import time

import common
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import combine, compute_metadata, dispatch
from jax_cp_dispatch.cpu_devices import start_cpu_devices

T, FEATURE = 16, 8
AXIS = "cp"
STEPS = 200


def operations(world_size):
    """Returns functions of one rank's rows and metadata; combine moves rows in reverse."""
    to_next = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    return {
        "dispatch": lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=T),
        "combine": lambda x, m: combine(x, m, axis_name=AXIS, num_tokens=T),
        "ppermute": lambda x, _: jax.lax.ppermute(x, AXIS, to_next),
        "no exchange": lambda x, _: x + 1,
    }


def scanned(operation, x, metadata):
    return jax.lax.scan(lambda x, _: (operation(x, metadata), None), x, length=STEPS)[0]


def calls(programs, x, metadata, repeats):
    """Returns interleaved median seconds until each call returns, and until its result is ready."""
    until_return = {name: [] for name in programs}
    until_done = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            result = program(x, metadata)
            until_return[name].append(time.perf_counter() - start)
            jax.block_until_ready(result)
            until_done[name].append(time.perf_counter() - start)
    return [
        {name: statistics.median(values) for name, values in times.items()}
        for times in (until_return, until_done)
    ]


def measure(world_size, repeats):
    mesh = Mesh(np.array(jax.devices()[:world_size]), (AXIS,))

    def on_ranks(fn):
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))

    def put(x):
        return jax.device_put(x, NamedSharding(mesh, P(AXIS)))

    ranks = np.arange(world_size, dtype=np.int32)
    plan, _ = compute_metadata(np.full((world_size, 1), T), ((ranks + 1) % world_size)[:, None])
    metadata = jax.tree.map(put, plan)
    rows = np.random.default_rng(0).normal(size=(world_size, T, FEATURE)).astype(np.float32)
    x = put(rows.reshape(-1, FEATURE))

    ops = operations(world_size)
    programs = {name: on_ranks(op) for name, op in ops.items()}
    loops = {name: on_ranks(functools.partial(scanned, op)) for name, op in ops.items()}
    for step, name in ((1, "dispatch"), (1, "ppermute"), (-1, "combine")):
        for moved, num_steps in ((programs, 1), (loops, STEPS)):
            expected = np.roll(rows, step * num_steps, axis=0).reshape(-1, FEATURE)
            np.testing.assert_array_equal(moved[name](x, metadata), expected, name)

    def trace(op):  # a new function, because JAX caches traces
        return on_ranks(lambda x, m: op(x, m)).trace(x, metadata)

    loop = common.interleaved(
        {name: functools.partial(fn, x, metadata) for name, fn in loops.items()}, repeats
    )
    traced = common.interleaved(
        {name: functools.partial(trace, op) for name, op in ops.items()}, 5 * repeats
    )
    until_return, until_done = calls(programs, x, metadata, 20 * repeats)
    return [
        {
            "devices": world_size,
            "what": name,
            "loop_us": round(1e6 * loop[name] / STEPS, 1),
            "trace_ms": round(1e3 * traced[name], 2),
            "call_returns_us": round(1e6 * until_return[name], 1),
            "call_done_us": round(1e6 * until_done[name], 1),
        }
        for name in ops
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    arguments = common.options(parser, devices=[2])
    start_cpu_devices(max(arguments.devices))
    rows = []
    print("devices  what       in a loop us  trace ms  call returns us  done us")
    for world_size in arguments.devices:
        for row in measure(world_size, arguments.repeats):
            rows.append(row)
            print(
                "{devices:7d}  {what:<9}{loop_us:14.1f}{trace_ms:10.2f}{call_returns_us:17.1f}"
                "{call_done_us:9.1f}".format(**row),
                flush=True,
            )
    common.write(arguments.output, f"[{T}, {FEATURE}] float32 per rank", rows)


if __name__ == "__main__":
    main()
