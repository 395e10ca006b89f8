"""The same calls from XLA's own collectives: for other platforms, and as an oracle on the mesh."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_cp_dispatch.comm_gemm.call import GemmCall, GemmOperands, GemmResults
from jax_cp_dispatch.comm_gemm.config import CommOverlapType


def gemm_by_xla(call: GemmCall, operands: GemmOperands) -> GemmResults:
    """One after the other, whatever the method; sums in the order of the ranks."""
    lhs, aux = operands.lhs, None
    if call.is_bulk:
        x = operands.aux_in
        aux = gather_rows(call, x) if call.gathers else _scatter(call, x, x.dtype)
    elif call.gathers:
        gathered = gather_rows(call, lhs)
        aux = gathered if call.gathers_to_aux else None
        lhs = gathered
        if call.in_ring_order:
            lhs = gathered[..., _ring_rows(call), :]
            aux = operands.lhs
    elif call.overlap.comm_type == CommOverlapType.RS and call.in_ring_order:
        lhs = lhs[..., jnp.argsort(_ring_rows(call)), :]
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    product = _multiply(call, lhs, operands.rhs, wide)
    if call.overlap.comm_type == CommOverlapType.RS and not call.is_bulk:
        product = _scatter(call, product.astype(call.overlap.partial_dtype), wide)
    if operands.bias is not None:
        product = product + operands.bias.astype(wide)
    output = product.reshape(call.out_shape).astype(call.out_dtype)
    if call.overlap.comm_type == CommOverlapType.RS and not call.is_bulk:
        output = _without_room(call, output)
    shapes = call.result_shapes(operands)
    unused = lambda shape: None if shape is None else jnp.zeros(*shape)
    return GemmResults(output, None, None, aux, None, None, unused(shapes.workspace))


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


def gather_rows(call: GemmCall, x):
    """[..., capacity, K] of every rank to [..., sum of the row counts, K]."""
    chunks = lax.all_gather(x, call.axis_names)
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
    parts = lax.all_to_all(chunks, call.axis_names, 0, 0)  # from each rank
    wide = jnp.promote_types(dtype, jnp.float32)
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    return total.astype(dtype)


def _without_room(call: GemmCall, output):
    count = jnp.array(call.row_counts)[lax.axis_index(call.axis_names)]
    is_row = jnp.arange(output.shape[-2]) < count
    return jnp.where(is_row[:, None], output, 0)


def _ring_rows(call: GemmCall):
    """Of each row in ring order, its place in the order of the ranks."""
    counts = np.array(call.row_counts)
    begins = np.cumsum(counts) - counts
    tables = []
    for rank in range(call.num_ranks):
        order = [(rank - step) % call.num_ranks for step in range(1, call.num_ranks + 1)]
        tables.append(np.concatenate([begins[q] + np.arange(counts[q]) for q in order]))
    return jnp.array(np.stack(tables))[lax.axis_index(call.axis_names)]
