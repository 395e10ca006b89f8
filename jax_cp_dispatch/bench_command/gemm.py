"""Tensor-parallel GEMMs: each method of this package against XLA's collective and GEMM."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch.bench_command.ranks import AXIS, BY_RANK, Ranks, Row
from jax_cp_dispatch.comm_gemm import all_gather_matmul, matmul_reduce_scatter

SECTION = "gemm"
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
XLA = "XLA's collective and GEMM"
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    GATHER: {
        "none": {"method": "none"},
        "ring": {"method": "ring"},
        "ring direct": {"method": "ring", "use_ce": False},
    },
    SCATTER: {
        "none": {"method": "none"},
        "ring direct": {"method": "ring", "use_ce": False},
        "pipeline 2": {"method": "pipeline", "num_splits": 2},
    },
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # sums over K in another order
_COLUMNS = P(None, AXIS)


def measure(
    ranks: Ranks, shapes: tuple[tuple[str, int, int, int], ...], dtype: str, section: str = SECTION
) -> Iterator[Row]:
    """Measures GEMMs (op, M, K, N) of global size; the limit is the GEMM without communication."""
    for op, m, k, n in shapes:
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(s).astype(jax.numpy.dtype(dtype)) for s in ((m, k), (k, n))]
        gathers = op == GATHER
        specs = (BY_RANK, _COLUMNS) if gathers else (_COLUMNS, BY_RANK)
        out = _COLUMNS if gathers else BY_RANK
        x, w = (ranks.put(a, spec) for a, spec in zip(arrays, specs, strict=True))
        function = all_gather_matmul if gathers else matmul_reduce_scatter
        programs = {XLA: ranks.program(_by_xla(gathers), specs, out)} | {
            method: ranks.program(partial(function, axis_name=AXIS, **options), specs, out)
            for method, options in METHODS[op].items()
        }
        runs = {name: partial(program, x, w) for name, program in programs.items()}
        for name in METHODS[op]:
            ranks.check_equal(f"{op}, {name}", runs[name](), runs[XLA](), TOLERANCE[dtype])
        if gathers:
            alone = ranks.program(lambda x, w: x @ w, (P(), _COLUMNS), _COLUMNS)
            runs["GEMM"] = partial(alone, ranks.put(arrays[0], P()), w)
        else:  # partial sums of all ranks, not added
            runs["GEMM"] = partial(ranks.program(lambda x, w: x @ w, specs, BY_RANK), x, w)
        seconds = ranks.measure(runs)
        for name in programs:
            yield Row(
                section,
                f"{op}, {name}",
                f"{m} × {k} × {n} {dtype}, {ranks.name}",
                seconds[name],
                2 * m * k * n / seconds[name],
                "FLOP/s",
                of_limit=seconds["GEMM"] / seconds[name],
                limit="the GEMM without communication",
                speedup=seconds[XLA] / seconds[name],
                alternative=XLA,
            )


def _by_xla(gathers: bool) -> Any:
    if gathers:
        return lambda x, w: lax.all_gather(x, AXIS, tiled=True) @ w
    return lambda x, w: lax.psum_scatter(x @ w, AXIS, tiled=True)
