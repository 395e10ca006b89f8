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

from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.tools.programs import SMALL, Ranks, scanned, small_exchange

STEPS = 200


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
    ranks = Ranks.of_devices(world_size, repeats)
    x, metadata, operations = small_exchange(ranks)
    rows = np.asarray(x).reshape(world_size, *SMALL)
    ops = operations | {"no exchange": lambda x, _: x + 1}
    programs = {name: ranks.program(op) for name, op in ops.items()}
    loops = {name: ranks.program(scanned(op, STEPS)) for name, op in ops.items()}
    for step, name in ((1, "dispatch"), (1, "ppermute"), (-1, "combine")):
        for moved, num_steps in ((programs, 1), (loops, STEPS)):
            expected = np.roll(rows, step * num_steps, axis=0).reshape(-1, SMALL[1])
            np.testing.assert_array_equal(moved[name](x, metadata), expected, name)

    def trace(op):  # a new function, because JAX caches traces
        return ranks.program(lambda x, m: op(x, m)).trace(x, metadata)

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
    common.write(arguments.output, f"{list(SMALL)} float32 per rank", rows)


if __name__ == "__main__":
    main()
