"""Tensor-parallel GEMMs: each method of this package against XLA's collective and GEMM."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch.bench_command.ranks import AXIS, BY_RANK, Ranks, Row
from jax_cp_dispatch.comm_gemm import all_gather_matmul, matmul_reduce_scatter

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
XLA, GEMM = "XLA's collective and GEMM", "GEMM"
METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "none": {"method": "none"},
    "ring": {"method": "ring"},
    "ring direct": {"method": "ring", "use_ce": False},
    "ring pairs": {"method": "ring", "aggregate": True},
    "ring atomic": {"method": "ring", "atomic": True},
    "pipeline 2": {"method": "pipeline", "num_splits": 2},
    "pipeline 4": {"method": "pipeline"},
    "pipeline atomic": {"method": "pipeline", "atomic": True},
}
MEASURED = {
    GATHER: ("none", "ring", "ring direct"),
    SCATTER: ("none", "ring direct", "pipeline 2"),
}  # by the command
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # sums over K in another order
Shape = tuple[str, int, int, int]  # op, M, K, N of global size
_COLUMNS = P(None, AXIS)


class Product:
    """One GEMM over all ranks.

    Attributes:
      x, w: its operands.
      programs: functions of the operands by name, first XLA's; all give the same result.
      alone: a run of the GEMM without communication.
    """

    def __init__(self, ranks: Ranks, shape: Shape, dtype: str, methods: Sequence[str]):
        op, m, k, n = shape
        self.op, self._ranks, self._dtype = op, ranks, dtype
        rng = np.random.default_rng(0)
        draw = lambda *s: rng.standard_normal(s, np.float32).astype(jax.numpy.dtype(dtype))
        x, w = draw(m, k), draw(k, n)
        gathers = op == GATHER
        specs = (BY_RANK, _COLUMNS) if gathers else (_COLUMNS, BY_RANK)
        out = _COLUMNS if gathers else BY_RANK
        self.x, self.w = (ranks.put(a, spec) for a, spec in zip((x, w), specs, strict=True))
        function = all_gather_matmul if gathers else matmul_reduce_scatter
        self.programs = {XLA: ranks.program(_by_xla(gathers), specs, out)} | {
            name: ranks.program(partial(function, axis_name=AXIS, **METHODS[name]), specs, out)
            for name in methods
        }
        # The product of gathered operands, or partial sums of all ranks, not added.
        in_specs = (P(), _COLUMNS) if gathers else specs
        multiply = ranks.program(lambda x, w: x @ w, in_specs, _COLUMNS if gathers else BY_RANK)
        self.alone = partial(multiply, ranks.put(x, P()) if gathers else self.x, self.w)

    def communication(self) -> Callable[[], Any]:
        """Returns a run of XLA's collective alone."""
        if self.op == GATHER:
            gather = self._ranks.program(lambda x: lax.all_gather(x, AXIS, tiled=True)[None])
            return partial(gather, self.x)
        scatter = self._ranks.program(lambda y: lax.psum_scatter(y, AXIS, tiled=True))
        return partial(scatter, self.alone())

    @property
    def runs(self) -> dict[str, Any]:
        return {name: partial(run, self.x, self.w) for name, run in self.programs.items()}

    def check(self) -> None:
        """Raises ValueError if a program gives another result than XLA's."""
        want, *_ = (run() for run in self.runs.values())
        for name, run in self.runs.items():
            self._ranks.check_equal(f"{self.op}, {name}", run(), want, TOLERANCE[self._dtype])


def _by_xla(gathers: bool) -> Any:
    if gathers:
        return lambda x, w: lax.all_gather(x, AXIS, tiled=True) @ w
    return lambda x, w: lax.psum_scatter(x @ w, AXIS, tiled=True)


def measure(
    ranks: Ranks,
    shapes: Sequence[Shape],
    dtype: str,
    methods: Mapping[str, Sequence[str]] = MEASURED,
) -> Iterator[Row]:
    """Measures GEMMs; the limit is the GEMM without communication."""
    for op, m, k, n in shapes:
        product = Product(ranks, (op, m, k, n), dtype, methods[op])
        product.check()
        seconds = ranks.measure(product.runs | {GEMM: product.alone})
        for name in product.programs:
            yield Row(
                f"{op}, {name}",
                f"{m} × {k} × {n} {dtype}, {ranks.name}",
                seconds[name],
                2 * m * k * n / seconds[name],
                "FLOP/s",
                of_limit=seconds[GEMM] / seconds[name],
                limit="the GEMM without communication",
                speedup=seconds[XLA] / seconds[name],
                alternative=XLA,
            )
