"""`gemm`: one GEMM on one rank, with the communication that its buffer adds."""

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import read_options, read_options_alone, whole_on_explicit_axes
from jax_cp_dispatch.comm_gemm.buffers import find_buffer
from jax_cp_dispatch.comm_gemm.call import (
    GemmCall,
    GemmResults,
    collapse,
    find_gemm_ranks,
    with_overlap,
)
from jax_cp_dispatch.comm_gemm.derivatives import gemm_on_one_device
from jax_cp_dispatch.comm_gemm.lowering import bind_gemm
from jax_cp_dispatch.comm_gemm.scaled_operands import check_scales
from jax_cp_dispatch.comm_gemm.types import (
    CommOverlapType,
    ScalingMode,
    check_operand_types,
    read_array,
    read_flag,
    result_dtype,
    reverse_mode_only,
)


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
    lhs, rhs = read_array(op, "lhs", lhs), read_array(op, "rhs", rhs)
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    check_operand_types(op, lhs, rhs, mode)
    flags = {"fuse_gelu": fuse_gelu, "grad": grad, "return_aux": return_aux}
    flags |= {"use_split_accumulator": use_split_accumulator}
    flags |= {} if fuse_bias is None else {"fuse_bias": fuse_bias}
    for name, flag in flags.items():
        read_flag(op, name, flag)
    if axis_name is None:
        options = read_options_alone(op, implementation=implementation, deadline=deadline)
    else:
        options = read_options(op, axis_name, implementation=implementation, deadline=deadline)
    _check_dims(op, contracting_dims)
    left, lhs_transposed = _collapse(op, "lhs", lhs, contracting_dims[0], contracted_last=True)
    right, rhs_last = _collapse(op, "rhs", rhs, contracting_dims[1], contracted_last=False)
    n = right.rows if rhs_last else right.columns
    sizes = lambda x, dims: tuple(x.shape[d] for d in dims)
    contracted = sizes(lhs, contracting_dims[0]), sizes(rhs, contracting_dims[1])
    if contracted[0] != contracted[1]:
        raise ValueError(
            f"{op}: lhs contracts dimensions of {contracted[0]} but rhs of {contracted[1]}, of "
            f"shapes {lhs.shape} and {rhs.shape}. See contracting_dims."
        )
    out_dtype = result_dtype(op, lhs, rhs, preferred_element_type)
    free_lhs = _free(lhs, contracting_dims[0])
    free_rhs = _free(rhs, contracting_dims[1])
    call = GemmCall(
        op=op,
        comm=options.communicator(),
        lhs_boundary=1,
        rhs_boundary=1,
        out_shape=(left.columns if lhs_transposed else left.rows, n),
        out_dtype=out_dtype,
        lhs_transposed=lhs_transposed,
        rhs_transposed=rhs_last,
        scaling_mode=mode,
        fuse_bias=bias is not None if fuse_bias is None else fuse_bias,
        fuse_gelu=fuse_gelu,
        grad=grad,
        use_split_accumulator=use_split_accumulator,
    )
    operands: dict[str, Any] = {
        "lhs": lhs.reshape(left),
        "lhs_scale_inv": None if lhs_scale_inv is None else jnp.asarray(lhs_scale_inv),
        "rhs": rhs.reshape(right),
        "rhs_scale_inv": None if rhs_scale_inv is None else jnp.asarray(rhs_scale_inv),
        "bias": _read_bias(op, call, bias, n),
    }
    check_scales(op, mode, call.scale_layouts, operands)
    found = None if comm_overlap is None else find_buffer(op, comm_overlap)
    if found is None or found.config.comm_type == CommOverlapType.NONE:
        _refuse_communication(
            op,
            aux_in=aux_in is not None,
            return_aux=return_aux,
            paired_comm_overlap=paired_comm_overlap is not None,
            axis_name=axis_name is not None and comm_overlap is None,
        )
        operands["gelu_input"] = _read_gelu_input(op, call, gelu_input)
        with reverse_mode_only(op):
            results = gemm_on_one_device(call, **operands)
        return _asked_for(results, (*free_lhs, *free_rhs), return_aux=False)
    moved = () if aux_in is None else jnp.shape(aux_in)
    if 0 in (*left, *right, *moved):
        raise ValueError(
            f"{op}: got arrays of shapes {lhs.shape}, {rhs.shape}{f', {moved}' if moved else ''} "
            "with a buffer; each needs at least one element. Omit the call."
        )
    if axis_name is None:
        raise ValueError(
            f"{op}: got comm_overlap without axis_name; it needs the ranks' mesh axis."
        )
    comm = find_gemm_ranks(options, [x for x in operands.values() if x is not None])
    call = call.replace(comm=comm)
    call = with_overlap(
        call,
        operands["lhs"],
        aux_in,
        found=found,
        paired=paired_comm_overlap,
        return_aux=return_aux,
    )
    operands["gelu_input"] = _read_gelu_input(op, call, gelu_input)
    given = {name: x for name, x in {**operands, "aux_in": aux_in}.items() if x is not None}
    whole = whole_on_explicit_axes(given.values())
    results = bind_gemm(call, **dict(zip(given, whole, strict=True)))
    rows = free_lhs if call.is_bulk else (call.out_shape[0],)
    return _asked_for(results, (*rows, *free_rhs), return_aux=call.is_bulk or return_aux)


