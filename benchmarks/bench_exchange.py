"""Measures the exchanges of ring and Hamilton attention, by this package and by XLA.

For each number of devices and bytes per rank, measures one exchange inside `lax.scan`.
`ring_exchange` sends the bytes to one rank; `chunk_exchange` sends equal chunks to all others. The
upper limit is memcpy: one copy of the bytes of all ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

import common
import numpy as np

from jax_cp_dispatch.attention import chunk_exchange, ring_exchange
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.cycles import chunk_maps, hamiltonian_cycles
from jax_cp_dispatch.tools.programs import AXIS, Ranks, scanned

STEPS = 10
IMPLEMENTATIONS = ("in_process", "xla")


def measure(num_ranks: int, num_bytes: int, repeats: int) -> list[dict]:
    ranks = Ranks.of_devices(num_ranks, repeats)
    maps = chunk_maps(hamiltonian_cycles(num_ranks))
    shape = (num_ranks * (num_ranks - 1), num_bytes // 4 // (num_ranks - 1))
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    sharded = ranks.put(x)
    operations = {
        "ring_exchange": functools.partial(ring_exchange, axis_name=AXIS),
        "chunk_exchange": lambda x, **options: chunk_exchange(
            *(x, *maps), axis_name=AXIS, **options
        ),
    }
    runs: dict[str, Callable[[], Any]] = {
        "memcpy": functools.partial(np.copyto, np.empty_like(x), x)
    }
    for name, operation in operations.items():
        for implementation in IMPLEMENTATIONS:
            exchange = functools.partial(operation, implementation=implementation)
            program = ranks.program(scanned(exchange, STEPS))
            runs[f"{name} {implementation}"] = functools.partial(program, sharded)
        ours, xla = (runs[f"{name} {implementation}"]() for implementation in IMPLEMENTATIONS)
        np.testing.assert_array_equal(ours, xla, name)
    seconds = ranks.measure(runs)
    rows = []
    for key in list(runs)[1:]:
        (name, implementation), value = key.split(), seconds[key]
        row = {
            "devices": num_ranks,
            "bytes_per_rank": num_bytes,
            "what": name,
            "implementation": implementation,
            "us": round(1e6 * value / STEPS, 1),
            "GB_per_s": round(STEPS * x.nbytes / value / 1e9, 2),
            "of_memcpy": round(STEPS * seconds["memcpy"] / value, 3),
        }
        rows.append(row)
        print(
            "{devices:3d}{bytes_per_rank:10d}  {what:<16}{implementation:<12}{us:10.1f} us"
            "{GB_per_s:8.2f} GB/s{of_memcpy:8.3f} of memcpy".format(**row),
            flush=True,
        )
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 14, 1 << 20, 1 << 23])
    arguments = common.options(parser, devices=[3], bytes=[1 << 14])
    start_cpu_devices(max(arguments.devices))
    rows = []
    for num_ranks in arguments.devices:
        for num_bytes in arguments.bytes:
            rows += measure(num_ranks, num_bytes, arguments.repeats)
    common.write(arguments.output, "one exchange inside lax.scan", rows)


if __name__ == "__main__":
    main()
