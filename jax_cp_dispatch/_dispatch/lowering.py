"""Lowers a call to a custom call of this package, to XLA's collectives, or to a partition.

No side effect is declared: all devices of a program run one executable, so a call is removed,
merged or hoisted on all of them alike.
"""

import functools

import jax
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._dispatch.devices import on_every_device
from jax_cp_dispatch._dispatch.operands import (
    by_part,
    num_before_arrays,
    part_of_each,
    read_operands,
)
from jax_cp_dispatch._dispatch.partitioning import lower_partitioned
from jax_cp_dispatch._dispatch.ragged_choice import may_be_ragged
from jax_cp_dispatch._dispatch.xla_collectives import combine_with_xla, dispatch_with_xla
from jax_cp_dispatch._ranks.axis import place_on
from jax_cp_dispatch._ranks.call_site import call_site_attributes
from jax_cp_dispatch._ranks.gpu import (
    GPU_IMPLEMENTATIONS,
    all_ranks_here,
    chosen_mover,
    gpu_attributes,
    on_collective_stream,
)
from jax_cp_dispatch._ranks.implementations import choose_implementation
from jax_cp_dispatch._ranks.lowering import (
    choose_transport,
    lower_opened,
    lower_places,
    prepare_cpu_devices,
)


def lower(primitive, by_xla, target, ctx, *operands, call, parts, **params):
    """Lowers both primitives.

    `by_xla` computes a primitive with XLA's collectives; `target` names its custom call.
    """
    by_xla = functools.partial(by_xla, call=call, parts=parts, **params)
    if call.comm.open_axes:
        opened = functools.partial(_opened, primitive, call=call, parts=parts, **params)
        return lower_opened(opened, ctx, *operands)
    if call.is_global:
        if _is_for_gpu(ctx, call):
            by_xla = functools.partial(
                _on_gpu, target, ctx.avals_out, call=call, parts=parts, where=all_ranks_here()
            )
        return lower_partitioned(
            primitive, ctx, *operands, call=call, parts=parts, on_one_device=by_xla, params=params
        )
    transport = choose_transport(ctx, call.op, call.comm)
    if transport.name == "xla":
        by_xla = functools.partial(by_xla, ragged=may_be_ragged(ctx.module_context.platforms))
        return mlir.lower_fun(by_xla, multiple_results=True)(ctx, *operands)
    if transport.name in GPU_IMPLEMENTATIONS:
        where = gpu_attributes(ctx, transport.name, call.comm)
        on_gpu = functools.partial(
            _on_gpu, target, ctx.avals_out, call=call, parts=parts, where=where
        )
        return mlir.lower_fun(on_gpu, multiple_results=True)(ctx, *operands)
    prepare_cpu_devices()
    what = _what(target, parts)
    where = call_site_attributes(ctx, what, call.comm, transport.groups, transport.name)
    return _lower_custom_call(target, ctx, *operands, call=call, parts=parts, **where)


def _is_for_gpu(ctx, call):
    platforms, wanted = ctx.module_context.platforms, call.comm.implementation
    if set(platforms) != {"cuda"} or wanted not in (None, *GPU_IMPLEMENTATIONS):
        return False
    return choose_implementation(call.op, wanted, platforms) in GPU_IMPLEMENTATIONS


def _on_gpu(target, avals_out, *operands, call, parts, where):
    """Makes the custom call of one rank, or of one device that holds the rows of all ranks."""
    shapes = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in avals_out]
    num_storage = _num_storage(operands, parts)
    aliases = {2 + len(operands) - num_storage + i: i for i in range(num_storage)}
    move = jax.ffi.ffi_call(target, shapes, input_output_aliases=aliases)
    move = functools.partial(move, **_attributes(call, parts), **where, mover=chosen_mover(call.op))
    axes = ((), ()) if call.is_global else (call.comm.axis_names, call.comm.group_axes)
    return on_collective_stream(move)(*map(place_on, axes), *operands)


