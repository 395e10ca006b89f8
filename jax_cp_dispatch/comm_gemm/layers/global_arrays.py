"""Matmuls of global arrays under plain `jit`, by a Shardy rule or an inner `shard_map`.

Over automatic axes the partitioner keeps known shardings, see `partitioning`. Explicit axes are
read from the types: batch dimensions, and tokens on axes other than the ranks', keep their
sharding.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array

from jax_cp_dispatch._ranks.call_context import (
    CallContext,
    place,
    refuse_other_mesh,
)
from jax_cp_dispatch._ranks.varying import refuse_mapped_explicit_axes, vary_alike, varying_axes
from jax_cp_dispatch.comm_gemm.layers.derivatives import gathered_matmul, scattered_matmul
from jax_cp_dispatch.comm_gemm.layers.matmul_operands import MatmulOperands
from jax_cp_dispatch.comm_gemm.layers.partitioning import with_rows
from jax_cp_dispatch.comm_gemm.layers.rank import Matmul
from jax_cp_dispatch.comm_gemm.layers.token_axes import tell_lost_axes
from jax_cp_dispatch.comm_gemm.scaled.scaled_operands import use_scales
from jax_cp_dispatch.comm_gemm.types import CommOverlapType
from jax_cp_dispatch.global_call.explicit_axes import explicit_axes
from jax_cp_dispatch.global_call.mesh_axes import MeshAxes
from jax_cp_dispatch.global_call.on_all_ranks import on_all_ranks


def global_matmul(
    s: Matmul, context: CallContext, operands: MatmulOperands, state
) -> tuple[Array, ...]:
    """Computes the matmul of global arrays."""
    gathers, p = s.overlap.comm_type == CommOverlapType.AG, s.comm.num_ranks
    for w in operands.ws:
        split = w.shape[1 if gathers else 0]
        if split % p:
            raise ValueError(
                f"{s.op}: w has shape {w.shape}, whose dimension of {split} is not divisible by "
                f"the {p} devices of {s.comm.axis_names}. Pad it."
            )
    rows, room = operands.tokens_shape[-1], p * max(s.row_counts)
    if gathers:
        operands = dataclasses.replace(operands, x=with_rows(operands.x, room))
    if context.open_axes:
        refuse_mapped_explicit_axes(s.op, context.mesh)
        outs = _inside_shard_map(gathers, context, s, operands, state)
        if gathers or room == rows:
            return outs
        batch, _ = _explicit_axes(context, s, operands)
        whole = P(*batch, None, None)  # tokens that do not divide are not sharded
        return (place(outs[0], context.mesh, whole)[..., :rows, :],)
    if context.mesh is not None:
        refuse_other_mesh(s.op, context.mesh, (operands.x, *operands.ws))
    scales = None if state is None else use_scales(s.scaling_mode, (), state)
    outs = _one_program(gathers)(s, operands, scales)
    return outs if gathers or room == rows else (outs[0][..., :rows, :],)


@functools.cache
def _one_program(gathers: bool):
    """Jits the matmul, so that the compiler sees all of it even without an outer `jit`."""
    run = gathered_matmul if gathers else scattered_matmul

    def matmul(s, operands, scales):
        return operands.multiply(lambda *arrays: run(s, *arrays, scales), s.num_parts)

    return jax.jit(matmul, static_argnums=0, inline=True)


def even_row_counts(rows: int, num_ranks: int) -> tuple[int, ...]:
    """Returns row counts as even as blocks of one size allow."""
    room = max(1, -(-rows // num_ranks))
    return tuple(min(room, max(0, rows - q * room)) for q in range(num_ranks))


# ---- Explicit axes.


def _explicit_axes(context: CallContext, s: Matmul, operands: MatmulOperands):
    """Returns how types shard batch dimensions and tokens, apart from the ranks."""
    mesh = context.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    is_free = lambda a: (
        kinds.get(a) == AxisType.Explicit and a in context.open_axes and a not in s.comm.axis_names
    )
    x, num_dims = operands.x, len(operands.tokens_shape)
    spec = (*jax.typeof(x).sharding.spec, *(None,) * num_dims)[:num_dims]
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    *batch, tokens = [tuple(filter(is_free, axes_of(entry))) for entry in spec]
    parts = math.prod(mesh.shape[name] for name in tokens) * s.comm.num_ranks
    rows = sum(s.row_counts)
    if tokens and rows % parts:
        tell_lost_axes(s, tokens, f"{rows} tokens are not a multiple of {parts} devices; pad them")
        tokens = ()
    return [axes or None for axes in batch], tokens


def over_explicit_axes(run: Any, operands: MatmulOperands, state) -> tuple[Array, ...] | None:
    """Returns `run(operands, state)` of one rank's arrays over the explicit axes that shard them.

    None if there are none. Batch dimensions stay sharded, all others are gathered.
    """
    axes = explicit_axes("", others=(operands, state), covers_batch=False)
    if axes is None:
        return None
    num_batch = len(operands.tokens_shape) - 1
    batch = P(*jax.typeof(operands.x).sharding.spec[:num_batch])
    return on_all_ranks(
        run,
        (operands, state),
        axes=axes,
        in_specs=(dataclasses.replace(jax.tree.map(lambda _: P(), operands), x=batch), P()),
        out_specs=batch,
        num_differentiable=2,
    )


def rank_matmul(s: Matmul, operands: MatmulOperands, state) -> tuple[Array, ...]:
    """Computes the differentiable matmul with one rank's arguments, inside `jax.shard_map`."""
    arrays, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, vary_alike(arrays, also=s.varying_axes()))
    axes, varying = s.comm.axis_names + s.comm.group_axes, varying_axes(operands.x)
    if varying:  # JAX tracks them; ranks with the same x share the state anyway
        axes = tuple(a for a in axes if a in varying)
    scales = None if state is None else use_scales(s.scaling_mode, axes, state)
    run = gathered_matmul if s.overlap.comm_type == CommOverlapType.AG else scattered_matmul
    return operands.multiply(lambda *arrays: run(s, *arrays, scales), s.num_parts)


def _inside_shard_map(
    gathers: bool, context: CallContext, s: Matmul, operands: MatmulOperands, state
):
    names, mesh = s.comm.axis_names, context.mesh
    batch, tokens = _explicit_axes(context, s, operands)
    by_rows, by_columns = P(*batch, tokens + names), P(*batch, tokens or None, names)
    of_bias = P(names) if gathers else P()
    specs = dataclasses.replace(
        operands,
        x=by_rows if gathers else by_columns,
        ws=(P(None, names) if gathers else P(names),) * len(operands.ws),
        biases=tuple(None if bias is None else of_bias for bias in operands.biases),
    )
    operands = jax.tree.map(lambda a, spec: place(a, mesh, spec), operands, specs)
    groups = math.prod(mesh.shape[name] for name in tokens)
    counts = tuple(count // groups for count in s.row_counts)
    local = s.replace(row_counts=counts, comm=s.comm.inside(mesh), mesh=None)
    return on_all_ranks(
        functools.partial(rank_matmul, local),
        (operands, state),
        axes=MeshAxes(mesh, names, (), ()),
        in_specs=(specs, P()),
        out_specs=by_columns if gathers else by_rows,
        num_differentiable=2,
    )
