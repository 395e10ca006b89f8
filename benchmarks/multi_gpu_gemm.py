"""Tensor-parallel GEMMs: this package's methods, XLA's windowed einsum, JAX's collective matmul."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from multi_gpu_programs import Program, Sizes, failing, timed

from jax_cp_dispatch.buffers import comm_overlap_buffer_bytes
from jax_cp_dispatch.tools.programs import (
    AXIS,
    GATHER,
    GEMM,
    PRODUCT_TOLERANCE,
    SCATTER,
    XLA,
    Product,
    Ranks,
)

METHODS = {
    GATHER: ("none", "ring", "ring direct", "ring pairs"),
    SCATTER: ("none", "ring", "ring direct", "pipeline 2", "pipeline 4"),
}
WINDOWED, MOSAIC = "XLA's windowed einsum", "JAX's collective matmul"
WINDOWED_OPTIONS = {
    "xla_gpu_threshold_for_windowed_einsum_mib": 0,
    "xla_gpu_multi_streamed_windowed_einsum": True,
}


class Gemms:
    """The section: every shape as an all-gather GEMM, and transposed as a reduce-scatter one."""

    def __init__(self, ranks: Ranks, sizes: Sizes):
        self._ranks, self._sizes = ranks, sizes
        self._shapes = [
            shape for m, k, n in sizes.gemms for shape in ((GATHER, m, k, n), (SCATTER, m, n, k))
        ]

    @property
    def symmetric_bytes(self) -> int:
        """A buffer for each shape and method: a ring's, or the whole array."""
        total = 0
        for op, m, k, n in self._shapes:
            kind, width = ("AG", k) if op == GATHER else ("RS", n)
            whole = "PIPELINE" if kind == "RS" else "BULK"
            for method in ("RING_EXCHANGE", *[whole] * (len(METHODS[op]) - 1)):
                total += comm_overlap_buffer_bytes(
                    kind, method, (m, width), "float32", self._ranks.count
                )
        return total

    def rows(self) -> Iterator[dict[str, Any]]:
        for op, m, k, n in self._shapes:
            methods = METHODS[op]
            if self._ranks.count % 2:
                methods = tuple(name for name in methods if name != "ring pairs")
            product = Product(self._ranks, (op, m, k, n), self._sizes.dtype, methods)
            x, w = product.x, product.w
            programs = {name: Program(fn, x, w) for name, fn in product.programs.items()}
            about = {"M": m, "K": k, "N": n}
            for name, make in ((WINDOWED, self._windowed), (MOSAIC, self._mosaic)):
                try:
                    programs[name] = make(op, x, w)
                except Exception as error:  # of tracing, the same in all processes
                    reason = f"{type(error).__name__}: {error}"[:300]
                    yield {"what": f"{op}, {name}", **about, "left_out": reason}
            runs: dict[str, Any] = {name: partial(p, x, w) for name, p in programs.items()}
            for name, error in failing(runs).items():
                why = "left_out" if name in (WINDOWED, MOSAIC) else "error"
                yield {"what": f"{op}, {name}", **about, why: error}
                del runs[name]
            want = runs[XLA]()
            for name, run in runs.items():
                self._ranks.check_equal(name, run(), want, PRODUCT_TOLERANCE[self._sizes.dtype])
            found = timed(runs | {GEMM: product.alone}, self._sizes.rounds)
            for name, times in found.items():
                path = "nothing moves" if name == GEMM else programs[name].path
                yield {
                    **{"what": f"{op}, {name}", **about, **times},
                    "TFLOP_per_s_per_gpu": 2e-6 * m * k * n / self._ranks.count / times["us"],
                    "of_gemm_alone": found[GEMM]["us"] / times["us"],
                    "times_xla": found[XLA]["us"] / times["us"],
                    "path": path,
                }

    def _windowed(self, op: str, x: jax.Array, w: jax.Array) -> Program:
        """The product of sharded operands; XLA splits it into chunks and moves them meanwhile."""
        if not self._ranks.is_gpu:
            raise NotImplementedError("an option of XLA for GPUs")
        spec = P(None, AXIS) if op == GATHER else P(AXIS)
        sharding = NamedSharding(self._ranks.mesh, spec)
        multiply = jax.jit(lambda x, w: x @ w, out_shardings=sharding)
        return Program(multiply, x, w, options=WINDOWED_OPTIONS)

    def _mosaic(self, op: str, x: jax.Array, w: jax.Array) -> Program:
        """The kernel of jax.experimental.pallas.ops.gpu, which gathers; for Hopper."""
        if op != GATHER:
            raise NotImplementedError("JAX has none for a reduce-scatter")
        if not self._ranks.is_gpu:
            raise NotImplementedError("a kernel for GPUs")
        from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as mgpu

        config = mgpu.TuningConfig(
            tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_tile_width=8,
            grid_minor_dim=mgpu.MatmulDimension.N, wg_dimension=mgpu.MatmulDimension.M,
        )  # fmt: skip
        multiply = partial(mgpu.all_gather_lhs_matmul, axis_name=AXIS, config=config, dtype=x.dtype)
        return Program(self._ranks.program(multiply, (P(AXIS), P(None, AXIS)), P(None, AXIS)), x, w)
