"""`dispatch_p` and `combine_p`: shapes, batching and derivatives.

Both are linear in the arrays and each is the other's transpose:

    dispatch:  buffer[dst_rank][dst_offset + i] = tokens[src_offset + i]
    combine:   tokens[src_offset + i] = sum over replicas of buffer[dst_rank][dst_offset + i]
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_cp_dispatch._dispatch.lowering import combine_by_xla, dispatch_by_xla, lower
from jax_cp_dispatch._dispatch.operands import (
    Operands,
    part_of_each,
    read_operands,
    select_arrays,
    summable,
)
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.lowering import one_after_another, run_alone
from jax_cp_dispatch._ranks.varying import vary_alike, varying_axes

dispatch_p = Primitive("dispatch")
combine_p = Primitive("combine")

# ---- Shapes. `update` keeps the mesh axes over which an array varies.


def _dispatch_shapes(*operands, call, parts):
    arrays = read_operands(operands, parts).arrays
    rows = [part.capacity * _num_held(call) for part in part_of_each(parts)]
    return [
        x.update(shape=(n, *x.shape[1:]), weak_type=False)
        for x, n in zip(arrays, rows, strict=True)
    ]


def _combine_shapes(*operands, call, parts, dtypes):
    arrays = read_operands(operands, parts).arrays
    rows = [part.num_tokens * _num_held(call) for part in part_of_each(parts)]
    return [
        y.update(shape=(n, *y.shape[1:]), dtype=np.dtype(dtype), weak_type=False)
        for y, n, dtype in zip(arrays, rows, dtypes, strict=True)
    ]


def _num_held(call) -> int:
    """Returns the number of ranks whose rows an array holds."""
    return call.comm.num_ranks if call.is_global else 1


# ---- Batching. A batch axis of an array moves behind its rows: still one call, with wider rows.
# Metadata or stamps that differ per example need one exchange per example.


def _batch(primitive, operands, dims, *, parts, **params):
    split, dims = read_operands(operands, parts), read_operands(dims, parts)
    split, dims = split._replace(storage=[]), dims._replace(storage=[])
    before = [*itertools.chain(*dims.metadata), *dims.stamps]
    if all(dim is None for dim in before):
        moved = [
            x if dim is None else jnp.moveaxis(x, dim, 1)
            for x, dim in zip(split.arrays, dims.arrays, strict=True)
        ]
        outs = primitive.bind(*split._replace(arrays=moved).flat(), parts=parts, **params)
        return outs, [None if dim is None else 1 for dim in dims.arrays]
    fields = [x for metadata in split.metadata for x in metadata.present()]
    axes = set().union(*map(varying_axes, fields))  # under spmd_axis_name they vary over it
    split = split._replace(arrays=vary_alike(split.arrays, also=axes))
    places = _flat_dims(dims, split)
    return one_after_another(primitive, split.flat(), places, parts=parts, **params)


def _flat_dims(dims: Operands, operands: Operands) -> list[Any]:
    """Returns batch axes in the order of `operands.flat()`; None means not batched, not absent."""
    fields = [
        dim
        for metadata, places in zip(operands.metadata, dims.metadata, strict=True)
        for dim in places[: len(metadata.present())]
    ]
    stamps = [
        dim for stamp, dim in zip(operands.stamps, dims.stamps, strict=True) if stamp is not None
    ]
    return [*fields, *stamps, *dims.arrays]


# ---- Derivatives. Only arrays with a tangent take part in the linear call; integer arrays move
# too, but have none.


def _jvp(primitive, primals, tangents, *, parts, **params):
    outs = primitive.bind(*primals, parts=parts, **params)
    out_tangents = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    tangents = read_operands(tangents, parts).arrays
    keep = [type(tangent) is not ad.Zero for tangent in tangents]
    if any(keep):
        linear = read_operands(primals, parts)._replace(arrays=tangents)
        linear, linear_parts = select_arrays(linear, parts, keep)
        if "dtypes" in params:
            params["dtypes"] = tuple(itertools.compress(params["dtypes"], keep))
        moved = iter(primitive.bind(*linear.flat(), parts=linear_parts, **params))
        out_tangents = [
            next(moved) if kept else zero for kept, zero in zip(keep, out_tangents, strict=True)
        ]
    return outs, out_tangents


def _transpose(adjoint, cotangents, *operands, call, parts, **_):
    split = read_operands(operands, parts)
    is_linear = [ad.is_undefined_primal(x) for x in split.arrays]
    keep = [
        linear and type(ct) is not ad.Zero for linear, ct in zip(is_linear, cotangents, strict=True)
    ]
    results = [
        ad.Zero(x.aval.to_ct_aval()) if linear else None
        for x, linear in zip(split.arrays, is_linear, strict=True)
    ]
    if any(keep):
        kept, kept_parts = select_arrays(split._replace(arrays=list(cotangents)), parts, keep)
        dtypes = [x.aval.dtype for x in itertools.compress(split.arrays, keep)]
        call = call._replace(op=_transposed(call.op))
        if call.by_collectives is not None:
            call = call._replace(by_collectives=call.by_collectives.transposed())
        adjoints = iter(adjoint(kept, dtypes, call=call, parts=kept_parts))
        results = [
            next(adjoints) if live else zero for live, zero in zip(keep, results, strict=True)
        ]
    num_before = len(operands) - len(results) - len(split.storage)
    return [None] * num_before + results + [None] * len(split.storage)


def _transposed(op: str) -> str:
    prefix = "the transpose of "
    return op.removeprefix(prefix) if op.startswith(prefix) else prefix + op


def _dispatch_adjoint(linear, dtypes, **params):
    wide = [ct.astype(summable(ct.dtype)) for ct in linear.arrays]
    linear = linear._replace(arrays=wide)
    sums = combine_p.bind(*linear.flat(), dtypes=tuple(ct.dtype.name for ct in wide), **params)
    return [total.astype(dtype) for total, dtype in zip(sums, dtypes, strict=True)]


def _combine_adjoint(linear, dtypes, **params):
    # A copy commutes with rounding, so the narrower type is moved.
    narrow = [ct.astype(dtype) for ct, dtype in zip(linear.arrays, dtypes, strict=True)]
    return dispatch_p.bind(*linear._replace(arrays=narrow).flat(), **params)


# ---- The primitives.


def _complete(primitive: Primitive, shapes, by_xla, target, adjoint) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)
    primitive.def_impl(functools.partial(run_alone, primitive))
    mlir.register_lowering(primitive, functools.partial(lower, primitive, by_xla, target))
    # Private, but the only way to make `jit` provide what a partitioned lowering needs.
    prim_requires_devices_during_lowering.add(primitive)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, adjoint)


_complete(dispatch_p, _dispatch_shapes, dispatch_by_xla, runtime.DISPATCH_TARGET, _dispatch_adjoint)
_complete(combine_p, _combine_shapes, combine_by_xla, runtime.COMBINE_TARGET, _combine_adjoint)
