"""`dispatch_p` and `combine_p`: shapes, batching and derivatives.

Both are linear in the arrays and each is the other's transpose:

    dispatch:  buffer[dst_rank][dst_offset + i] = tokens[src_offset + i]
    combine:   tokens[src_offset + i] = sum over replicas of buffer[dst_rank][dst_offset + i]
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_cp_dispatch._dispatch.arguments import (
    Exchange,
    ExchangeOperands,
    groups_by_array,
    read_operands,
    select_arrays,
    summable,
)
from jax_cp_dispatch._dispatch.lowering import lower
from jax_cp_dispatch._jax_private import prim_requires_devices_during_lowering
from jax_cp_dispatch._ranks.lowering import one_after_another, run_alone
from jax_cp_dispatch._ranks.options import vary_alike, varying_axes

dispatch_p = Primitive("dispatch")
combine_p = Primitive("combine")

# ---- Shapes. `update` keeps the mesh axes over which an array varies.


def _dispatch_shapes(*operands, exchange: Exchange):
    arrays = read_operands(operands, exchange).arrays
    rows = [group.capacity * _num_held(exchange) for group in groups_by_array(exchange)]
    return [
        x.update(shape=(n, *x.shape[1:]), weak_type=False)
        for x, n in zip(arrays, rows, strict=True)
    ]


def result_shapes(operands: Sequence[Any], exchange: Exchange) -> list[Any]:
    """Returns the shapes of the results of an exchange."""
    shapes = _dispatch_shapes if exchange.sums is None else _combine_shapes
    return shapes(*operands, exchange=exchange)


def _combine_shapes(*operands, exchange: Exchange):
    arrays = read_operands(operands, exchange).arrays
    rows = [group.num_tokens * _num_held(exchange) for group in groups_by_array(exchange)]
    return [
        y.update(shape=(n, *y.shape[1:]), dtype=np.dtype(dtype), weak_type=False)
        for y, n, dtype in zip(arrays, rows, exchange.sums or (), strict=True)
    ]


def _num_held(exchange: Exchange) -> int:
    """Returns the number of ranks whose rows an array holds."""
    return exchange.comm.num_ranks if exchange.is_global else 1


# ---- Batching. A batch axis of an array moves behind its rows: still one call, with wider rows.
# Metadata or fingerprints that differ per example need one exchange per example.


def _batch(primitive, operands, dims, *, exchange: Exchange):
    split, dims = read_operands(operands, exchange), read_operands(dims, exchange)
    split, dims = split._replace(storage=[]), dims._replace(storage=[])
    before = [*itertools.chain(*dims.metadata), *dims.fingerprints]
    if all(dim is None for dim in before):
        moved = [
            x if dim is None else jnp.moveaxis(x, dim, 1)
            for x, dim in zip(split.arrays, dims.arrays, strict=True)
        ]
        outs = primitive.bind(*split._replace(arrays=moved).flat(), exchange=exchange)
        return outs, [None if dim is None else 1 for dim in dims.arrays]
    fields = [x for metadata in split.metadata for x in metadata.present()]
    axes = set().union(*map(varying_axes, fields))  # under spmd_axis_name they vary over it
    split = split._replace(arrays=vary_alike(split.arrays, also=axes))
    return one_after_another(primitive, split.flat(), _flat_dims(dims, split), exchange=exchange)


def _flat_dims(dims: ExchangeOperands, operands: ExchangeOperands) -> list[Any]:
    """Returns batch axes in the order of `operands.flat()`; None means not batched, not absent."""
    fields = [
        dim
        for metadata, of_fields in zip(operands.metadata, dims.metadata, strict=True)
        for field, dim in zip(metadata, of_fields, strict=True)
        if field is not None
    ]
    fingerprints = [
        dim
        for fingerprint, dim in zip(operands.fingerprints, dims.fingerprints, strict=True)
        if fingerprint is not None
    ]
    return [*fields, *fingerprints, *dims.arrays]


# ---- Derivatives. Only arrays with a tangent take part in the linear call; integer arrays move
# too, but have none.


def _jvp(primitive, primals, tangents, *, exchange: Exchange):
    if any(group.has_weights for group in exchange.groups):
        raise NotImplementedError(f"{exchange.op}: forward mode is not defined. Use jax.grad.")
    outs = primitive.bind(*primals, exchange=exchange)
    out_tangents = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    tangents = read_operands(tangents, exchange).arrays
    keep = [type(tangent) is not ad.Zero for tangent in tangents]
    if any(keep):
        linear = read_operands(primals, exchange)._replace(arrays=tangents)
        linear, kept = select_arrays(linear, exchange, keep)
        moved = iter(primitive.bind(*linear.flat(), exchange=kept))
        out_tangents = [
            next(moved) if kept else zero for kept, zero in zip(keep, out_tangents, strict=True)
        ]
    return outs, out_tangents


def _transpose(adjoint, cotangents, *operands, exchange: Exchange):
    split = read_operands(operands, exchange)
    is_linear = [ad.is_undefined_primal(x) for x in split.arrays]
    keep = [
        linear and type(ct) is not ad.Zero for linear, ct in zip(is_linear, cotangents, strict=True)
    ]
    results = [
        ad.Zero(x.aval.to_ct_aval()) if linear else None
        for x, linear in zip(split.arrays, is_linear, strict=True)
    ]
    if any(keep):
        linear = split._replace(arrays=list(cotangents))
        linear, kept = select_arrays(linear, exchange, keep)
        dtypes = [x.aval.dtype for x in itertools.compress(split.arrays, keep)]
        adjoints = iter(adjoint(linear, dtypes, transposed(kept)))
        results = [
            next(adjoints) if live else zero for live, zero in zip(keep, results, strict=True)
        ]
    return [None] * exchange.num_before_arrays + results + [None] * len(split.storage)


def name_of_transpose(op: str) -> str:
    """Returns the name of the transpose of an operation, for messages."""
    prefix = "the transpose of "
    return op.removeprefix(prefix) if op.startswith(prefix) else prefix + op


def transposed(exchange: Exchange) -> Exchange:
    """Returns the exchange with the name of its transpose, but not yet its sums."""
    op = name_of_transpose(exchange.op)
    by_collectives = exchange.by_collectives and exchange.by_collectives.transposed()
    return exchange._replace(op=op, by_collectives=by_collectives)


def adjoint_move(exchange: Exchange) -> Callable[..., list[Any]]:
    """Returns the adjoint as a function of (operands, dtypes of the results, `transposed`)."""
    return _dispatch_adjoint if exchange.sums is None else _combine_adjoint


def _dispatch_adjoint(linear: ExchangeOperands, dtypes, exchange: Exchange):
    wide = [ct.astype(summable(ct.dtype)) for ct in linear.arrays]
    exchange = exchange._replace(sums=tuple(ct.dtype.name for ct in wide))
    sums = combine_p.bind(*linear._replace(arrays=wide).flat(), exchange=exchange)
    return [total.astype(dtype) for total, dtype in zip(sums, dtypes, strict=True)]


def _combine_adjoint(linear: ExchangeOperands, dtypes, exchange: Exchange):
    # A copy commutes with rounding, so the narrower type is moved.
    narrow = [ct.astype(dtype) for ct, dtype in zip(linear.arrays, dtypes, strict=True)]
    exchange = exchange._replace(sums=None)
    return dispatch_p.bind(*linear._replace(arrays=narrow).flat(), exchange=exchange)


# ---- The primitives.


def register(primitive: Primitive, shapes, lowering, *, cacheable: bool = True) -> None:
    """Registers what the primitives of exchanges have in common.

    `cacheable`: whether the lowering depends on the operands' types alone.
    """
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)
    primitive.def_impl(functools.partial(run_alone, primitive))
    mlir.register_lowering(primitive, lowering, cacheable=cacheable)
    # Private, but the only way to make `jit` provide what a partitioned lowering needs.
    prim_requires_devices_during_lowering.add(primitive)


def _complete(primitive: Primitive, shapes, adjoint) -> None:
    register(primitive, shapes, functools.partial(lower, primitive))
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, adjoint)


_complete(dispatch_p, _dispatch_shapes, _dispatch_adjoint)
_complete(combine_p, _combine_shapes, _combine_adjoint)
