"""The GEMMs of one rank, and their derivatives.

`gemm`: one, with the communication that its buffer adds. `grouped_gemm`: one for each group of
rows, as in mixture-of-experts layers.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import AxisName, Communicator
from jax_cp_dispatch._ranks.implementations import (
    NCCL_WINDOW,
    ON_CPU,
    ON_GPU,
    XLA,
    Operation,
    check_implementation,
    register_lowering,
)
from jax_cp_dispatch._ranks.lowering import Chosen, fall_back
from jax_cp_dispatch._ranks.options import (
    find_ranks,
    read_options,
    vary_alike,
    whole_on_explicit_axes,
)
from jax_cp_dispatch.buffers import CommOverlapConfig, CommOverlapType, check_flag, find_buffer
from jax_cp_dispatch.comm_gemm.arguments import (
    check_operand_types,
    read_arrays,
    required_scales,
    result_dtype,
    reverse_mode_only,
    with_overlap,
)
from jax_cp_dispatch.comm_gemm.derivatives import bias_gradient
from jax_cp_dispatch.comm_gemm.primitive import (
    GemmCall,
    GemmOperands,
    GemmResults,
    bind_gemm,
    collapse,
    gemm_by_xla,
    load_blas,
    make_primitive,
    threads_per_device,
)
from jax_cp_dispatch.scaling import ScalingMode, check_blocks, padded_shape, scales_shape


def gemm(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    bias: Float[Array, "*N"] | None = None,
    comm_overlap: int | None = None,
    paired_comm_overlap: int | None = None,
    axis_name: AxisName | None = None,
    aux_in: Float[Array, "rows width"] | None = None,
    return_aux: bool = False,
    scaling_mode: ScalingMode | str = ScalingMode.NO_SCALING,
    lhs_scale_inv: Array | None = None,
    rhs_scale_inv: Array | None = None,
    fuse_gelu: bool = False,
    fuse_bias: bool | None = None,
    grad: bool = False,
    gelu_input: Float[Array, "..."] | None = None,
    use_split_accumulator: bool = True,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Any:
    """Computes a matrix product while moving data through a communication buffer.

    Dimensions collapse to two: the contracted ones and the rest. Without a buffer, this multiplies
    arrays of one device, differentiable unless operands are scaled or `grad` is set.
    With a buffer, call it inside `jax.shard_map` over `axis_name`. Rows are those of the collapsed
    lhs; a rank's chunk is a contiguous block of them. For layers with batches and derivatives, use
    `all_gather_matmul` and `matmul_reduce_scatter`, which are built on this function.

    =============================  ==============================  ===============================
    buffer                         lhs -> output                   aux_in -> aux
    =============================  ==============================  ===============================
    RING_EXCHANGE, AG              [M/p, K] -> [M, N]              nothing -> gathered lhs [M, K]
    RING_EXCHANGE, AG, atomic      [M/p, K] -> [M, N] (1)          nothing -> own lhs
    PIPELINE or RING_EXCHANGE, RS  [M, K] -> [M/p, N]
    RING_EXCHANGE, RS, atomic      [M, K] (1) -> [M/p, N]
    BULK, AG                       any -> any                      [m/p, k] -> gathered [m, k]
    BULK, RS                       any -> any                      [m, k] -> summed, own [m/p, k]
    =============================  ==============================  ===============================

    (1) Chunks are in the order r-1, r-2, ..., r.

    Args:
      lhs, rhs: operands. Contracted dimensions are adjacent, first or last.
      contracting_dims: contracted dimensions of lhs and of rhs.
      bias: one element per column (collapsed free dimensions of rhs); added once.
      comm_overlap: id of `create_comm_overlap_buffer`.
      paired_comm_overlap: for the all-gather of an atomic ring, the id of the atomic ring's
        reduce-scatter that restores the order of chunks.
      axis_name: the mesh axis of the ranks, or several, major axis first.
      aux_in: the array that a BULK buffer moves.
      return_aux: whether an all-gather also returns the gathered array; for scaled operands the
        data without their scales.
      scaling_mode: the scaling of 8-bit operands. The operands' values are data times inverse
        scale. At most one of them may be float8_e5m2.
      lhs_scale_inv, rhs_scale_inv: f32 [1] for tensor scaling, u8 as `pad_scales` returns them for
        MXFP8, whose blocks lie along the contracted dimension: layout "row" for an operand that
        contracts its last dimensions, else "column". An all-gather moves the scales of lhs with its
        chunks, so each rank may have its own.
      fuse_gelu: apply GELU (tanh approximation) to product plus bias, and also return its input.
        Not for a reduce-scatter or BULK.
      fuse_bias: add the bias; None means if there is one. With `grad`, True requests the bias's
        gradient.
      grad: use the epilogues of the backward pass. With `fuse_gelu`, the output is the product
        times GELU's derivative at `gelu_input`. With `fuse_bias`, the gradient of the bias is also
        returned: the sum of the output's rows with `fuse_gelu`, else the sum of rhs over its
        contracted dimensions.
      gelu_input: pre_gelu of the forward pass, in the shape of the output.
      use_split_accumulator: sum 8-bit products in float32 instead of a faster accumulator with
        fewer bits. Always true on CPU.
      preferred_element_type: dtype of the output; by default that of the operands, or bfloat16 for
        8-bit operands.
      implementation, deadline: see `all_gather_matmul`.
    Returns:
      The output, accumulated in float32 and rounded once. If more was requested, a tuple of those
      present, in this order: output, gradient of the bias [N], pre_gelu in the shape of the output,
      aux.
    Raises:
      TypeError, ValueError: an argument is invalid, or arguments do not match.
      NotImplementedError: a derivative of a call that has none.
      jax.errors.JaxRuntimeError: see `all_gather_matmul`.
    References:
      NVIDIA Transformer Engine, `te_gemm` and userbuffers.
    """
    op = "gemm"
    scales = {"lhs_scale_inv": lhs_scale_inv, "rhs_scale_inv": rhs_scale_inv}
    more = {"bias": bias, "gelu_input": gelu_input, "aux_in": aux_in, **scales}
    given = read_arrays(op, gemm, lhs=lhs, rhs=rhs, **more)
    lhs, rhs, aux_in = given["lhs"], given["rhs"], given.get("aux_in")
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    check_operand_types(op, mode, lhs=lhs, rhs=rhs)
    flags = {"fuse_gelu": fuse_gelu, "grad": grad, "return_aux": return_aux}
    flags |= {"use_split_accumulator": use_split_accumulator}
    flags |= {} if fuse_bias is None else {"fuse_bias": fuse_bias}
    for name, flag in flags.items():
        check_flag(op, name, flag)
    options = read_options(op, axis_name, None, implementation, deadline, needs_ranks=False)
    of_lhs, of_rhs = _collapse(op, contracting_dims, lhs, rhs)
    left, sizes, free_lhs, lhs_transposed = of_lhs
    right, sizes_of_rhs, free_rhs, rhs_transposed = of_rhs
    if sizes != sizes_of_rhs:
        raise ValueError(
            f"{op}: lhs contracts dimensions of {sizes} but rhs of {sizes_of_rhs}, of shapes "
            f"{lhs.shape} and {rhs.shape}. See contracting_dims."
        )
    call = GemmCall(
        op=op,
        comm=Communicator(implementation=implementation, deadline=deadline),
        out_shape=(math.prod(free_lhs), math.prod(free_rhs)),
        out_dtype=result_dtype(op, lhs, rhs, preferred_element_type),
        lhs_transposed=lhs_transposed,
        rhs_transposed=rhs_transposed,
        scaling_mode=mode,
        fuse_bias=bias is not None if fuse_bias is None else fuse_bias,
        fuse_gelu=fuse_gelu,
        grad=grad,
        use_split_accumulator=use_split_accumulator,
    )
    operands = GemmOperands(
        lhs=lhs.reshape(left),
        lhs_scale_inv=given.get("lhs_scale_inv"),
        rhs=rhs.reshape(right),
        rhs_scale_inv=given.get("rhs_scale_inv"),
    )
    _check_scales(call, operands)
    config = CommOverlapConfig() if comm_overlap is None else find_buffer(op, comm_overlap)
    communicates = config.comm_type != CommOverlapType.NONE
    if not communicates:
        others = {
            "aux_in": aux_in is not None,
            "return_aux": return_aux,
            "paired_comm_overlap": paired_comm_overlap is not None,
            "axis_name": axis_name is not None and comm_overlap is None,
        }
        for name, is_given in others.items():
            if is_given:
                raise ValueError(
                    f"{op}: got {name} without a buffer that moves something. Create one with "
                    "create_comm_overlap_buffer and pass its id: comm_overlap=..."
                )
    else:
        moved = () if aux_in is None else aux_in.shape
        if 0 in (*left, *right, *moved):
            raise ValueError(
                f"{op}: got arrays of shapes {lhs.shape}, {rhs.shape}"
                f"{f', {moved}' if moved else ''} with a buffer; each needs at least one element. "
                "Omit the call."
            )
        if axis_name is None:
            raise ValueError(
                f"{op}: got comm_overlap without axis_name; it needs the ranks' mesh axis."
            )
        comm, context = find_ranks(options, jax.tree.leaves(operands))
        if context.is_global:
            raise ValueError(
                f"{op}: axis_name is {axis_name!r}, but this is not inside jax.shard_map over it. "
                "Call it there, or use all_gather_matmul or matmul_reduce_scatter on global arrays."
            )
        operands = operands._replace(aux_in=aux_in)
        call = dataclasses.replace(call, comm=comm, overlap=config, gathers_to_aux=return_aux)
        call = with_overlap(call, operands, paired_comm_overlap)
        return_aux |= config.is_bulk
    operands = operands._replace(**_read_epilogue(call, given))
    operands = vary_alike(whole_on_explicit_axes(operands))
    rows = call.out_shape[:1] if communicates and not config.is_bulk else free_lhs
    if 0 in (*left, *right):  # jaxlib 0.11 crashes on empty arrays
        results: Any = gemm_by_xla(call, operands, call.result_shapes(operands))
    elif not call.has_derivative:
        results = bind_gemm(call, operands)
    else:
        with reverse_mode_only(op):
            results = _multiply(call, operands)
    output, pre_gelu = (x if x is None else x.reshape(*rows, *free_rhs) for x in results[:3:2])
    more = (results.bias_grad, pre_gelu, results.aux_out if return_aux else None)
    more = [x for x in more if x is not None]
    return (output, *more) if more else output


def _collapse(op: str, dims: Any, lhs: Array, rhs: Array) -> list[tuple[Any, Any, Any, bool]]:
    """Collapses both operands to two dimensions.

    Returns for each the two sizes, the contracted and the other dimensions, and whether the
    contracted ones are on the unusual side: first in lhs, last in rhs.
    """
    try:
        of_lhs, of_rhs = ([operator.index(d) for d in side] for side in dims)
    except (TypeError, ValueError):
        of_lhs = of_rhs = []
    if not of_lhs or not of_rhs:
        raise ValueError(
            f"{op}: contracting_dims is {dims!r}; it needs the dimensions of lhs and those of rhs "
            "that are contracted, as ((-1,), (0,))."
        )
    collapsed = []
    for name, array, given in (("lhs", lhs, of_lhs), ("rhs", rhs, of_rhs)):
        ndim, count, is_lhs = array.ndim, len(given), name == "lhs"
        places = [d % ndim if -ndim <= d < ndim else None for d in given]
        is_first, is_last = places == [*range(count)], places == [*range(ndim - count, ndim)]
        if not (is_first or is_last):
            raise ValueError(
                f"{op}: contracting_dims of {name} are {tuple(given)} for shape {array.shape}; "
                "they need to be adjacent, first or last, in their order. Transpose it."
            )
        contracts_last = is_last if is_lhs else not is_first
        boundary = ndim - count if contracts_last else count
        sides = array.shape[:boundary], array.shape[boundary:]
        contracted, free = sides[::-1] if contracts_last else sides
        sizes = collapse(array.shape, boundary)
        collapsed.append((sizes, contracted, free, contracts_last != is_lhs))
    return collapsed


def _read_epilogue(call: GemmCall, given: dict[str, Array]) -> dict[str, Array]:
    """Returns the bias and the input of GELU that the call needs, in its shapes and type."""
    if call.grad and not (call.fuse_bias or call.fuse_gelu):
        raise ValueError(
            f"{call.op}: got grad without an epilogue; it needs fuse_gelu, fuse_bias or both. Omit "
            "it for a plain product."
        )
    size = math.prod(call.out_shape)
    epilogues = {
        "bias": (
            call.fuse_bias and not call.grad,
            f"fuse_bias={call.fuse_bias}, grad={call.grad}; fuse_bias adds a bias without grad, "
            "and returns its gradient with grad",
            "Pass one",
            call.out_shape[1:],
            f"{call.out_shape[1]} elements, one per column",
        ),
        "gelu_input": (
            call.fuse_gelu and call.grad,
            f"fuse_gelu={call.fuse_gelu}, grad={call.grad}; it is required with both, for the "
            "derivative of GELU, and only then",
            "Pass pre_gelu of the forward pass",
            call.out_shape,
            f"that of the output, {size} elements. Pass pre_gelu of the forward pass",
        ),
    }
    read = {}
    for name, (is_needed, why, remedy, shape, needs) in epilogues.items():
        x = given.get(name)
        if (x is not None) != is_needed:
            got, remedy = ("no", remedy) if x is None else ("a", "Omit it")
            raise ValueError(f"{call.op}: got {got} {name} with {why}. {remedy}.")
        if x is None:
            continue
        if x.size != math.prod(shape):
            raise ValueError(f"{call.op}: {name} has shape {x.shape}; it needs {needs}.")
        read[name] = jnp.asarray(x, call.out_dtype).reshape(shape)
    return read


def _check_scales(call: GemmCall, operands: GemmOperands) -> None:
    """Requires the scales of the mode, in the shapes that match lhs and rhs."""
    op, mode = call.op, call.scaling_mode
    sides = {"lhs": operands.lhs_scale_inv, "rhs": operands.rhs_scale_inv}
    given = required_scales(op, mode, **sides)
    for (name, scale), layout in zip(given.items(), call.scale_layouts, strict=False):
        data = getattr(operands, name)
        shape, dtype, remedy = (1,), jnp.dtype(jnp.float32), "Pass quantize's scale_inv."
        if call.is_mxfp8:
            check_blocks(op, name, data.shape, layout)
            shape, dtype = padded_shape(data.shape, layout), jnp.dtype(jnp.uint8)
            is_unpadded = scale.shape == scales_shape(data.shape, layout)
            what = "These are unpadded: call" if is_unpadded else "Pass"
            remedy = f"{what} pad_scales(q.scale_inv, layout={layout!r})."
        if (scale.shape, scale.dtype) != (shape, dtype):
            raise ValueError(
                f"{op}: {name}_scale_inv is {scale.dtype}{list(scale.shape)}; {mode} with {name} "
                f"of shape {data.shape} needs {dtype}{list(shape)}. {remedy}"
            )


# ---- The derivative of a gemm that does not communicate: gemms again, of transposed operands.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(call: GemmCall, operands: GemmOperands) -> Any:
    return bind_gemm(call, operands)


def _forward(call, operands):
    results: Any = _multiply(call, operands)
    return results, (operands, results.pre_gelu_out)


def _backward(call: GemmCall, residuals, cotangents: GemmResults):
    operands, pre_gelu = residuals
    lhs, rhs, dy = operands.lhs, operands.rhs, cotangents.output
    if pre_gelu is not None:
        wide = sum_dtype(pre_gelu.dtype)
        _, pull = jax.vjp(jax.nn.gelu, pre_gelu.astype(wide))
        of_gelu = cotangents.pre_gelu_out.astype(wide)
        dy = (pull(dy.astype(wide))[0] + of_gelu).astype(pre_gelu.dtype)

    def product(like, left, right, lhs_transposed, rhs_transposed):
        form = dataclasses.replace(
            call,
            fuse_bias=False,
            fuse_gelu=False,
            lhs_transposed=lhs_transposed,
            rhs_transposed=rhs_transposed,
            out_shape=like.shape,
            out_dtype=like.dtype.name,
        )
        results: Any = _multiply(form, GemmOperands(lhs=left, rhs=right))
        return results.output

    dlhs = (  # dy rhs', or its transpose
        product(lhs, rhs, dy, call.rhs_transposed, True)
        if call.lhs_transposed
        else product(lhs, dy, rhs, False, not call.rhs_transposed)
    )
    drhs = (  # lhs' dy, or its transpose
        product(rhs, dy, lhs, True, call.lhs_transposed)
        if call.rhs_transposed
        else product(rhs, lhs, dy, not call.lhs_transposed, False)
    )
    return (GemmOperands(lhs=dlhs, rhs=drhs, bias=bias_gradient(dy, operands.bias)),)


_multiply.defvjp(_forward, _backward)


# ---- A gemm for each group of rows.


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
    form, contracts_rows, rhs_transposed = _read_groups(op, contracting_dims)
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
    of_both = tuple(map(given.get, scales))
    required_scales(op, mode, lhs=of_both[0], rhs=of_both[1])
    if mode == ScalingMode.MXFP8_1D_SCALING:
        raise ValueError(
            f"{op}: got {mode}; groups have one scale each. Use CURRENT_TENSOR_SCALING or "
            "DELAYED_TENSOR_SCALING, or dequantize."
        )
    operands = vary_alike(whole_on_explicit_axes((lhs, rhs, bias, group_sizes, of_both)))
    if not call.has_derivative:
        return _bind_groups(call, *operands)
    with reverse_mode_only(op):
        return _multiply_groups(call, *operands)  # they vary as their cotangents do


def _read_groups(op: str, given: Any) -> tuple[Any, bool, bool]:
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


# ---- Its primitive, and its derivative: grouped gemms again, of transposed operands.

grouped_gemm_p = make_primitive(
    "grouped_gemm",
    Operation.GROUPED_GEMM,
    lambda call: (
        f"no derivative is defined with {call.scaling_mode}. Quantize inside a function whose "
        "derivative you define, or differentiate it with NO_SCALING (reverse mode)."
    ),
)


# The call says by `lhs_transposed` that rows are contracted: lhs [M, K] and rhs [M, N] give
# [G, K, N]. Otherwise lhs [M, K] and a matrix per group, [G, K, N] or, as `rhs_transposed` says,
# [G, N, K], give [M, N]. Operands that are not used have one element.


def _lower_groups_on_cpu(ctx, *operands, call: GemmCall, **_):
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


def _lower_groups_on_gpu(ctx, *operands, call: GemmCall, choice: Chosen, **params):
    missing = "grouped products on GPUs are XLA's ragged_dot, without a host's synchronisation"
    by_xla = fall_back(choice, call.op, call.comm, missing)
    return _lower_groups_by_xla(ctx, *operands, call=call, **params, choice=by_xla)


def _lower_groups_by_xla(ctx, *operands, call: GemmCall, **_):
    by_xla = functools.partial(grouped_gemm_by_xla, call=call)
    return mlir.lower_fun(by_xla, multiple_results=False)(ctx, *operands)


register_lowering(Operation.GROUPED_GEMM, _lower_groups_on_cpu, on=ON_CPU)
register_lowering(Operation.GROUPED_GEMM, _lower_groups_on_gpu, on=[*ON_GPU, NCCL_WINDOW])
register_lowering(Operation.GROUPED_GEMM, _lower_groups_by_xla, on=[XLA])


def grouped_gemm_by_xla(
    lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, group_sizes, *, call: GemmCall
):
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


@jax.named_scope("cpd.gemm")
def _bind_groups(call: GemmCall, lhs, rhs, bias, group_sizes, scales) -> Any:
    """Binds one call; `scales` are those of lhs and rhs, or None."""
    nothing = jnp.zeros(1, jnp.float32)
    bias = nothing if bias is None else bias.astype(call.out_dtype)
    of_lhs, of_rhs = (nothing if x is None else x for x in scales)
    if 0 in (*lhs.shape, *rhs.shape, *group_sizes.shape):  # jaxlib 0.11 crashes on no elements
        sums = jnp.zeros(call.out_shape, call.out_dtype)
        if call.fuse_bias and sums.size and group_sizes.size:  # rows have the bias of their group
            of_rows = jnp.repeat(bias, group_sizes, axis=0, total_repeat_length=len(sums))
            sums = jnp.where(jnp.arange(len(sums))[:, None] < group_sizes.sum(), of_rows, 0)
        return vary_alike(sums, like=lhs)
    operands = vary_alike([lhs, of_lhs, rhs, of_rhs, bias, group_sizes])
    result = jax.ShapeDtypeStruct(call.out_shape, call.out_dtype)
    return grouped_gemm_p.bind(*operands, call=call, results=result)[0]


_multiply_groups = jax.custom_vjp(_bind_groups, nondiff_argnums=(0,))


def _groups_backward(call: GemmCall, residuals, dy):
    lhs, rhs, bias, sizes, scales = residuals

    def product(a, b, like, shape, *, contracts_rows=False, rhs_transposed=False) -> Any:
        form = dataclasses.replace(
            call,
            lhs_transposed=contracts_rows,
            rhs_transposed=rhs_transposed,
            out_shape=shape,
            out_dtype=like.dtype.name,
            fuse_bias=False,
        )
        return _multiply_groups(form, a, b, None, sizes, scales)

    if call.lhs_transposed:  # dy [G, K, N]
        dlhs = product(rhs, dy, lhs, lhs.shape, rhs_transposed=True)
        drhs = product(lhs, dy, rhs, rhs.shape)
        return dlhs, drhs, None, None, None
    dlhs = product(dy, rhs, lhs, lhs.shape, rhs_transposed=not call.rhs_transposed)
    of_rhs = (dy, lhs) if call.rhs_transposed else (lhs, dy)
    drhs = product(*of_rhs, rhs, rhs.shape, contracts_rows=True)
    dbias = None
    if bias is not None:
        ones = jnp.ones((lhs.shape[0], 1), dy.dtype)
        shape = len(bias), 1, bias.shape[1]
        dbias = product(ones, dy, bias, shape, contracts_rows=True)[:, 0]
    return dlhs, drhs, dbias, None, None


_multiply_groups.defvjp(lambda *x: (_multiply_groups(*x), x[1:]), _groups_backward)