def _asked_for(results: GemmResults, shape: tuple[int, ...], *, return_aux: bool) -> Any:
    pre_gelu = results.pre_gelu_out
    aux = results.aux_out if return_aux else None
    more = [results.bias_grad, None if pre_gelu is None else pre_gelu.reshape(shape), aux]
    more = [x for x in more if x is not None]
    output = results.output.reshape(shape)
    return (output, *more) if more else output


def _read_bias(op: str, call: GemmCall, bias, n: int) -> Array | None:
    if call.grad and not (call.fuse_bias or call.fuse_gelu):
        raise ValueError(
            f"{op}: got grad without an epilogue; it needs fuse_gelu, fuse_bias or both. Omit "
            "it for a plain product."
        )
    if (bias is not None) != (call.fuse_bias and not call.grad):
        raise ValueError(
            f"{op}: got {'a' if bias is not None else 'no'} bias with fuse_bias={call.fuse_bias}, "
            f"grad={call.grad}; fuse_bias adds a bias without grad, and returns its gradient with "
            f"grad. {'Omit it' if bias is not None else 'Pass one'}."
        )
    if bias is None:
        return None
    if jnp.size(bias) != n:
        raise ValueError(
            f"{op}: bias has shape {jnp.shape(bias)}; it needs {n} elements, one per column."
        )
    if not jnp.issubdtype(jnp.result_type(bias), jnp.floating):
        raise TypeError(f"{op}: bias is {jnp.result_type(bias)}; it needs floats. Cast it.")
    return jnp.asarray(bias, call.out_dtype).reshape(n)


def _read_gelu_input(op: str, call: GemmCall, gelu_input) -> Array | None:
    if (gelu_input is not None) != (call.fuse_gelu and call.grad):
        raise ValueError(
            f"{op}: got {'a' if gelu_input is not None else 'no'} gelu_input with "
            f"fuse_gelu={call.fuse_gelu}, grad={call.grad}; it is required with "
            "both, for the derivative of GELU, and only then. "
            f"{'Omit it' if gelu_input is not None else 'Pass pre_gelu of the forward pass'}."
        )
    if gelu_input is None:
        return None
    size = call.out_shape[0] * call.out_shape[1]
    if jnp.size(gelu_input) != size:
        raise ValueError(
            f"{op}: gelu_input has shape {jnp.shape(gelu_input)}; it needs that of the output, "
            f"{size} elements. Pass pre_gelu of the forward pass."
        )
    return jnp.asarray(gelu_input, call.out_dtype).reshape(call.out_shape)


def _check_dims(op: str, dims: Any) -> None:
    """Requires two sequences of integers."""
    try:
        lhs, rhs = ([operator.index(d) for d in side] for side in dims)
    except (TypeError, ValueError):
        lhs = rhs = ()
    if not lhs or not rhs:
        raise ValueError(
            f"{op}: contracting_dims is {dims!r}; it needs the dimensions of lhs and those of rhs "
            "that are contracted, as ((-1,), (0,))."
        )


def _collapse(op, name, array, dims, *, contracted_last: bool):
    """Returns two sizes, and whether the contracted dimensions are on the unusual side."""
    ndim = array.ndim
    places = [d % ndim if -ndim <= d < ndim else ndim for d in dims] if ndim else []
    count = len(places)
    is_first, is_last = places == list(range(count)), places == list(range(ndim - count, ndim))
    if not count or len(set(places)) < count or not (is_first or is_last):
        raise ValueError(
            f"{op}: contracting_dims of {name} are {tuple(dims)} for shape {array.shape}; they "
            "need to be adjacent, first or last, in their order. Transpose it."
        )
    usual = is_last if contracted_last else is_first
    boundary = ndim - count if (usual == contracted_last) else count
    return collapse(array.shape, boundary), not usual


def _free(array, dims) -> tuple[int, ...]:
    contracted = {d % array.ndim for d in dims}
    return tuple(size for d, size in enumerate(array.shape) if d not in contracted)


def _refuse_communication(op: str, **given: bool) -> None:
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise ValueError(
            f"{op}: got {names[0]} without a buffer that moves something. Create one with "
            "create_comm_overlap_buffer and pass its id: comm_overlap=..."
        )
