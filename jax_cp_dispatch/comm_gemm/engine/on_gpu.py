"""Lowers the gemm of one rank for NVIDIA GPUs: a custom call with scratch memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu import all_ranks_here, what_pointers_lack
from jax_cp_dispatch._ranks.implementations import Operation
from jax_cp_dispatch._ranks.lowering import Chosen, fall_back, rank_and_group
from jax_cp_dispatch._ranks.runtime import open_cublaslt
from jax_cp_dispatch.comm_gemm.engine.custom_call import aux_boundary, call_handler
from jax_cp_dispatch.comm_gemm.engine.gemm_call import (
    GemmCall,
    GemmOperands,
    GemmResults,
    collapse,
)
from jax_cp_dispatch.comm_gemm.types import BYTE_FLOATS, CommOverlapMethod, CommOverlapType

_WIDE = ("float32", "bfloat16", "float16")
_BLACKWELL = 10.0  # the first compute capability with MXFP8


def _sizes(call: GemmCall, operands: GemmOperands) -> tuple[int, int, int]:
    """Returns M, N and K of a rank's whole product."""
    lhs = collapse(operands.lhs.shape, call.lhs_boundary)
    rhs = collapse(operands.rhs.shape, call.rhs_boundary)
    k, m = lhs if call.lhs_transposed else lhs[::-1]
    if call.gathers and not call.is_bulk:
        m = call.num_batches * sum(call.row_counts)
    return m, rhs.rows if call.rhs_transposed else rhs.columns, k


def what_gpus_lack(call: GemmCall, operands: GemmOperands) -> str | None:
    """Returns why a call on GPUs needs XLA, whatever the transport; None if it does not."""
    _, n, k = _sizes(call, operands)
    types = lhs, rhs, out = (
        jnp.dtype(operands.lhs.dtype).name,
        jnp.dtype(operands.rhs.dtype).name,
        call.out_dtype,
    )
    is_sum = call.overlap.comm_type == CommOverlapType.RS and not call.is_bulk
    results = {out, call.overlap.partial_dtype} if is_sum else {out}
    is_narrow = lhs in BYTE_FLOATS
    if is_narrow:
        fits = rhs in BYTE_FLOATS and results <= set(_WIDE)
    else:
        fits = lhs == rhs and lhs in _WIDE and results <= {lhs, "float32"}
    if not fits:
        return f"cuBLASLt does not multiply {types[0]} by {types[1]} with a result in {types[2]}"
    chunks = 1
    if call.overlap.method == CommOverlapMethod.PIPELINE:
        chunks = max(1, min(call.overlap.num_splits, n))
    if is_narrow and (k % 16 or n % (16 * chunks)):
        return (
            f"8-bit operands need K in multiples of 16 and N of {16 * chunks}, not K={k} and N={n}"
        )
    if call.is_bulk and not call.gathers and operands.aux_in.dtype.name not in _WIDE:
        return f"GPUs cannot sum {operands.aux_in.dtype.name} here"
    if call.is_mxfp8:
        if call.comm.axis_names:
            return "MXFP8 products do not overlap with communication on GPUs"
        if call.fuse_bias and call.grad and not call.fuse_gelu:
            return "XLA computes the gradient of a bias with MXFP8 operands"
        found = _compute_capability()
        if found is not None and found < _BLACKWELL:
            return f"MXFP8 needs a GPU of compute capability {_BLACKWELL}, this one has {found}"
    return None


@functools.cache
def _compute_capability() -> float | None:
    """Returns the local GPU's capability; None if programs are lowered for another machine."""
    if jax.default_backend() != "gpu":
        return None
    return float(getattr(jax.local_devices()[0], "compute_capability", _BLACKWELL))


def scratch_bytes(call: GemmCall, operands: GemmOperands) -> int:
    """Returns the bytes of a rank's scratch memory, at any alignment."""
    has_scales = operands.lhs_scale_inv is not None
    return runtime.native.gemm_scratch_bytes(_sizes(call, operands), call, has_scales=has_scales)


