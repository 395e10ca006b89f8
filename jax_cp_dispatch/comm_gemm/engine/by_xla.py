"""Gemms by XLA's own collectives, for other platforms and as an oracle on the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.lowering import Chosen
from jax_cp_dispatch.comm_gemm.engine.gemm_call import GemmCall, GemmOperands, GemmResults, collapse
from jax_cp_dispatch.comm_gemm.scaled.mxfp8 import (
    multiply_by_scales,
    pad_scales,
    scales_shape,
    swizzle_scales,
    unpad_scales,
)
from jax_cp_dispatch.comm_gemm.types import CommOverlapType, ScalingMode


def lower(ctx: Any, *values: Any, call: GemmCall, names: tuple[str, ...], choice: Chosen) -> Any:
    """Lowers a call; `names` are those of the operands in `values`."""

    def compute(*values):
        results = gemm_by_xla(call, GemmOperands.of(dict(zip(names, values, strict=True))))
        return [x for x in results if x is not None]

    return mlir.lower_fun(compute, multiple_results=True)(ctx, *values)


def gemm_by_xla(call: GemmCall, operands: GemmOperands) -> GemmResults:
    """Computes a call without overlap, whatever the method; sums in the order of the ranks."""
    lhs, rhs = dequantized_operands(call, operands)
    aux = None
    if call.is_bulk:
        x = operands.aux_in
        aux = _gather_rows(call, x) if call.gathers else _scatter(call, x, x.dtype)
    elif call.gathers:
        aux = _gather_rows(call, operands.lhs) if call.gathers_to_aux else None
        lhs = _gather_rows(call, lhs)
        if call.in_ring_order:
            lhs = lhs[..., _ring_rows(call), :]
            aux = operands.lhs
    elif call.overlap.comm_type == CommOverlapType.RS and call.in_ring_order:
        lhs = lhs[..., jnp.argsort(_ring_rows(call)), :]
    wide = sum_dtype(lhs.dtype)
    product = _multiply(call, lhs, rhs, wide)
    is_sum = call.overlap.comm_type == CommOverlapType.RS and not call.is_bulk
    if is_sum:
        partial = call.overlap.partial_dtype if call.moves_chunks else wide
        product = _scatter(call, product.astype(partial), wide)
    if operands.bias is not None:
        product = product + jnp.expand_dims(operands.bias.astype(wide), range(product.ndim - 1))
    product = product.reshape(call.out_shape)
    pre_gelu = bias_grad = None
    if call.fuse_gelu and call.grad:
        _, pull = jax.vjp(jax.nn.gelu, operands.gelu_input.astype(wide))
        (product,) = pull(product)
    elif call.fuse_gelu:
        pre_gelu, product = product.astype(call.out_dtype), jax.nn.gelu(product)
    output = product.astype(call.out_dtype)
    if call.grad and call.fuse_bias:
        summed, axis = rhs, tuple(range(call.rhs_boundary))
        if call.rhs_transposed:
            axis = tuple(range(call.rhs_boundary, rhs.ndim))
        if call.fuse_gelu:
            summed, axis = output, tuple(range(output.ndim - 1))
        bias_grad = summed.astype(wide).sum(axis).reshape(-1).astype(call.out_dtype)
    if is_sum:
        output = _without_room(call, output)
    shapes = call.result_shapes(operands)
    unused = lambda shape: None if shape is None else jnp.zeros(*shape)
    swizzled = _swizzled(call, operands, shapes) if call.is_mxfp8 else (None, None)
    return GemmResults(output, bias_grad, pre_gelu, aux, *swizzled, unused(shapes.workspace))


def dequantized_operands(call: GemmCall, operands: GemmOperands):
    """Returns lhs and rhs, dequantized if they are scaled."""
    if call.scaling_mode == ScalingMode.NO_SCALING:
        return operands.lhs, operands.rhs
    sides = zip(
        (operands.lhs, operands.rhs),
        (operands.lhs_scale_inv, operands.rhs_scale_inv),
        (call.lhs_boundary, call.rhs_boundary),
        call.scale_layouts,
        strict=True,
    )
    values = []
    for data, scale, boundary, layout in sides:
        if call.is_mxfp8:
            flat = data.reshape(collapse(data.shape, boundary))
            scale = unpad_scales(scale, shape=scales_shape(flat.shape, layout))
            values.append(multiply_by_scales(flat, scale, layout=layout).reshape(data.shape))
        else:
            values.append(data.astype(jnp.float32) * scale[0])
    return values


def _swizzled(call: GemmCall, operands: GemmOperands, shapes: GemmResults):
    """Returns both operands' scales; those of lhs for the rows that are multiplied."""
    of_lhs, of_rhs = call.scale_layouts
    scales = operands.lhs_scale_inv
    if call.gathers_to_aux:
        lhs = operands.lhs
        flat = collapse(lhs.shape, call.lhs_boundary)
        scales = unpad_scales(scales, shape=scales_shape(flat, of_lhs))
        scales = _gather_rows(call, scales.reshape(*lhs.shape[:-1], -1))
        scales = pad_scales(scales.reshape(-1, scales.shape[-1]), layout=of_lhs)
    lhs = None if shapes.lhs_swizzled is None else swizzle_scales(scales, layout=of_lhs)
    return lhs, swizzle_scales(operands.rhs_scale_inv, layout=of_rhs)


def _multiply(call, lhs, rhs, dtype):
    rows = lambda boundary: tuple(range(boundary))
    columns = lambda boundary, x: tuple(range(boundary, x.ndim))
    dims = (
        rows(call.lhs_boundary) if call.lhs_transposed else columns(call.lhs_boundary, lhs),
        columns(call.rhs_boundary, rhs) if call.rhs_transposed else rows(call.rhs_boundary),
    )
    return lax.dot_general(
        lhs, rhs, (dims, ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )


def _gather_rows(call: GemmCall, x):
    """[..., capacity, K] of every rank to [..., sum of the row counts, K]."""
    chunks = lax.all_gather(x, call.comm.axis_names)
    real = [chunks[q, ..., :count, :] for q, count in enumerate(call.row_counts)]
    return jnp.concatenate(real, axis=-2)


def _scatter(call: GemmCall, x, dtype):
    """[..., sum of the row counts, N] to this rank's [..., capacity, N], summed over ranks."""
    most, begins = max(call.row_counts), np.cumsum([0, *call.row_counts])
    room = [(0, 0)] * (x.ndim - 2)
    chunks = jnp.stack(
        [
            jnp.pad(x[..., begin : begin + count, :], [*room, (0, most - count), (0, 0)])
            for begin, count in zip(begins, call.row_counts, strict=False)
        ]
    )
    parts = lax.all_to_all(chunks, call.comm.axis_names, 0, 0)  # from each rank
    wide = sum_dtype(dtype)
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    return total.astype(dtype)


def _without_room(call: GemmCall, output):
    count = jnp.array(call.row_counts)[lax.axis_index(call.comm.axis_names)]
    is_row = jnp.arange(output.shape[-2]) < count
    return jnp.where(is_row[:, None], output, 0)


def _ring_rows(call: GemmCall):
    """Returns, for each row in ring order, its place in the order of the ranks."""
    counts = np.array(call.row_counts)
    begins = np.cumsum(counts) - counts
    tables = []
    for rank in range(call.comm.num_ranks):
        order = [(rank - step) % call.comm.num_ranks for step in range(1, call.comm.num_ranks + 1)]
        tables.append(np.concatenate([begins[q] + np.arange(counts[q]) for q in order]))
    return jnp.array(np.stack(tables))[lax.axis_index(call.comm.axis_names)]
