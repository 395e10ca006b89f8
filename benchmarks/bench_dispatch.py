"""Measures the bandwidth of dispatch and combine on 8 virtual devices, memcpy and XLA.

4096 tokens per rank, 16 heads x 128, bfloat16, random segments: each exchange moves 134 MB. All
methods must give the same result, which is checked first.
"""

import common
import jax
import ml_dtypes
import numpy as np

from jax_cp_dispatch import combine, compute_metadata
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.tools.programs import (
    ALL_GATHER,
    ALL_TO_ALL,
    AXIS,
    FRESH,
    MEMCPY,
    ExchangeProgram,
    Ranks,
)

W, FEATURE = 8, (16, 128)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    arguments = common.options(parser, tokens=256)
    T = arguments.tokens
    start_cpu_devices(W)
    ranks = Ranks.of_devices(W, arguments.repeats)
    exchange = ExchangeProgram(ranks, T, FEATURE, ml_dtypes.bfloat16)
    exchange.check()

    # The same total of received rows, but as four copies of a quarter of the tokens.
    copies, _ = compute_metadata(
        np.full((W, 1), T // 4, np.int32), (np.arange(W)[:, None, None] + np.arange(4)) % W
    )
    copies = jax.tree.map(ranks.put, copies)
    sum_copies = ranks.program(lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=T // 4))
    alone = {
        MEMCPY: exchange.limit(),
        **exchange.runs,
        "combine, four replicas (bytes read)": lambda: sum_copies(exchange.x, copies),
    }
    # The collectives allocate so much memory that runs between them find none cached.
    among_collectives = {
        "dispatch, interleaved with the next two": exchange.runs[FRESH],
        **{name: exchange.collectives[name] for name in (ALL_TO_ALL, ALL_GATHER)},
    }
    seconds = common.interleaved(alone, arguments.repeats)
    seconds |= common.interleaved(among_collectives, arguments.repeats)
    limit, num_bytes = seconds[MEMCPY], exchange.x.nbytes
    rows = [
        {
            "what": name,
            "ms": round(1e3 * value, 2),
            "GB_per_s": round(num_bytes / value / 1e9, 2),
            "of_memcpy": round(limit / value, 3),
        }
        for name, value in seconds.items()
    ]
    for row in rows:
        print("{what:<42}{ms:9.2f} ms{GB_per_s:8.2f} GB/s{of_memcpy:8.3f} of memcpy".format(**row))
    heads, size = FEATURE
    sizes = f"{T} tokens per rank, {heads} heads × {size}, {exchange.x.dtype}, random segments"
    title = f"dispatch of {num_bytes / 1e6:.0f} MB over {W} devices ({sizes})"
    common.write(arguments.output, title, rows)


if __name__ == "__main__":
    main()
