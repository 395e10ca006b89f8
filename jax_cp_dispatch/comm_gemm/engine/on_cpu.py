"""Lowers the gemm of one rank for CPU devices: a custom call of this package."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.lowering import Choice, lower_rank_and_group, prepare_cpu_devices
from jax_cp_dispatch.comm_gemm.engine.blas import load_blas, threads_per_device
from jax_cp_dispatch.comm_gemm.engine.call import GemmCall, GemmOperands


def lower(ctx: Any, *values: Any, call: GemmCall, names: tuple[str, ...], choice: Choice) -> Any:
    """Lowers a call; `names` are those of the operands in `values`."""
    prepare_cpu_devices()
    load_blas()
    first, types = lower_rank_and_group(ctx, call.comm)
    absent = jax.typeof(np.zeros((1,), np.float32))  # jaxlib 0.11 crashes on empty arrays
    (nothing,) = mlir.lower_fun(lambda: [jnp.zeros((1,))], multiple_results=True)(
        ctx.replace(avals_in=(), avals_out=None)
    )
    given = GemmOperands.of(dict(zip(names, values, strict=True)))
    avals = GemmOperands.of(dict(zip(names, ctx.avals_in, strict=True)))
    shapes = call.result_shapes(avals)
    like = ctx.avals_in[0]
    aval = lambda s: absent if s is None else like.update(shape=s[0], dtype=s[1], weak_type=False)
    aux_boundary = 1 if avals.aux_in is None else avals.aux_in.ndim - 1
    handler_ctx = ctx.replace(
        avals_in=(*types, *(absent if x is None else x for x in avals)),
        avals_out=[aval(shape) for shape in shapes],
    )
    results = jax.ffi.ffi_lowering(runtime.GEMM_TARGET)(
        handler_ctx,
        *(*first, *(nothing if x is None else x for x in given)),
        aux_axis_boundary=np.int64(aux_boundary),
        **choice.rank_attributes(ctx, call.comm, _what(call)),
        **call.attributes(threads_per_device()),
    )
    return [x for x, shape in zip(results, shapes, strict=True) if shape is not None]


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
