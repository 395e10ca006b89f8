"""Measures dispatch and combine between processes of one host, against memcpy and gloo.

Each process has one device and sends one segment of random length to every other. All methods must
give the same result, which is checked first. The benchmark starts the processes itself.
"""

from collections.abc import Iterator
from typing import Any

import between_processes
import common

from jax_cp_dispatch.tools import programs

PROCESSES = (2, 4)
ALL_BYTES = (128 << 20, 2 << 20)
COLLECTIVES = (programs.ALL_TO_ALL, programs.ALL_GATHER)


def measure(processes: int, num_bytes: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each program, first for a copy by the host."""
    rows = list(between_processes.measure(processes, num_bytes, (), repeats, {}))
    gloo = min(row["seconds"] for row in rows if row["what"] in COLLECTIVES)
    memcpy = rows[0]["of_limit"] * rows[0]["seconds"]
    seconds = {programs.MEMCPY: memcpy} | {row["what"]: row["seconds"] for row in rows}
    for what, value in seconds.items():
        is_gloo = what in COLLECTIVES
        yield {
            "processes": processes,
            "MB": num_bytes >> 20,
            "what": f"gloo: {what}" if is_gloo else what.removesuffix(", one replica"),
            "ms": round(1e3 * value, 3),
            "of_memcpy": round(memcpy / value, 3),
            "times_gloo": round(gloo / value, 2),
        }


def main() -> None:
    arguments = common.options(common.parser(__doc__))
    rows = []
    for processes in PROCESSES:
        for num_bytes in ALL_BYTES[arguments.quick :]:
            for row in measure(processes, num_bytes, arguments.repeats):
                rows.append(row)
                print(
                    "{processes} processes, {MB:4d} MB: {what:<46}{ms:9.2f} ms{of_memcpy:8.3f} of "
                    "memcpy{times_gloo:8.1f} x gloo's faster way".format(**row)
                )
    row_kB = 4 * between_processes.ROW_ELEMENTS // 1024
    title = f"dispatch between processes of one host, rows of {row_kB} kB in random segments"
    common.write(arguments.output, title, rows)


if __name__ == "__main__":
    main()