def _lower_custom_call(target, ctx, *operands, call, parts, **where):
    places, types = lower_places(ctx, call.comm)
    operands = (*places, *operands)
    num_storage = _num_storage(ctx.avals_in, parts)
    aliases = {len(operands) - num_storage + i: i for i in range(num_storage)}
    return jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)(
        ctx.replace(avals_in=(*types, *ctx.avals_in)),
        *operands,
        **_attributes(call, parts),
        **where,
    )


def _num_storage(operands, parts):
    return len(operands) - num_before_arrays(parts) - len(part_of_each(parts))


def _attributes(call, parts):
    return {
        "op": call.op,
        **call.comm.attributes(),
        "capacity_names": ",".join(part.capacity_name for part in parts),
        "has_src_offset": _span(part.has_src_offset for part in parts),
        "has_stamp": _span(part.has_stamp for part in parts),
        "num_arrays": _span(part.num_arrays for part in parts),
        "num_tokens": _span(part.num_tokens for part in parts),
        "capacity": _span(part.capacity for part in parts),
        "buffer": _span(part.buffer for part in parts),
    }


def _what(target, parts):
    """Describes the operation, and the properties of its parts that shapes do not show."""
    rows = "; ".join(f"{part.num_tokens} tokens, capacity {part.capacity}" for part in parts)
    return f"{target.rpartition('.')[2]} of {rows}"


def _opened(primitive, *operands, call, parts, **params):
    """Runs each device's part inside a `shard_map` over the axes that are not manual yet."""

    def on_rank(mesh):
        local = call.inside(mesh)
        return lambda *moved: primitive.bind(*moved, call=local, parts=parts, **params)

    return on_every_device(
        on_rank,
        operands,
        comm=call.comm,
        is_global=call.is_global,
        num_fields=num_before_arrays(parts),
        num_results=sum(part.num_arrays for part in parts),
    )


def _span(values):
    return np.array(list(values), np.int64)


def dispatch_by_xla(*operands, call, parts, ragged=False):
    """`dispatch_p` from XLA's collectives."""
    split = read_operands(operands, parts)
    if call.by_collectives is not None:
        return call.by_collectives(split.arrays)
    outs = []
    for part, metadata, stamp, arrays in zip(
        parts, split.metadata, split.stamps, by_part(split.arrays, parts), strict=True
    ):
        outs += dispatch_with_xla(
            place_on(_axes_to_gather(call)),
            metadata,
            _without_padding(arrays, part.num_tokens),
            axis_names=_axes_to_gather(call),
            num_ranks=call.comm.num_ranks,
            capacity=part.capacity,
            stamp=stamp,
            ragged=ragged,
        )
    return outs


def combine_by_xla(*operands, call, parts, dtypes, ragged=False):
    """`combine_p` from XLA's collectives."""
    split = read_operands(operands, parts)
    if call.by_collectives is not None:
        moved = call.by_collectives(split.arrays)
        return [y.astype(dtype) for y, dtype in zip(moved, dtypes, strict=True)]
    outs = []
    of_parts = by_part(split.arrays, parts), by_part(dtypes, parts)
    for part, metadata, stamp, arrays, dtypes_out in zip(
        parts, split.metadata, split.stamps, *of_parts, strict=True
    ):
        outs += combine_with_xla(
            place_on(_axes_to_gather(call)),
            metadata,
            _without_padding(arrays, part.capacity),
            axis_names=_axes_to_gather(call),
            num_ranks=call.comm.num_ranks,
            num_tokens=part.num_tokens,
            dtypes=dtypes_out,
            stamp=stamp,
            ragged=ragged,
        )
    return outs


def _axes_to_gather(call):
    """Returns the axes to gather over; None if one device already holds the rows of all ranks."""
    return () if call.is_global else call.comm.axis_names


def _without_padding(arrays, num_rows):
    """Removes the padding of arrays without rows, which custom calls cannot take empty."""
    return [x[:0] for x in arrays] if num_rows == 0 else arrays
