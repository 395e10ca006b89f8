"""Measures growth with the number of devices: a fixed payload per rank, in equal parts to all.

Measures a donated and a fresh window, `jax.lax.ppermute`, which moves the same bytes to one
neighbour, and memcpy of all bytes by one thread.
"""

import common
import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch import compute_metadata, dispatch
from jax_cp_dispatch.bench_command.ranks import AXIS, Ranks
from jax_cp_dispatch.cpu_devices import start_cpu_devices

PAYLOADS = ((1024, 256), (64, 8))  # float32 per rank: 1 MiB, and 2 KiB


def measure(world_size, shape, repeats):
    over, num_tokens = Ranks.of_devices(world_size, repeats), shape[0]
    ranks = np.arange(world_size, dtype=np.int32)
    lengths = np.diff(np.linspace(0, num_tokens, world_size + 1).astype(np.int32))
    # The destination of a part rotates with the sender, so every rank receives one of each.
    to = (ranks[:, None] + ranks) % world_size
    plan, _ = compute_metadata(np.tile(lengths, (world_size, 1)), to)
    metadata = jax.tree.map(over.put, plan)
    rows = np.random.default_rng(0).normal(size=(world_size, *shape)).astype(np.float32)
    x = over.put(rows.reshape(-1, *shape[1:]))

    fresh = over.program(lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=num_tokens))
    reuse = over.program(
        lambda x, m, out: dispatch(x, m, axis_name=AXIS, capacity=num_tokens, out=out),
        donate_argnums=2,
    )
    to_next = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    neighbour = over.program(lambda x: jax.lax.ppermute(x, AXIS, to_next))
    window = jnp.copy(fresh(x, metadata))

    def into_donated_window():
        nonlocal window
        window = reuse(x, metadata, window)
        return window

    cuts = np.split(rows, np.cumsum(lengths)[:-1], axis=1)  # cuts[p][s]: part p of sender s
    received = [[cuts[(rank - sender) % world_size][sender] for sender in ranks] for rank in ranks]
    expected = np.concatenate([np.concatenate(parts) for parts in received])
    for result in (fresh(x, metadata), into_donated_window()):
        np.testing.assert_array_equal(result, expected)

    destination, origin = np.zeros(x.nbytes, np.uint8), np.ones(x.nbytes, np.uint8)
    seconds = over.measure(
        {
            "donated": into_donated_window,
            "fresh": lambda: fresh(x, metadata),
            "ppermute": lambda: neighbour(x),
            "memcpy": lambda: np.copyto(destination, origin),
        }
    )
    return {
        "devices": world_size,
        "bytes_per_rank": x.nbytes // world_size,
        **{f"{name}_ms": round(1e3 * value, 3) for name, value in seconds.items()},
        **{f"{name}_GB_per_s": round(x.nbytes / value / 1e9, 3) for name, value in seconds.items()},
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    arguments = common.options(parser, devices=[2, 4])
    start_cpu_devices(max(arguments.devices))
    rows = []
    print("bytes/rank  devices  donated ms  fresh ms  ppermute ms  memcpy ms  donated GB/s")
    for shape in PAYLOADS:
        for world_size in arguments.devices:
            row = measure(world_size, shape, arguments.repeats)
            rows.append(row)
            print(
                "{bytes_per_rank:10d}{devices:9d}{donated_ms:12.3f}{fresh_ms:10.3f}"
                "{ppermute_ms:13.3f}{memcpy_ms:11.3f}{donated_GB_per_s:14.2f}".format(**row),
                flush=True,
            )
    common.write(arguments.output, "a fixed payload per rank", rows)


if __name__ == "__main__":
    main()