def _scratch(call: GemmCall, operands: GemmOperands, workspace) -> tuple[tuple[int], Any]:
    """Returns (shape, dtype) that replace the workspace's; the dtype is that of partial sums."""
    dtype = np.dtype(np.uint8) if workspace is None else jnp.dtype(workspace[1])
    return (-(-scratch_bytes(call, operands) // dtype.itemsize),), dtype


def _attributes(call: GemmCall, of_rank: GemmOperands) -> dict[str, Any]:
    config: Any = jax.config  # its options are not declared
    precision = str(config.jax_default_matmul_precision).lower()
    return {
        **call.attributes(1),
        "aux_axis_boundary": aux_boundary(of_rank),
        "gemm_priority": np.int64(call.overlap.gemm_priority),
        "comm_priority": np.int64(call.overlap.comm_priority),
        "num_comm_sm": np.int64(call.overlap.num_comm_sm),
        "set_sm_margin": call.overlap.set_sm_margin,
        "use_split_accumulator": call.use_split_accumulator,
        "tf32": precision in ("tensorfloat32", "high", "tf32_tf32_f32"),
    }


def lower(ctx: Any, *values: Any, call: GemmCall, names: tuple[str, ...], choice: Chosen) -> Any:
    """Lowers a call, or leaves it to XLA; `names` are those of the operands in `values`."""
    missing = what_gpus_lack(call, GemmOperands.of(dict(zip(names, ctx.avals_in, strict=True))))
    if missing is None and call.comm.axis_names:
        unmapped = what_pointers_lack(ctx, call.comm, choice.groups)
        missing = unmapped and f"{unmapped}, and products overlap through mapped memory"
    if missing is None:
        return _lower_custom_call(ctx, *values, call=call, names=names, choice=choice)
    by_xla = fall_back(choice, call.op, call.comm, missing)
    return by_xla.lower(Operation.GEMM, ctx, *values, call=call, names=names)


def _lower_custom_call(ctx, *values, call: GemmCall, names, choice: Chosen):
    open_cublaslt()
    ranks = choice.rank_attributes(ctx, call.comm, "")

    def run(*values):
        operands = GemmOperands.of(dict(zip(names, values, strict=True)))
        attributes = _attributes(call, operands) | ranks
        shapes = call.result_shapes(operands)
        scratch = shapes._replace(workspace=_scratch(call, operands, shapes.workspace))
        written = call_handler(operands, scratch, rank_and_group(call.comm), attributes)
        if shapes.workspace is not None:  # it keeps the program's shape, and is never read
            written = written._replace(workspace=jnp.zeros(*shapes.workspace))
        return [x for x, shape in zip(written, shapes, strict=True) if shape is not None]

    return mlir.lower_fun(run, multiple_results=True)(ctx, *values)


def run_all_ranks(call: GemmCall, **operands: Any) -> GemmResults:
    """Runs a call with communication on one GPU that holds all ranks, for tests and benchmarks.

    Call under `jax.jit` for the GPU. No derivative.

    Args:
      call: the call of one rank.
      operands: by name, with a leading dimension of ranks.
    Returns:
      Results with that dimension; absent ones are None.
    """
    open_cublaslt()
    p = call.comm.num_ranks
    of_rank = {
        name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        for name, x in operands.items()
        if x is not None
    }
    avals = GemmOperands.of(of_rank)
    missing = what_gpus_lack(call, avals)
    if missing is not None:
        raise NotImplementedError(f"{call.op}: {missing}. Use implementation='xla'.")
    shapes = call.result_shapes(avals)
    scratch = shapes._replace(workspace=_scratch(call, avals, shapes.workspace))
    of_all = GemmResults(*(s and ((p, *s[0]), s[1]) for s in scratch))
    attributes = _attributes(call, avals) | all_ranks_here()
    results = call_handler(
        GemmOperands.of(operands), of_all, [jnp.int32(0), jnp.int32(0)], attributes
    )
    absent = {name: None for name, s in shapes._asdict().items() if s is None}
    return results._replace(**{**absent, "workspace": None})
