"""`gemm`: one GEMM on one rank, with the communication that its buffer adds, or its derivative."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.communicator import AxisName, Communicator
from jax_cp_dispatch._ranks.options import (
    find_ranks,
    read_options,
    vary_alike,
    whole_on_explicit_axes,
)
from jax_cp_dispatch.buffers import (
    CommOverlapConfig,
    CommOverlapMethod,
    CommOverlapType,
    check_buffer,
    check_flag,
    find_buffer,
)
from jax_cp_dispatch.comm_gemm.checks import (
    check_operand_types,
    read_arrays,
    required_scales,
    result_dtype,
    reverse_mode_only,
)
from jax_cp_dispatch.comm_gemm.derivatives import bias_gradient
from jax_cp_dispatch.comm_gemm.primitive import (
    GemmCall,
    GemmOperands,
    GemmResults,
    bind_gemm,
    collapse,
    gemm_by_xla,
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
    dims = _read_dims(op, contracting_dims)
    left, sizes, free_lhs, lhs_transposed = _collapse(op, "lhs", lhs, dims[0])
    right, of_rhs, free_rhs, rhs_transposed = _collapse(op, "rhs", rhs, dims[1])
    if sizes != of_rhs:
        raise ValueError(
            f"{op}: lhs contracts dimensions of {sizes} but rhs of {of_rhs}, of shapes "
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
        bias=_read_bias(call, given.get("bias")),
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
        call = call.replace(comm=comm, overlap=config, gathers_to_aux=return_aux)
        call = _with_overlap(call, operands, paired_comm_overlap)
        return_aux |= config.is_bulk
    operands = operands._replace(gelu_input=_read_gelu_input(call, given.get("gelu_input")))
    operands = vary_alike(whole_on_explicit_axes(operands))
    if communicates:
        results = bind_gemm(call, operands)
        rows = free_lhs if config.is_bulk else call.out_shape[:1]
    else:
        with reverse_mode_only(op):
            results = _alone(call, operands)
        rows = free_lhs
    output, pre_gelu = (x if x is None else x.reshape(*rows, *free_rhs) for x in results[:3:2])
    more = (results.bias_grad, pre_gelu, results.aux_out if return_aux else None)
    more = [x for x in more if x is not None]
    return (output, *more) if more else output


def _read_dims(op: str, dims: Any) -> list[list[int]]:
    """Returns two sequences of integers."""
    try:
        lhs, rhs = ([operator.index(d) for d in side] for side in dims)
    except (TypeError, ValueError):
        lhs = rhs = []
    if not lhs or not rhs:
        raise ValueError(
            f"{op}: contracting_dims is {dims!r}; it needs the dimensions of lhs and those of rhs "
            "that are contracted, as ((-1,), (0,))."
        )
    return [lhs, rhs]


def _collapse(op: str, name: str, array: Array, dims: list[int]):
    """Collapses lhs or rhs to two dimensions.

    Returns the two sizes, the contracted and the other dimensions of the array, and whether the
    contracted ones are on the unusual side: first in lhs, last in rhs.
    """
    ndim, is_lhs = array.ndim, name == "lhs"
    places = [d % ndim if -ndim <= d < ndim else ndim for d in dims] if ndim else []
    count = len(places)
    is_first, is_last = places == list(range(count)), places == list(range(ndim - count, ndim))
    if not count or len(set(places)) < count or not (is_first or is_last):
        raise ValueError(
            f"{op}: contracting_dims of {name} are {tuple(dims)} for shape {array.shape}; they "
            "need to be adjacent, first or last, in their order. Transpose it."
        )
    contracts_last = is_last if is_lhs else not is_first
    boundary = ndim - count if contracts_last else count
    sides = array.shape[:boundary], array.shape[boundary:]
    contracted, free = sides[::-1] if contracts_last else sides
    return collapse(array.shape, boundary), contracted, free, contracts_last != is_lhs


def _read_bias(call: GemmCall, bias) -> Array | None:
    n = call.out_shape[1]
    if call.grad and not (call.fuse_bias or call.fuse_gelu):
        raise ValueError(
            f"{call.op}: got grad without an epilogue; it needs fuse_gelu, fuse_bias or both. Omit "
            "it for a plain product."
        )
    if (bias is not None) != (call.fuse_bias and not call.grad):
        raise ValueError(
            f"{call.op}: got {'a' if bias is not None else 'no'} bias with fuse_bias="
            f"{call.fuse_bias}, grad={call.grad}; fuse_bias adds a bias without grad, and returns "
            f"its gradient with grad. {'Omit it' if bias is not None else 'Pass one'}."
        )
    if bias is None:
        return None
    if bias.size != n:
        raise ValueError(
            f"{call.op}: bias has shape {bias.shape}; it needs {n} elements, one per column."
        )
    return jnp.asarray(bias, call.out_dtype).reshape(n)


def _read_gelu_input(call: GemmCall, gelu_input) -> Array | None:
    if (gelu_input is not None) != (call.fuse_gelu and call.grad):
        raise ValueError(
            f"{call.op}: got {'a' if gelu_input is not None else 'no'} gelu_input with "
            f"fuse_gelu={call.fuse_gelu}, grad={call.grad}; it is required with "
            "both, for the derivative of GELU, and only then. "
            f"{'Omit it' if gelu_input is not None else 'Pass pre_gelu of the forward pass'}."
        )
    if gelu_input is None:
        return None
    if gelu_input.size != math.prod(call.out_shape):
        raise ValueError(
            f"{call.op}: gelu_input has shape {gelu_input.shape}; it needs that of the output, "
            f"{math.prod(call.out_shape)} elements. Pass pre_gelu of the forward pass."
        )
    return jnp.asarray(gelu_input, call.out_dtype).reshape(call.out_shape)


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


# ---- The communication of a gemm with a buffer.


def _with_overlap(call: GemmCall, operands: GemmOperands, paired: int | None) -> GemmCall:
    """Returns the call with the rows that its buffer moves, checked against lhs or aux_in."""
    op, config, lhs, aux_in = call.op, call.overlap, operands.lhs, operands.aux_in
    kind, method, is_bulk = config.comm_type, config.method, config.is_bulk
    if is_bulk != (aux_in is not None):
        raise ValueError(
            f"{op}: got {'no' if is_bulk else 'an'} aux_in with buffer {config.id} of {method}; "
            "an array that moves during an independent GEMM needs CommOverlapMethod.BULK, and "
            f"vice versa. {'Pass one.' if is_bulk else 'Omit it, or create that buffer.'}"
        )
    if call.fuse_gelu and (is_bulk or not config.gathers):
        raise ValueError(
            f"{op}: got fuse_gelu with {kind}, {method}; GELU needs a complete sum, and cannot "
            "run during a bulk transfer. Apply jax.nn.gelu afterwards."
        )
    if call.gathers_to_aux and not config.gathers:
        raise ValueError(f"{op}: got return_aux with {kind}; only an all-gather has one.")
    if call.lhs_transposed and not is_bulk:
        raise ValueError(
            f"{op}: lhs contracts its first dimensions; its chunks are rows, so with {kind} the "
            "last ones need to be contracted. Transpose it."
        )
    p = call.comm.num_ranks
    moved, name = (aux_in, "aux_in") if is_bulk else (lhs, "lhs")
    rows = moved.shape[0]
    if not config.gathers and rows % p:
        raise ValueError(
            f"{op}: {rows} rows of {name} are not a multiple of the {p} ranks. Pad them, or use "
            "matmul_reduce_scatter with row_counts."
        )
    total = rows * p if config.gathers else rows
    columns = call.out_shape[1] if config.is_sum else moved.shape[1]
    dtype = sum_dtype(call.out_dtype) if config.is_sum else moved.dtype
    check_buffer(op, config, (total, columns), dtype.name, p)
    in_ring_order = config.atomic_gemm and config.is_ring
    if in_ring_order and config.gathers:
        _check_pair(op, config, paired, p)
    out_rows = call.out_shape[0]
    if not is_bulk:
        out_rows = total if config.gathers else rows // p
    return call.replace(
        out_shape=(out_rows, call.out_shape[1]),
        row_counts=(total // p,) * p,
        in_ring_order=in_ring_order,
        gathers_to_aux=call.gathers_to_aux and not is_bulk and not in_ring_order,
    )


def _check_pair(op: str, config: CommOverlapConfig, paired: int | None, num_ranks: int) -> None:
    ring = (CommOverlapType.RS, CommOverlapMethod.RING_EXCHANGE, True, num_ranks)
    other = None if paired is None else find_buffer(op, paired)
    found = other and (other.comm_type, other.method, other.atomic_gemm, other.tp_size)
    if found != ring:
        raise ValueError(
            f"{op}: the atomic ring of buffer {config.id} leaves chunks in the order r-1, r-2, "
            f"..., r, and is paired with {other.text if other else 'nothing'}; only an atomic "
            f"RING_EXCHANGE of CommOverlapType.RS with tp_size={num_ranks} consumes chunks in that "
            "order. Pass its id: paired_comm_overlap=..."
        )


# ---- A gemm that does not communicate, and its derivative: gemms again, of transposed operands.


def _alone(call: GemmCall, operands: GemmOperands) -> GemmResults:
    """Computes a call without communication; differentiable without scales and `grad`."""
    if 0 in (*operands.lhs.shape, *operands.rhs.shape):  # jaxlib 0.11 crashes on empty arrays
        return gemm_by_xla(call, operands, call.result_shapes(operands))
    if call.scaling_mode != ScalingMode.NO_SCALING or call.grad:
        return bind_gemm(call, operands)
    results: Any = _differentiable(call, operands.lhs, operands.rhs, operands.bias)
    return GemmResults(results[0], pre_gelu_out=results[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: GemmCall, lhs, rhs, bias) -> Any:
    results = bind_gemm(call, GemmOperands(lhs=lhs, rhs=rhs, bias=bias))
    return results.output, results.pre_gelu_out


def _forward(call, lhs, rhs, bias):
    results: Any = _differentiable(call, lhs, rhs, bias)
    return results, (lhs, rhs, bias, results[1])


def _backward(call: GemmCall, residuals, cotangents):
    lhs, rhs, bias, pre_gelu = residuals
    dy, dpre_gelu = cotangents
    if pre_gelu is not None:
        wide = sum_dtype(pre_gelu.dtype)
        _, pull = jax.vjp(jax.nn.gelu, pre_gelu.astype(wide))
        dy = (pull(dy.astype(wide))[0] + dpre_gelu.astype(wide)).astype(pre_gelu.dtype)

    def product(like, left, right, lhs_transposed, rhs_transposed):
        form = call.replace(
            fuse_bias=False,
            fuse_gelu=False,
            lhs_transposed=lhs_transposed,
            rhs_transposed=rhs_transposed,
            out_shape=like.shape,
            out_dtype=like.dtype.name,
        )
        results: Any = _differentiable(form, left, right, None)
        return results[0]

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
    return dlhs, drhs, bias_gradient(dy, bias)


_differentiable.defvjp(_forward, _backward)
