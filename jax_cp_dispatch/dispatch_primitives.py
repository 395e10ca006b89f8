"""`dispatch_p` and `combine_p`: shapes, lowering, batching and derivatives.

Operands of both: the metadata operands of `MetadataOperands`, then the arrays that move. Both are
linear in the arrays and each is the other's transpose:

    dispatch:  buffer[dst_rank][dst_offset + i] = tokens[src_offset + i]
    combine:   tokens[src_offset + i] = sum over replicas of buffer[dst_rank][dst_offset + i]
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Int32, UInt32

from jax_cp_dispatch import runtime

# What the native summation knows; bfloat16 and float16 accumulate in float32.
COMBINE_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


class MetadataOperands(NamedTuple):
    """One rank's view of the forward metadata, in the types that the handlers read."""

    rank_and_group: Int32[Array, "2"]
    dst_rank: Int32[Array, "S C"]
    dst_offset: UInt32[Array, "S C"]
    seq_len: UInt32[Array, " S"]
    src_offset: UInt32[Array, " S"]
    num_recv_tokens: UInt32[Array, " W+1"]


_NUM_METADATA = len(MetadataOperands._fields)


def _split(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return list(operands[:_NUM_METADATA]), list(operands[_NUM_METADATA:])


def widen(y: Any) -> Any:
    """`y` as the native summation knows it: floats of one byte become float32."""
    is_known = y.dtype.name in COMBINE_DTYPES or not jnp.issubdtype(y.dtype, jnp.floating)
    return y if is_known else y.astype(jnp.float32)


# ---- Shapes. `update` keeps the mesh axes over which an array varies.


def _dispatch_shapes(*operands, num_arrays, capacity, **_):
    _, arrays = _split(operands)
    return [x.update(shape=(capacity, *x.shape[1:]), weak_type=False) for x in arrays[:num_arrays]]


def _combine_shapes(*operands, num_tokens, dtypes, **_):
    _, arrays = _split(operands)
    return [
        y.update(shape=(num_tokens, *y.shape[1:]), dtype=np.dtype(dtype), weak_type=False)
        for y, dtype in zip(arrays, dtypes, strict=True)
    ]


# ---- Lowering. No side effect is declared: one executable serves all devices of a program, so
# that removing, merging or hoisting a call is the same on all of them.


def _lower_dispatch_on_cpu(ctx, *operands, num_arrays, axis, deadline_ms, **_):
    first = _NUM_METADATA + num_arrays  # storage to reuse follows the arrays, one for each
    aliases = {operand: operand - first for operand in range(first, len(operands))}
    rule = jax.ffi.ffi_lowering(runtime.DISPATCH_TARGET, operand_output_aliases=aliases)
    return rule(ctx, *operands, axis=axis, deadline_ms=np.int64(deadline_ms))


def _lower_combine_on_cpu(ctx, *operands, axis, deadline_ms, **_):
    rule = jax.ffi.ffi_lowering(runtime.COMBINE_TARGET)
    return rule(ctx, *operands, axis=axis, deadline_ms=np.int64(deadline_ms))


def _refuse_platform(ctx, *_, **__):
    raise NotImplementedError(
        "jax_cp_dispatch: dispatch and combine have a transport for platform 'cpu' only, but the "
        f"program is lowered for {tuple(ctx.module_context.platforms)}. Run it on virtual CPU "
        "devices: JAX_PLATFORMS=cpu and jax.config.update('jax_num_cpu_devices', n)."
    )


# ---- Batching. A batch axis of an array moves behind its rows: still one call, with wider rows.
# Metadata that differs per example needs one exchange per example.


def _batch(primitive: Primitive, num_arrays: int, operands, dims, params):
    metadata, arrays = _split(operands)
    metadata_dims, array_dims = _split(dims)
    arrays, array_dims = arrays[:num_arrays], array_dims[:num_arrays]  # drops storage to reuse
    if metadata_dims[0] is not None:
        raise ValueError(
            f"{primitive}: axis {params['axis']!r} is an axis of jax.vmap here, but the ranks must "
            "be devices. Map over another name, and call inside jax.shard_map over this one."
        )
    if all(dim is None for dim in metadata_dims):
        moved = [
            x if dim is None else jnp.moveaxis(x, dim, 1)
            for x, dim in zip(arrays, array_dims, strict=True)
        ]
        outs = primitive.bind(*metadata, *moved, **params)
        return outs, [None if dim is None else 1 for dim in array_dims]
    everything = [*metadata, *arrays]
    is_mapped = [dim is not None for dim in (*metadata_dims, *array_dims)]
    mapped = [
        jnp.moveaxis(x, dim, 0)
        for x, dim in zip(everything, (*metadata_dims, *array_dims), strict=True)
        if dim is not None
    ]

    def one_example(example):
        rest = iter(example)
        return primitive.bind(
            *(next(rest) if m else x for m, x in zip(is_mapped, everything, strict=True)), **params
        )

    outs = jax.lax.map(one_example, mapped)
    return outs, [0] * len(outs)


# ---- Derivatives. Only arrays with a tangent take part in the linear call; integer arrays travel
# along and have none.


def _jvp(primitive: Primitive, select: Callable[..., dict[str, Any]], primals, tangents, **params):
    metadata, arrays = _split(primals)
    _, array_tangents = _split(tangents)
    outs = primitive.bind(*metadata, *arrays, **params)
    out_tangents = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    live = [i for i in range(len(outs)) if type(array_tangents[i]) is not ad.Zero]
    if live:
        moved = primitive.bind(
            *metadata, *(array_tangents[i] for i in live), **select(live, **params)
        )
        for i, tangent in zip(live, moved, strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _dispatch_select(live, *, num_arrays, **params):
    return dict(num_arrays=len(live), **params)


def _combine_select(live, *, dtypes, **params):
    return dict(dtypes=tuple(dtypes[i] for i in live), **params)


def _transpose(bind_adjoint: Callable[..., list[Any]], cotangents, *operands, **params):
    metadata, arrays = _split(operands)
    results: list[Any] = [None] * len(operands)
    live = []
    for i, x in enumerate(arrays):
        if not ad.is_undefined_primal(x):
            continue  # storage to reuse
        results[_NUM_METADATA + i] = ad.Zero(x.aval.to_ct_aval())
        if type(cotangents[i]) is not ad.Zero:
            live.append(i)
    if live:
        avals = [arrays[i].aval for i in live]
        adjoints = bind_adjoint(metadata, [cotangents[i] for i in live], avals, **params)
        for i, adjoint in zip(live, adjoints, strict=True):
            results[_NUM_METADATA + i] = adjoint
    return results


def _dispatch_adjoint(metadata, cotangents, avals, *, num_arrays, capacity, **params):
    wide = [widen(ct) for ct in cotangents]
    dtypes = tuple(ct.dtype.name for ct in wide)
    sums = combine_p.bind(*metadata, *wide, num_tokens=avals[0].shape[0], dtypes=dtypes, **params)
    return [total.astype(aval.dtype) for total, aval in zip(sums, avals, strict=True)]


def _combine_adjoint(metadata, cotangents, avals, *, num_tokens, dtypes, **params):
    # A copy commutes with rounding, so the narrower type travels.
    narrow = [ct.astype(aval.dtype) for ct, aval in zip(cotangents, avals, strict=True)]
    capacity = avals[0].shape[0]
    return dispatch_p.bind(*metadata, *narrow, num_arrays=len(avals), capacity=capacity, **params)


# ---- The primitives.


def _make(name, *, shapes, lower_on_cpu, num_arrays, select, adjoint) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)
    mlir.register_lowering(primitive, _refuse_platform)
    mlir.register_lowering(primitive, lower_on_cpu, platform="cpu")
    batching.primitive_batchers[primitive] = lambda operands, dims, **params: _batch(
        primitive, num_arrays(**params), operands, dims, params
    )
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: _jvp(
        primitive, select, primals, tangents, **params
    )
    ad.primitive_transposes[primitive] = lambda cotangents, *operands, **params: _transpose(
        adjoint, cotangents, *operands, **params
    )
    return primitive


dispatch_p = _make(
    "dispatch",
    shapes=_dispatch_shapes,
    lower_on_cpu=_lower_dispatch_on_cpu,
    num_arrays=lambda *, num_arrays, **_: num_arrays,
    select=_dispatch_select,
    adjoint=_dispatch_adjoint,
)
combine_p = _make(
    "combine",
    shapes=_combine_shapes,
    lower_on_cpu=_lower_combine_on_cpu,
    num_arrays=lambda *, dtypes, **_: len(dtypes),
    select=_combine_select,
    adjoint=_combine_adjoint,
)
