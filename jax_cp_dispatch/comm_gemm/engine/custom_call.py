"""The custom call of a gemm: what CPUs and GPUs do alike, and its lowering for CPUs."""

import functools
import importlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.lowering import Chosen, prepare_cpu_devices, rank_and_group
from jax_cp_dispatch._ranks.processes import num_cpu_devices_here
from jax_cp_dispatch.comm_gemm.engine.gemm_call import GemmCall, GemmOperands, GemmResults


@functools.cache
def load_blas() -> str:
    """Loads the library once; returns its file, or "" if SciPy's own routines are used.

    Raises:
      ImportError: SciPy, which JAX depends on, is not installed.
    """
    cython_blas: Any = importlib.import_module("scipy.linalg.cython_blas")

    routines = cython_blas.__pyx_capi__  # jaxlib's LAPACK uses it too
    return runtime.native.load_blas(sgemm=routines["sgemm"], dgemm=routines["dgemm"])


def threads_per_device() -> int:
    """Returns the threads of one GEMM while the other devices of this host run theirs."""
    return max(1, len(os.sched_getaffinity(0)) // num_cpu_devices_here())


def call_handler(
    operands: GemmOperands, shapes: GemmResults, places: list[Any], attributes: dict[str, Any]
) -> GemmResults:
    """Makes the call.

    Args:
      operands: None where there is none.
      shapes: (shape, dtype) of each result, None where there is none.
      places: the device's rank and group.
      attributes: what the handler reads.
    Returns:
      The results; those without a shape have one element, as operands that are absent.
    """
    absent = (1,), np.float32  # jaxlib 0.11 crashes on empty arrays
    results = [jax.ShapeDtypeStruct(*(absent if s is None else s)) for s in shapes]
    given = [jnp.zeros(*absent) if x is None else x for x in operands]
    return GemmResults(
        *jax.ffi.ffi_call(runtime.GEMM_TARGET, results)(*places, *given, **attributes)
    )


def aux_boundary(operands: GemmOperands) -> np.int64:
    """Returns the leading dimensions of `aux_in` that are rows; 1 without it."""
    return np.int64(1 if operands.aux_in is None else len(operands.aux_in.shape) - 1)


def lower_on_cpu(
    ctx: Any, *values: Any, call: GemmCall, names: tuple[str, ...], choice: Chosen
) -> Any:
    """Lowers a call; `names` are those of the operands in `values`."""
    prepare_cpu_devices()
    load_blas()
    attributes = call.attributes(threads_per_device())
    attributes |= choice.rank_attributes(ctx, call.comm, _what(call))

    def run(*values):
        operands = GemmOperands.of(dict(zip(names, values, strict=True)))
        shapes = call.result_shapes(operands)
        more = {**attributes, "aux_axis_boundary": aux_boundary(operands)}
        written = call_handler(operands, shapes, rank_and_group(call.comm), more)
        return [x for x, shape in zip(written, shapes, strict=True) if shape is not None]

    return mlir.lower_fun(run, multiple_results=True)(ctx, *values)


def _what(call: GemmCall) -> str:
    """Describes the operation beyond its shapes; calls meet only if they agree in this text."""
    kind = f"{call.overlap.comm_type.name}, {call.overlap.method.name}"
    said = {"op", "axis", "num_ranks", "comm_type", "comm_overlap_method", "row_counts"}
    of_a_rank = {"deadline_ms", "num_threads"}
    others = [
        name if value is True else f"{name} {value}"
        for name, value in call.attributes(num_threads=1).items()
        if name not in said | of_a_rank and value
    ]
    return f"{call.op} ({kind}) of rows {list(call.row_counts)}, {', '.join(others)}"
