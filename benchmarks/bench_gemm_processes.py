"""Measures tensor-parallel GEMMs between processes of one host, against gloo and XLA's GEMM.

Each process has one device. The baseline is `all_gather` then a GEMM, or a GEMM then
`psum_scatter`, through gloo. Results are checked first. The benchmark starts the processes itself.
"""

import between_processes
import common

from jax_cp_dispatch.tools.programs import GATHER, SCATTER, XLA

M, K, N = 2048, 1024, 2048  # over all ranks
PROCESSES = (2, 4)
METHODS = {
    GATHER: ("none", "ring", "ring direct"),
    SCATTER: ("none", "ring", "ring direct", "pipeline 4"),
}


def main() -> None:
    arguments = common.options(common.parser(__doc__))
    shapes = [(op, M, K, N) for op in METHODS]
    rows = []
    for processes in PROCESSES:
        for measured in between_processes.measure(processes, 0, shapes, arguments.repeats, METHODS):
            op, what = measured["what"].split(", ")
            row = {
                "processes": processes,
                "op": op,
                "what": "XLA with gloo" if what == XLA else what,
                "ms": round(1e3 * measured["seconds"], 3),
                "times_gloo": round(measured["speedup"], 2),
            }
            rows.append(row)
            print(
                "{processes} processes, {op:<22} {what:<42}{ms:9.2f} ms{times_gloo:8.2f} x "
                "gloo".format(**row)
            )
    title = f"overlapped GEMMs between processes of one host, {M} × {K} × {N} in float32"
    common.write(arguments.output, title, rows)


if __name__ == "__main__":
    main()
