"""`grouped_gemm`: a GEMM for each group of rows, as in mixture-of-experts layers."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.implementations import (
    ON_CPU,
    ON_GPU,
    XLA,
    Operation,
    check_implementation,
    register_lowering,
)
from jax_cp_dispatch._ranks.lowering import (
    Chosen,
    choose,
    fall_back,
    one_after_another,
    run_alone,
)
from jax_cp_dispatch._ranks.options import vary_alike, whole_on_explicit_axes
from jax_cp_dispatch.buffers import check_flag
from jax_cp_dispatch.comm_gemm.checks import (
    check_operand_types,
    read_arrays,
    required_scales,
    result_dtype,
    reverse_mode_only,
)
from jax_cp_dispatch.comm_gemm.primitive import (
    GemmCall,
    load_blas,
    threads_per_device,
)
from jax_cp_dispatch.scaling import ScalingMode

grouped_gemm_p = Primitive("grouped_gemm")


# The call says by `lhs_transposed` that rows are contracted: lhs [M, K] and rhs [M, N] give
# [G, K, N]. Otherwise lhs [M, K] and a matrix per group, [G, K, N] or, as `rhs_transposed` says,
# [G, N, K], give [M, N]. Operands that are not used have one element.


def _shape(lhs, *_, call: GemmCall):
    return lhs.update(shape=call.out_shape, dtype=jnp.dtype(call.out_dtype), weak_type=False)


def _lower(ctx, *operands, call: GemmCall):
    choice = choose(ctx, call.op, call.comm)
    rule = choice.implementation.lowerings[Operation.GROUPED_GEMM]
    return rule(ctx, *operands, call=call, choice=choice)


def _lower_on_cpu(ctx, *operands, call: GemmCall, choice: Chosen):
    load_blas()
    return jax.ffi.ffi_lowering(runtime.GROUPED_GEMM_TARGET)(
        ctx,
        *operands,
        op=call.op,
        num_threads=np.int64(threads_per_device()),
        scaling_mode=np.int64(call.scaling_mode),
        contracts_rows=call.lhs_transposed,
        rhs_transposed=call.rhs_transposed,
        fuse_bias=call.fuse_bias,
    )


def _lower_on_gpu(ctx, *operands, call: GemmCall, choice: Chosen):
    missing = "grouped products on GPUs are XLA's ragged_dot, without a host's synchronisation"
    by_xla = fall_back(choice, call.op, call.comm, missing)
    return _lower_by_xla(ctx, *operands, call=call, choice=by_xla)


def _lower_by_xla(ctx, *operands, call: GemmCall, choice: Chosen):
    by_xla = functools.partial(grouped_gemm_by_xla, call=call)
    return mlir.lower_fun(by_xla, multiple_results=False)(ctx, *operands)


register_lowering(Operation.GROUPED_GEMM, _lower_on_cpu, on=ON_CPU)
register_lowering(Operation.GROUPED_GEMM, _lower_on_gpu, on=ON_GPU)
register_lowering(Operation.GROUPED_GEMM, _lower_by_xla, on=[XLA])


def grouped_gemm_by_xla(
    lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, group_sizes, *, call: GemmCall
):
    """Computes a grouped gemm with `jax.lax.ragged_dot_general`."""
    wide = sum_dtype(call.out_dtype)
    num_rows = lhs.shape[0]
    is_row = jnp.arange(num_rows)[:, None] < group_sizes.sum()
    of_rows = lambda x: jnp.repeat(x, group_sizes, axis=0, total_repeat_length=num_rows)
    if call.scaling_mode != ScalingMode.NO_SCALING:
        lhs = lhs.astype(wide) * of_rows(lhs_scale_inv)[:, None]
        rhs_scale = of_rows(rhs_scale_inv) if call.lhs_transposed else rhs_scale_inv
        rhs = rhs.astype(wide) * rhs_scale.reshape(-1, *[1] * (rhs.ndim - 1))
    contracted = ((0,), (0,)) if call.lhs_transposed else ((1,), (2 if call.rhs_transposed else 1,))
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[] if call.lhs_transposed else [0],
    )
    is_exact = max(lhs.dtype.itemsize, rhs.dtype.itemsize) < 4  # in float32; Mosaic refuses HIGHEST
    product = lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        numbers,
        precision=None if is_exact else lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )
    if call.lhs_transposed:
        return product.reshape(call.out_shape).astype(call.out_dtype)
    if call.fuse_bias:
        product = product + of_rows(bias.astype(wide))
    return jnp.where(is_row, product, 0).astype(call.out_dtype)


grouped_gemm_p.def_abstract_eval(_shape)
grouped_gemm_p.def_impl(functools.partial(run_alone, grouped_gemm_p))
mlir.register_lowering(grouped_gemm_p, _lower)
batching.primitive_batchers[grouped_gemm_p] = functools.partial(one_after_another, grouped_gemm_p)


def _no_derivative(primals, tangents, *, call: GemmCall):
    raise NotImplementedError(
        f"grouped_gemm: no derivative is defined with {call.scaling_mode}. Quantize inside a "
        "function whose derivative you define, or differentiate it with NO_SCALING (reverse mode)."
    )


ad.primitive_jvps[grouped_gemm_p] = _no_derivative


def _matrices(
    lhs: Float[Array, "M K"], group_sizes: Shaped[Array, " G"], rhs: Float[Array, "G K N"]
): ...


def _transposed(
    lhs: Float[Array, "M K"], group_sizes: Shaped[Array, " G"], rhs: Float[Array, "G N K"]
): ...


def _rows(lhs: Float[Array, "M K"], rhs: Float[Array, "M N"]): ...


_FORMS: dict[Any, tuple[Any, bool, bool]] = {  # contracting_dims -> contracts_rows, rhs_transposed
    ((1,), (1,)): (_matrices, False, False),
    ((1,), (2,)): (_transposed, False, True),
    ((0,), (0,)): (_rows, True, False),
}


def grouped_gemm(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "..."],
    group_sizes: Int32[Array, " G"],
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: Float[Array, "G N"] | None = None,
    scaling_mode: ScalingMode | str = ScalingMode.NO_SCALING,
    lhs_scale_inv: Float32[Array, " G"] | None = None,
    rhs_scale_inv: Float32[Array, " G"] | None = None,
    use_split_accumulator: bool = True,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> Float[Array, "..."]:
    """Multiplies each group of consecutive rows with its own matrix.

    ================  =========  ================================================================
    contracting_dims  rhs        output
    ================  =========  ================================================================
    ((1,), (1,))      [G, K, N]  [M, N]: the rows of group g times matrix g
    ((1,), (2,))      [G, N, K]  the same
    ((0,), (0,))      [M, N]     [G, K, N]: the gradient of the matrices, lhs' rhs group by group
    ================  =========  ================================================================

    Groups may be empty. Rows after the last group become zero and do not contribute to sums. Group
    sizes are read at run time, not on the host. Call anywhere on arrays of one device, or inside
    `jax.shard_map` on this rank's arrays. Without scales, differentiable in lhs, rhs and bias, in
    reverse mode, any number of times.

    Args:
      lhs: rows, in the order of the groups.
      rhs: a matrix per group, or rows like lhs.
      group_sizes: rows of each group; their sum is at most M.
      contracting_dims: contracted dimensions of lhs and of rhs.
      bias: one row per group; not if rows are contracted.
      scaling_mode: NO_SCALING, or a mode of tensor scaling, with one scale per group, for 8-bit
        operands.
      lhs_scale_inv, rhs_scale_inv: inverse scales, one per group: output = (lhs scale) (rhs scale).
      use_split_accumulator, preferred_element_type: see `gemm`.
      implementation: "in_process", "xla" (`jax.lax.ragged_dot_general`), or None for the first that
        is available.
    Returns:
      The products, accumulated in float32 (float64 for float64), rounded once, bitwise repeatable.
    Raises:
      TypeError, ValueError: an argument is invalid.
      NotImplementedError: a derivative with scaled operands.
      jax.errors.JaxRuntimeError: a group size is negative, or their sum exceeds M. "xla" does not
        detect such sizes.
    References:
      NVIDIA Transformer Engine, `grouped_gemm`; its oracle is `jax.lax.ragged_dot`.
    """
    op = "grouped_gemm"
    scales = {"lhs_scale_inv": lhs_scale_inv, "rhs_scale_inv": rhs_scale_inv}
    more = {"group_sizes": group_sizes, "bias": bias, **scales}
    given = read_arrays(op, grouped_gemm, lhs=lhs, rhs=rhs, **more)
    lhs, rhs, group_sizes = given["lhs"], given["rhs"], given["group_sizes"]
    bias = given.get("bias")
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    check_operand_types(op, mode, lhs=lhs, rhs=rhs)
    check_flag(op, "use_split_accumulator", use_split_accumulator)
    check_implementation(op, implementation)
    form, contracts_rows, rhs_transposed = _read_form(op, contracting_dims)
    check_annotated(op, form, given, {"rhs": "Collapse others. See contracting_dims."})
    n, num_groups = rhs.shape[1 if contracts_rows or rhs_transposed else 2], len(group_sizes)
    call = GemmCall(
        op=op,
        comm=Communicator(implementation=implementation),
        out_shape=(num_groups, lhs.shape[1], n) if contracts_rows else (len(lhs), n),
        out_dtype=result_dtype(op, lhs, rhs, preferred_element_type),
        lhs_transposed=contracts_rows,
        rhs_transposed=rhs_transposed,
        scaling_mode=mode,
        fuse_bias=bias is not None,
    )
    if bias is not None:
        if contracts_rows:
            raise ValueError(
                f"{op}: got a bias where rows are contracted; it has no rows to be added to. Omit "
                "it."
            )
        if bias.shape != (num_groups, n):
            raise ValueError(
                f"{op}: bias has shape {bias.shape}; it needs {(num_groups, n)}, one row per group."
            )
        bias = jnp.asarray(bias, call.out_dtype)
    lhs_scale_inv, rhs_scale_inv = map(given.get, scales)
    required_scales(op, mode, lhs=lhs_scale_inv, rhs=rhs_scale_inv)
    if mode == ScalingMode.MXFP8_1D_SCALING:
        raise ValueError(
            f"{op}: got {mode}; groups have one scale each. Use CURRENT_TENSOR_SCALING or "
            "DELAYED_TENSOR_SCALING, or dequantize."
        )
    if mode != ScalingMode.NO_SCALING:
        return _bind(call, lhs, rhs, bias, group_sizes, (lhs_scale_inv, rhs_scale_inv))
    whole = whole_on_explicit_axes([x for x in (lhs, rhs, group_sizes, bias) if x is not None])
    lhs, rhs, group_sizes, *rest = vary_alike(whole)  # as their cotangents do
    with reverse_mode_only(op):
        return _differentiable(call, lhs, rhs, rest[0] if rest else None, group_sizes)


def _read_form(op: str, given: Any) -> tuple[Any, bool, bool]:
    try:
        dims = tuple(map(tuple, given))
        if dims in _FORMS:
            return _FORMS[dims]
    except TypeError:
        pass
    raise ValueError(
        f"{op}: contracting_dims is {given!r}; it needs to be one of "
        f"{', '.join(map(str, _FORMS))}. Transpose an operand."
    )


# ---- The derivative: grouped gemms again, of transposed operands.


@jax.named_scope("cpd.gemm")
def _bind(call: GemmCall, lhs, rhs, bias, group_sizes, scales=(None, None)):
    """Binds one call; `scales` are those of lhs and rhs."""
    nothing = jnp.zeros(1, jnp.float32)
    bias = nothing if bias is None else bias.astype(call.out_dtype)
    of_lhs, of_rhs = (nothing if x is None else jnp.asarray(x) for x in scales)
    if 0 in (*lhs.shape, *rhs.shape, *group_sizes.shape):  # jaxlib 0.11 crashes on no elements
        sums = jnp.zeros(call.out_shape, call.out_dtype)
        if call.fuse_bias and sums.size and group_sizes.size:  # rows have the bias of their group
            of_rows = jnp.repeat(bias, group_sizes, axis=0, total_repeat_length=len(sums))
            sums = jnp.where(jnp.arange(len(sums))[:, None] < group_sizes.sum(), of_rows, 0)
        return vary_alike(sums, like=lhs)
    operands = vary_alike([lhs, of_lhs, rhs, of_rhs, bias, group_sizes])
    return grouped_gemm_p.bind(*operands, call=call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: GemmCall, lhs, rhs, bias, group_sizes) -> Any:
    return _bind(call, lhs, rhs, bias, group_sizes)


def _forward(call, lhs, rhs, bias, group_sizes):
    return _differentiable(call, lhs, rhs, bias, group_sizes), (lhs, rhs, bias, group_sizes)


def _backward(call: GemmCall, residuals, dy):
    lhs, rhs, bias, sizes = residuals

    def product(a, b, like, shape, *, contracts_rows=False, rhs_transposed=False) -> Any:
        form = call.replace(
            lhs_transposed=contracts_rows,
            rhs_transposed=rhs_transposed,
            out_shape=shape,
            out_dtype=like.dtype.name,
            fuse_bias=False,
        )
        return _differentiable(form, a, b, None, sizes)

    if call.lhs_transposed:  # dy [G, K, N]
        dlhs = product(rhs, dy, lhs, lhs.shape, rhs_transposed=True)
        drhs = product(lhs, dy, rhs, rhs.shape)
        return dlhs, drhs, None, None
    dlhs = product(dy, rhs, lhs, lhs.shape, rhs_transposed=not call.rhs_transposed)
    of_rhs = (dy, lhs) if call.rhs_transposed else (lhs, dy)
    drhs = product(*of_rhs, rhs, rhs.shape, contracts_rows=True)
    dbias = None
    if bias is not None:
        ones = jnp.ones((lhs.shape[0], 1), dy.dtype)
        shape = len(bias), 1, bias.shape[1]
        dbias = product(ones, dy, bias, shape, contracts_rows=True)[:, 0]
    return dlhs, drhs, dbias, None


_differentiable.defvjp(_forward, _backward)
